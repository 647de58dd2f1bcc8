"""Sections of the run spec beside the trainer's own step: recorded data, replay by teachers, replicas, rollouts.

`model.py` holds the spec as a whole and what every trainer reads. A section here is None unless the spec has it; which
backend carries it out is told by `model.OPTIONAL`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from composer_core.plugins.settings import Settings

Function = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$")]


class TracesSpec(Settings):
    """Recorded sessions of an agent."""

    path: str
    """A file, or a folder that is searched (relative to the spec; `~` is your home)."""
    format: str = "auto"
    """Name of an installed trace reader; `auto` asks each of them which files are its own."""


class PairsSpec(Settings):
    """Preference pairs that `composer-run replay` wrote."""

    path: str
    """A JSONL file (relative to the spec)."""


class EnvironmentSpec(Settings):
    """What the agent acts on during a rollout."""

    use: Literal["python"]
    """A class or function of your own."""
    factory: Function
    """`./file.py:make`, relative to the spec; makes an environment. Each rollout has one to itself, and begins with its
    `reset`."""


class RolloutSpec(Settings):
    """How the policy acts while data is sampled; without it a rollout is one prompt and one completion."""

    max_turns: int = Field(8, ge=1)
    """Assistant turns after which a rollout ends; what it has by then is scored."""
    tools: list[Function] = []
    """Functions that the policy may call, as `./file.py:function` (relative to the spec)."""
    environment: EnvironmentSpec | None = None
    """State that tools and rewards share; each rollout gets its own."""


class DataJuicerSpec(Settings):
    """A further clean-up by data-juicer, run as a program of its own interpreter on a copy of the pairs."""

    python: str
    """That interpreter, where `pip install py-data-juicer` was run."""
    recipe: str | None = None
    """Its YAML list of operators (relative to the spec); default: filters for length and repeated words."""


class NormaliseSpec(Settings):
    """What is done to pairs before they are written."""

    redact: bool = True
    """Replace keys, tokens, passwords, e-mail addresses and card numbers by `<redacted: kind>`."""
    max_tool_result_chars: int | None = Field(4000, ge=100)
    """Longer tool results lose their middle; names and arguments of calls stay whole."""
    max_chars: int | None = Field(200_000, ge=1)
    """Pairs longer than this, history included, are dropped."""
    data_juicer: DataJuicerSpec | None = None


class ReplaySpec(Settings):
    """How `composer-run replay` asks teachers for the agent's recorded steps; training does not read it."""

    teachers: list[str] = []
    """Names from `teachers:`; default all of them."""
    agreement: int = Field(2, ge=1)
    """Teachers that must give the same action, different from the agent's, before a pair is made. More agreement means
    fewer pairs and fewer wrong ones."""
    strip_thinking: bool = True
    """Leave thinking out of the history that teachers see and of the answers that are compared."""
    max_history_tokens: int | None = Field(None, ge=1)
    """Longest history sent to a teacher; older turns are dropped first. Default: all of it."""
    system_prompt: str | None = None
    """Put in front of recorded sessions that do not begin with a system message."""
    samples: int = Field(1, ge=1)
    """Answers per teacher and state; several of one teacher count as one voice where they agree."""
    normalise: NormaliseSpec = NormaliseSpec()


class ReplicasSpec(Settings):
    """Loosely coupled copies of the run that average what they learnt (DiLoCo)."""

    count: int = Field(ge=2)
    """Copies; each is one job of the executor and samples its own data."""
    every: int = Field(100, ge=1)
    """Optimiser steps between two averages: more steps need less traffic and drift further apart."""
    store: str | None = None
    """Where replicas exchange weights: a folder that all reach (relative to the spec), or a URL such as
    `s3://bucket/run`. Default: the run directory."""
