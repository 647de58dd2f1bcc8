"""What `rollouts` asks of the rest of a spec: prompts and rewards where it generates, recorded data where it does not.

Rules over keys of several sections, on the spec as it was read, so that they are told beside all other mistakes. To
refuse one more key with `rollouts: none`, add it to `_UNREAD`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.errors import Problem
from composer_core.spec.errors import problem_at, required, show
from composer_core.spec.model import DataSpec, LossSpec, Plugged, TrainSpec
from composer_core.spec.yaml import Place

GENERATE, NONE = "generate", "none"
CROSS_ENTROPY = "lm-ce"
"""The one objective that compares no rewards."""
_UNREAD = (
    "data.prompts",
    "data.rewards",
    "data.eval",
    "rollout",
    "train.group_size",
    "train.iterations",
    "train.max_completion_tokens",
    "train.temperature",
    "train.top_p",
    "train.top_k",
    "train.sample_rollouts",
    "limits.kl",
    "limits.reward_drop",
)
"""Keys that speak of generated rollouts; at its default a key says nothing."""


def rollouts_problems(data: Mapping[str, Any], places: Mapping[str, Place]) -> list[Problem]:
    """What is wrong with a spec as it was read, its `use:` blocks resolved, in view of its `rollouts`."""
    asked = data.get("rollouts", GENERATE)
    if asked == NONE:
        return [*_unread(data, places), *_nothing_to_learn(data, places)]
    return list(_missing(data, places)) if asked == GENERATE else []


def _missing(data: Mapping[str, Any], places: Mapping[str, Place]) -> Iterator[Problem]:
    for section, name, model in (
        ("data", "prompts", DataSpec),
        ("data", "rewards", DataSpec),
        ("loss", "objective", LossSpec),
    ):
        found, key = data.get(section), f"{section}.{name}"
        if not isinstance(found, Mapping):
            continue  # that is told already
        if name not in found:
            yield required(places, key, model)
        elif found[name] == []:
            yield problem_at(places, key, "must have at least 1 of them, got 0")
        elif found[name] is None:
            yield problem_at(places, key, f"must be a section (key: value), got {show(None)}")


def _unread(data: Mapping[str, Any], places: Mapping[str, Place]) -> Iterator[Problem]:
    for key in _UNREAD:
        value = _at(data, key)
        section, _, name = key.partition(".")
        default = TrainSpec.model_fields[name].default if section == "train" else None
        if value is not None and value != default and value != []:
            problem = "rollouts is none: nothing is generated or scored, so nothing would read this"
            yield problem_at(places, key, problem, fix="leave it out, or rollouts: generate")


def _nothing_to_learn(data: Mapping[str, Any], places: Mapping[str, Place]) -> Iterator[Problem]:
    recorded, loss = data.get("data"), data.get("loss")
    traces, pairs = _at(data, "data.traces"), _at(data, "data.pairs")
    if isinstance(recorded, Mapping) and traces is None and pairs is None:
        problem = "rollouts is none, and there is nothing recorded to learn from"
        yield problem_at(places, "data", problem, fix="data.traces: {path: ...}, data.pairs: {path: ...}, or both")
    if not isinstance(loss, Mapping):
        return
    objective, channels = loss.get("objective"), loss.get("channels")
    named = isinstance(objective, Plugged) and objective.name
    if named and named != CROSS_ENTROPY:
        problem = f"objective {named!r} compares the rewards of generated rollouts, and rollouts is none"
        yield problem_at(places, "loss.objective.use", problem, fix=f"{CROSS_ENTROPY}, or leave the objective out")
    elif named and traces is None and pairs is not None:
        problem = f"objective {named!r} learns from recorded traces, and there are none"
        yield problem_at(places, "loss.objective.use", problem, fix="data.traces: {path: ...}")
    elif objective is None and not any(_computed(channel) for channel in channels or []):
        problem = "rollouts is none, and there is neither a channel with a weight nor an objective"
        yield problem_at(places, "loss", problem, fix=f"add a channel, or objective: {{use: {CROSS_ENTROPY}}}")


def _computed(channel: Any) -> bool:
    return not isinstance(channel, Plugged) or channel.weight != 0  # what is no block is told already


def _at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
