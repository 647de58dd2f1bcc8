"""Looks at a spec's data, model folder and rewards before anything is written; without torch or transformers.

What only a worker can look at (a dataset or model on the Hub, a third party's reward) is named in a line, not tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composer_core.data.prompts import load_prompts
from composer_core.data.rewards import build_reward, columns_needed, named
from composer_core.data.scoring import CheckedReward
from composer_core.errors import RunFailed, UsageError
from composer_core.hf.source import check_folder, has_chat_template, local_folder
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import CORE, Registry
from composer_core.run.context import NamedReward
from composer_core.spec.environment import fill_spec
from composer_core.spec.model import ModelSpec, PromptsSpec, RunSpec

_SHOWN = 40
_PROMPTS, _RECORDED = "prompts", "recorded sessions and pairs"
"""What may be chats."""


def preflight(spec: RunSpec, registry: Registry) -> list[str]:
    """What the run will start from, one line per thing; `${env:NAME}` filled in for the look, not in what is returned.

    The core's own rewards, `python` among them, are called once, on an empty completion and a likely one.

    Raises:
        UsageError: something the user gave is wrong, with its place.
        MissingError: something is not installed, or an environment variable is not set.
    """
    spec = fill_spec(spec, os.environ)
    prompts = spec.data.prompts
    rows: list[dict[str, Any]] = []
    lines = [_model_line(spec.model, chats=_RECORDED if prompts is None else _PROMPTS if prompts.chat else "")]
    rewards, left = _own_rewards(spec, registry)
    if prompts is not None:
        rows, line = _prompts(prompts, columns_needed(rewards))
        lines.append(f"prompts: {line}")
    if spec.data.eval is not None:
        lines.append(f"held-out prompts: {_prompts(spec.data.eval, columns_needed(rewards))[1]}")
    lines += _recordings(spec)
    for reward in rewards:
        # a reward may look at the environments of rollouts, and there are none yet
        now = bool(rows) and (spec.rollout is None or spec.rollout.environment is None)
        tried = _try(reward, rows[0], steps=spec.train.steps) if now else "tried when the run starts"
        lines.append(_reward_line(reward, tried))
    return lines + left


def _prompts(spec: PromptsSpec, needed: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """The rows, none of a dataset, which a worker reads; and a line about them."""
    if spec.dataset is not None:
        return [], f"dataset {spec.dataset}, read when the run starts"
    rows = load_prompts(spec, columns_needed=needed)
    return rows, _prompts_line(spec, rows)


def _recordings(spec: RunSpec) -> Iterator[str]:
    for what, section in (("traces", spec.data.traces), ("pairs", spec.data.pairs)):
        if section is None:
            continue
        if Path(section.path).exists():
            yield f"{what}: {section.path}"
        elif what == "pairs" and spec.teachers:
            yield f"pairs: {section.path}, not there yet; composer-run replay writes it"
        else:
            fix = "paths are relative to the spec"
            raise UsageError(f"no such file, which data.{what} names", at=section.path, fix=fix)


def _model_line(model: ModelSpec, *, chats: str) -> str:
    """`chats` says what is rendered by the model's chat template; empty where nothing is."""
    if model.builtin is not None:
        return f"model: built-in {model.builtin}"
    folder = local_folder(model)
    if folder is None:
        return f"model: {model.path}, from the Hugging Face Hub when the run starts"
    check_folder(folder, gguf_file=model.gguf_file)
    if model.gguf_file is not None:
        return f"model: {folder / model.gguf_file}"
    if chats and not has_chat_template(folder):
        text = "data.prompts.chat: false continues prompts as raw text"
        raise UsageError(
            f"the tokenizer in this folder has no chat template, and {chats} are chats",
            at=str(folder),
            fix=text if chats == _PROMPTS else "take a model that is made for chats",
        )
    return f"model: {folder}"


def _prompts_line(spec: PromptsSpec, rows: list[dict[str, Any]]) -> str:
    source = Path(spec.path).name if spec.path is not None else f"built-in {spec.builtin}"
    count = f"{len(rows)} row" if len(rows) == 1 else f"{len(rows)} rows"
    others = ", ".join(name for name in rows[0] if name != "prompt")
    return f"{count} from {source}, " + (f"columns {others}" if others else "no other columns")


def _own_rewards(spec: RunSpec, registry: Registry) -> tuple[list[NamedReward], list[str]]:
    """The core's rewards, made; and a line for each of the others, whose code a worker will import."""
    own, left = [], []
    for name, plugged in named(spec.data.rewards):
        owner, _ = registry.get(Kind.REWARD, plugged.use)
        if owner.name == CORE:
            own.append(build_reward(name, plugged, registry=registry))
        else:
            left.append(f"reward {name} (weight {plugged.weight:g}): from {owner}, tried when the run starts")
    return own, left


def _reward_line(reward: NamedReward, what: str) -> str:
    return f"reward {reward.name} (weight {reward.weight:g}): {what}"


def _try(reward: NamedReward, row: Mapping[str, Any], *, steps: int) -> str:
    """The scores of two completions of the first row, in words."""
    texts = ["", _likely_completion(reward, row)]
    chat = isinstance(row["prompt"], list)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    columns = {name: [value] * 2 for name, value in row.items() if name != "prompt"}
    # What trainers hand to a reward besides the columns, in the shape of TRL's.
    columns |= {"prompts": [row["prompt"]] * 2, "completion_ids": [[0], [0]]}
    state = SimpleNamespace(global_step=0, max_steps=steps)
    try:
        empty, likely = reward.score(
            completions, **columns, trainer_state=state, log_extra=_drop, log_metric=_drop, environments=None
        )
    except RunFailed as error:  # nothing has started: it is the spec, or a file it names, that must change
        raise UsageError(f"tried on the first prompt: {error.problem}", at=error.at, fix=error.fix) from error
    shown = texts[1] if len(texts[1]) <= _SHOWN else f"...{texts[1][-_SHOWN:]}"
    return f"{_score(empty)} for an empty completion, {_score(likely)} for {shown!r}"


def _likely_completion(reward: NamedReward, row: Mapping[str, Any]) -> str:
    wanted = reward.score.columns() if isinstance(reward.score, CheckedReward) else ()
    scalars = [row[name] for name in wanted if isinstance(row[name], str | int | float)]
    return str(scalars[0]) if scalars else "1"


def _score(value: float | None) -> str:
    return "no score" if value is None else f"{value:g}"


def _drop(*args: object) -> None:
    """Stands for TRL's `log_extra` and `log_metric`: there is no log yet."""
