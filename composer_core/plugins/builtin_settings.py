"""Settings of the core's own contributions. Defaults of an objective are those of its preset (`loss/presets.py`)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator

from composer_core.loss.presets import PRESETS, Preset
from composer_core.plugins.settings import Settings

# -- objectives --------------------------------------------------------------------------------------------------------


class ObjectiveSettings(Settings):
    """What every objective of the core takes."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centred rewards by the group's standard deviation, the batch's, or leave them."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the starting model (k3 estimator) in the loss; 0 loads no reference model."""
    drop_truncated: bool = False
    """Leave completions that hit the length limit out of the loss."""


class ClipSettings(ObjectiveSettings):
    """PPO-style clipping of the importance ratio to [1 - epsilon, 1 + epsilon_high]."""

    epsilon: float = Field(0.2, gt=0, lt=1)
    """How far the ratio may fall below 1."""
    epsilon_high: float | None = Field(None, gt=0)
    """How far it may rise above 1; default: epsilon."""
    delta: float | None = Field(None, gt=1)
    """Two-sided clipping: the ratio is capped here for negative advantages too (INTELLECT-2 uses about 4)."""


class CispoSettings(ObjectiveSettings):
    """A detached ratio, capped from above."""

    epsilon_high: float = Field(5.0, ge=1)
    """The cap itself, NOT a distance from 1: at 0.2 every gradient would silently shrink to a fifth."""


class SapoSettings(ObjectiveSettings):
    """A sigmoid gate; the larger the temperature, the sooner a token far from ratio 1 fades."""

    temperature_positive: float = Field(1.0, gt=0)
    temperature_negative: float = Field(1.05, gt=0)


class VespoSettings(ObjectiveSettings):
    """A gamma density of the sequence ratio, with a shape for each sign of the advantage."""

    k_positive: float = Field(2.0, gt=0)
    lambda_positive: float = Field(3.0, gt=0)
    k_negative: float = Field(3.0, gt=0)
    lambda_negative: float = Field(2.0, gt=0)


_BASES: dict[str, type[ObjectiveSettings]] = {
    "ppo": ClipSettings,
    "cispo": CispoSettings,
    "sapo": SapoSettings,
    "vespo": VespoSettings,
}


def objective_settings(preset: Preset) -> type[ObjectiveSettings]:
    """The settings model of a preset's clip rule, with the preset's own defaults."""
    base = _BASES[preset.clip]
    own: dict[str, object] = {"scale_rewards": preset.scale, "drop_truncated": preset.drops_truncated}
    if preset.clip == "ppo":
        own |= {"epsilon": preset.epsilon, "epsilon_high": preset.epsilon_high}
    fields: dict[str, Any] = {}
    for name, default in own.items():
        field = base.model_fields[name]
        fields[name] = (field.rebuild_annotation(), Field(default, description=field.description))
    title = "".join(part.title() for part in preset.name.split("-"))
    return create_model(f"{title}Settings", __base__=base, __doc__=base.__doc__, **fields)


OBJECTIVE_SETTINGS = {name: objective_settings(preset) for name, preset in PRESETS.items()}

# -- rewards -----------------------------------------------------------------------------------------------------------


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


class ExactMatchSettings(Settings):
    """1 when the extracted answer equals the row's answer, else 0. Numbers are compared as numbers: 1,000 = 1000.0."""

    extract: Literal["boxed", "hash", "last-number", "regex", "whole"] = "last-number"
    r"""Where the answer stands in the completion: `boxed` (the last \boxed{...}), `hash` (after the last ####),
    `last-number`, `regex` (group 1 of the last match of `pattern`), `whole` (all of it)."""
    pattern: Pattern | None = None
    """For `extract: regex`; the first group is the answer."""
    answer: str = "answer"
    """The column that holds the expected answer; text after its last #### counts where there is one."""

    @model_validator(mode="after")
    def _pattern_where_used(self) -> Self:
        if (self.extract == "regex") != (self.pattern is not None):
            raise ValueError("pattern goes with extract: regex, and only with it")
        if self.pattern is not None and re.compile(self.pattern).groups < 1:
            raise ValueError("pattern needs a group (...) around the answer")
        return self


class ContainsSettings(Settings):
    """1 when the completion contains a text, else 0."""

    text: str | None = Field(None, min_length=1)
    """The text to look for, the same for every row."""
    column: str | None = None
    """Or the column that holds it."""
    ignore_case: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.text is None) == (self.column is None):
            raise ValueError("give either text or column")
        return self


class RegexSettings(Settings):
    """How much of the completion matches a regular expression."""

    pattern: Pattern
    score: Literal["share", "any", "whole"] = "share"
    """`share`: matched characters / all characters; `any`: 1 if it matches somewhere; `whole`: 1 if all of it does."""


class LengthSettings(Settings):
    """1 at the target length, falling linearly to 0 at `tolerance` away from it."""

    target: int = Field(ge=1)
    """Characters, or words."""
    tolerance: int = Field(ge=1)
    unit: Literal["characters", "words"] = "characters"


class PythonRewardSettings(Settings):
    """Your own function, with TRL's signature: `def reward(completions, **columns) -> list[float | None]`."""

    function: str = Field(pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$")
    """`./file.py:function`, relative to the spec."""


# -- backend and executor ----------------------------------------------------------------------------------------------


class ToySettings(Settings):
    """The toy trainer needs nothing; it exists to prove plugins, not to train models."""

    device: Literal["cpu"] = "cpu"


class InlineSettings(Settings):
    """One child process of the command itself, on this machine."""

    python: str | None = None
    """Interpreter to run the worker with; default: this one."""
    threads: int | None = Field(None, ge=1)
    """OMP_NUM_THREADS for the worker; tiny models are fastest with 1."""
