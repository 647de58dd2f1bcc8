"""One way to ask for GPUs, `H200:8`, and what the services call the kinds.

To add a kind, add it to the table of each service that has it. A site's own names (Slurm's `Gres=gpu:<name>`) come
from the settings, over the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TEXT = re.compile(r"([A-Za-z][A-Za-z0-9-]*)(?::([1-9][0-9]*))?")
_KINDS = ("A10G", "A100", "A100-40G", "A100-80G", "B200", "B300", "H100", "H200", "H20", "L4", "L40S", "T4", "V100")
ANY = "any"
"""The kind that takes whatever there is."""
SLURM: Mapping[str, str] = {ANY: "", **{kind: kind.lower().replace("-", "_") for kind in _KINDS}}
"""Usual names of generic resources; every cluster is free to choose others."""
RAY: Mapping[str, str] = {ANY: "", **{kind: kind for kind in _KINDS}}
"""Ray's accelerator types."""


@dataclass(frozen=True)
class Gpu:
    """GPUs of one replica."""

    kind: str
    count: int


def parse_gpu(text: str) -> Gpu:
    """`H200:8`, `H200` (one) or `any:2`.

    Raises:
        ValueError: it is not written so.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} must be a kind and a number, such as H200:8, or any:2 for whatever there is")
    kind = ANY if found[1].lower() == ANY else found[1].upper()
    return Gpu(kind, int(found[2] or 1))


def in_words_of(gpu: Gpu, table: Mapping[str, str], *, service: str) -> tuple[str, int]:
    """The service's own name of the kind, and how many.

    Raises:
        ValueError: the service does not have the kind; the message lists those it has.
    """
    if gpu.kind not in table:
        raise ValueError(f"{service} has no GPU of kind {gpu.kind!r}; it has {', '.join(sorted(table))}")
    return table[gpu.kind], gpu.count
