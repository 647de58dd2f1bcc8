"""Summed log-probs of both answers of each pair under a reference model, for losses that compare with one.

Kept in the database by model and token ids, so an interrupted pass goes on where it was. Needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from composer_core.batch import Seqs
from composer_core.loss.reduce import segment_sum, select
from composer_core.loss.views import ModelView
from composer_core.teachers.database import Database
from composer_core.teachers.pair_rows import PairIds, pair_ids
from composer_core.teachers.pairs import Pair
from composer_core.traces.chat_template import ChatTemplate

BATCH_TOKENS = 4096
"""Tokens of both answers in one forward."""


def with_reference(
    pairs: Sequence[Pair],
    folder: Path,
    database: Database,
    *,
    name: str,
    max_tokens: int | None = None,
    on_pair: Callable[[int], None] | None = None,
) -> tuple[list[Pair], Counter[str]]:
    """Pairs with `ref` filled in; those that the model's chat template cannot write are left out and counted.

    Args:
        pairs: of pairs.jsonl.
        folder: the reference model, a Hugging Face folder.
        database: where finished ones are kept.
        name: what `ref.model` says.
        max_tokens: longest prompt plus answer; default: as many as the model has positions for.
        on_pair: called with the number of pairs done so far.

    Raises:
        UsageError, MissingError: the model or its tokenizer cannot be loaded.
    """
    from composer_core.hf.models import load_policy, load_tokenizer

    dropped: Counter[str] = Counter()
    tokenizer = load_tokenizer(folder)
    longest = max_tokens or _positions(folder)
    ids = list(pair_ids(pairs, ChatTemplate(tokenizer), max_tokens=longest, dropped=dropped))
    identity = _identity(folder)
    known = {index: _stored(database, _key(identity, one)) for index, one in enumerate(ids)}
    missing = [index for index, found in known.items() if found is None]
    if missing:
        model = load_policy(folder, dtype="float32")
        for indices in _batches(ids, missing):
            sums = _sums(model, [ids[index] for index in indices])
            with database.write() as transaction:
                for index, values in zip(indices, sums, strict=True):
                    known[index] = values
                    row = (_key(identity, ids[index]), *values)
                    transaction.execute("INSERT OR REPLACE INTO reference VALUES (?, ?, ?)", row)
            if on_pair is not None:
                on_pair(sum(found is not None for found in known.values()))
    done = []
    for index, one in enumerate(ids):
        found = known[index]
        if found is not None:
            done.append(replace(one.pair, ref={"model": name, "chosen": found[0], "rejected": found[1]}))
    return done, dropped


def _sums(model: torch.nn.Module, batch: Sequence[PairIds]) -> list[tuple[float, float]]:
    """(chosen, rejected) of each pair, at temperature 1."""
    sides = [(one.prompt, answer) for one in batch for answer in (one.chosen, one.rejected)]
    seqs = Seqs.from_lists([[*prompt, *answer] for prompt, answer in sides])
    action = torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in sides])
    logps = ModelView(model, rollouts=None).logps(replace(seqs, scored=action), grad=False, temperature=1.0)
    sums = segment_sum(select(logps, action), seqs).tolist()
    return [(float(sums[2 * i]), float(sums[2 * i + 1])) for i in range(len(batch))]


def _batches(ids: Sequence[PairIds], indices: Sequence[int]) -> Iterator[list[int]]:
    """Pairs of like length together, so that little is padded."""
    batch: list[int] = []
    width = 0
    for index in sorted(indices, key=lambda i: _length(ids[i])):
        width = max(width, _length(ids[index]))
        if batch and 2 * width * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch, width = [], _length(ids[index])
        batch.append(index)
    if batch:
        yield batch


def _length(ids: PairIds) -> int:
    return len(ids.prompt) + max(len(ids.chosen), len(ids.rejected))


def _positions(folder: Path) -> int | None:
    """Tokens that the model was made for; beyond, log-probs mean nothing. None where its config does not say."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(found) if found else None


def _identity(folder: Path) -> str:
    """The weights' files with size and time: cheap, and another model at the same place is noticed."""
    files = sorted(folder.glob("*.safetensors"))
    return json.dumps([str(folder), [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]])


def _key(identity: str, ids: PairIds) -> str:
    text = json.dumps([identity, ids.prompt, ids.chosen, ids.rejected])
    return hashlib.sha256(text.encode()).hexdigest()


def _stored(database: Database, key: str) -> tuple[float, float] | None:
    rows = database.read("SELECT chosen, rejected FROM reference WHERE key = ?", key)
    return (float(str(rows[0][0])), float(str(rows[0][1]))) if rows else None
