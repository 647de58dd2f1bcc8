"""Settings of the core's own contributions. Defaults of an objective are those of its preset (`loss/presets.py`)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator

from composer_core.loss.presets import PRESETS, Preset
from composer_core.plugins.sandbox_settings import NONE, SandboxBlock, SandboxSettings
from composer_core.plugins.settings import PathKind, Settings

# -- objectives --------------------------------------------------------------------------------------------------------


class Overlong(Settings):
    """DAPO's soft punishment of answers near the length limit, added to the reward."""

    limit: int = Field(ge=1)
    """Tokens at which the reward is lowered by all of `weight`; usually train.max_completion_tokens."""
    cache: int = Field(ge=1)
    """Over how many tokens before the limit the punishment grows from 0."""
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _cache_within_limit(self) -> Self:
        if self.cache > self.limit:
            raise ValueError(f"cache ({self.cache}) must not exceed limit ({self.limit})")
        return self


class LengthPenalty(Settings):
    """Composer's penalty on tokens used, subtracted from the reward: steep at first, flat for long answers.

    The report publishes the form and not its numbers: these are ours.
    """

    weight: float = Field(0.05, gt=0)
    """What the first `per` tokens cost, about, in units of the reward."""
    k: float = Field(1.0, gt=0)
    """How soon the cost flattens."""
    q: float = Field(0.5, ge=0)
    """How much it flattens: 0 is linear, 1 logarithmic, beyond 1 it is bounded."""
    per: int = Field(1000, ge=1)
    """Tokens that count as 1."""


class RolloutCorrection(Settings):
    """Weights for the difference between the inference engine's log-probs and the trainer's."""

    level: Literal["token", "sequence"] = "token"
    """The ratio of each token, or the product over its sequence."""
    rule: Literal["truncate", "mask"] = "truncate"
    """`truncate` caps the ratio at `high` (TIS); `mask` drops what lies outside low..high (IcePop)."""
    high: float = Field(2.0, gt=0)
    low: float = Field(0.0, ge=0)
    """For `mask` only."""

    @model_validator(mode="after")
    def _low_where_used(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if self.low and self.rule == "truncate":
            raise ValueError("low goes with rule: mask; truncate only caps from above")
        return self


class ObjectiveSettings(Settings):
    """What every policy objective of the core takes."""

    scale_rewards: Literal["group", "batch", "none", "mean"] = "group"
    """Divide centred rewards by the group's standard deviation, the batch's, leave them, or by the group's mean."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the starting model; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3-straight-through"] = "k3"
    """`k1` stands in the reward, where it belongs (in a loss its gradient is noise); the others stand in the loss."""
    kl_corrected: bool = True
    """Multiply a KL in the loss by the importance ratio, which makes it unbiased off policy."""
    drop_truncated: bool = False
    """Leave completions that hit the length limit out of the loss."""
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    rollout_correction: RolloutCorrection | None = None
    off_policy_threshold: float | None = Field(None, gt=0)
    """Leave out sequences with a negative advantage whose log-probs fell by more than this per token since sampling."""

    @model_validator(mode="after")
    def _rewards_make_sense(self) -> Self:
        if self.overlong is not None and self.drop_truncated:
            raise ValueError("overlong punishes what drop_truncated leaves out: set drop_truncated: false")
        penalised = {
            "a KL in the reward (k1)": self.kl_coef > 0 and self.kl_estimator == "k1",
            "overlong": self.overlong is not None,
            "length_penalty": self.length_penalty is not None,
        }
        if self.scale_rewards == "mean" and any(penalised.values()):
            what = " and ".join(name for name, asked in penalised.items() if asked)
            raise ValueError(f"scale_rewards: mean needs rewards >= 0, and {what} can make them negative")
        return self


class ClipSettings(ObjectiveSettings):
    """PPO-style clipping of the importance ratio to [1 - epsilon, 1 + epsilon_high]."""

    epsilon: float = Field(0.2, gt=0, lt=1)
    """How far the ratio may fall below 1."""
    epsilon_high: float | None = Field(None, gt=0)
    """How far it may rise above 1; default: epsilon."""
    delta: float | None = Field(None, gt=1)
    """Two-sided clipping: the ratio is capped here for negative advantages too (INTELLECT-2 uses about 4)."""
    dual_clip: float | None = Field(None, gt=1)
    """The loss of a token with a negative advantage is capped at this many times the advantage (verl uses 3)."""


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


class GmpoSettings(ObjectiveSettings):
    """A geometric mean of token ratios, each clipped to [e^-epsilon, e^epsilon_high]."""

    epsilon: float = Field(0.4, gt=0)
    """How far the LOGARITHM of a ratio may fall below 0."""
    epsilon_high: float = Field(0.4, gt=0)
    """How far it may rise above 0."""


class DppoSettings(ObjectiveSettings):
    """A trust region on the sampled token's probability instead of its ratio."""

    measure: Literal["tv", "kl"] = "tv"
    """`tv`: how far the probability moved; `kl`: the KL between "this token or another" before and after."""
    epsilon: float = Field(0.2, gt=0)
    """How far a token with a negative advantage may fall, in probability (tv) or nats (kl)."""
    epsilon_high: float = Field(0.2, gt=0)
    """How far one with a positive advantage may rise."""
    cap: float = Field(20.0, ge=1)
    """Cap of the detached ratio."""


class LmCeSettings(Settings):
    """Plain next-token cross-entropy on the policy's tokens: no rewards, no ratio."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread over the whole vocabulary; above 0 it needs the logits."""


_BASES: dict[str, type[ObjectiveSettings]] = {
    "ppo": ClipSettings,
    "cispo": CispoSettings,
    "sapo": SapoSettings,
    "vespo": VespoSettings,
    "gmpo": GmpoSettings,
    "dppo": DppoSettings,
}


def objective_settings(preset: Preset) -> type[ObjectiveSettings]:
    """The settings model of a preset's clip rule, with the preset's own defaults."""
    base = _BASES[preset.clip]
    own: dict[str, object] = {
        "scale_rewards": preset.scale,
        "drop_truncated": preset.drops_truncated,
        "kl_coef": preset.kl_coef,
        "kl_estimator": preset.kl_estimator,
        "length_penalty": LengthPenalty() if preset.penalises_length else None,
    }
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

    function: Annotated[str, PathKind.FUNCTION] = Field(pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$")
    """`./file.py:function`, relative to the spec."""
    sandbox: SandboxBlock = SandboxSettings(use=NONE)
    """Run the file in a sandbox, in a new process for each completion, so that the function gets lists of one. That
    keeps what it executes away from the machine and from the other completions, and not from its own score: run
    a completion's code as a program of its own."""
    unanswered: float | None = None
    """In a sandbox: the score where the function met a limit or ended its process; null: none, so that it counts in
    no mean."""

    @model_validator(mode="after")
    def _unanswered_where_used(self) -> Self:
        if self.unanswered is not None and self.sandbox.use == NONE:
            raise ValueError("unanswered goes with a sandbox; without one such an end is the run's")
        return self


def python_sandbox(settings: PythonRewardSettings) -> SandboxSettings | None:
    """None for a function that runs in the worker."""
    return None if settings.sandbox.use == NONE else settings.sandbox


class CommandRewardSettings(Settings):
    """A program run once for each completion: 1 when it ends with exit code 0, else 0; or a number that it prints."""

    command: list[str] = Field(min_length=1)
    """Program and arguments; it starts in a folder with `files` and is given the completion on stdin."""
    files: dict[str, str] = {}
    """File name -> what is in it: `completion`, or a column of the data."""
    copy_in: Annotated[str | None, PathKind.ALWAYS] = None
    """A file of yours (relative to the spec) that is put beside those, such as the grader itself."""
    pattern: Pattern | None = None
    """The first group of its last match in stdout is the score, a number; default: the exit code decides."""
    sandbox: SandboxBlock = SandboxSettings()
    """`none` must be said: the program then runs as this user."""
    unanswered: float | None = None
    """The score where the program met a limit, or printed no match of `pattern`; null: none, so that it counts in no
    mean."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.pattern is not None and re.compile(self.pattern).groups < 1:
            raise ValueError("pattern needs a group (...) around the number")
        for name in self.files:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{name!r} must be a name inside the program's folder")
        return self


# -- backend and executor ----------------------------------------------------------------------------------------------


class ToySettings(Settings):
    """The toy trainer needs next to nothing; it exists to prove plugins, not to train models."""

    processes: int = Field(1, ge=1)
    """Processes of this machine that share the prompts of each step, on the CPU."""


class InlineSettings(Settings):
    """One child process of the command itself, on this machine."""

    python: str | None = None
    """Interpreter to run the worker with; default: this one."""
    threads: int | None = Field(None, ge=1)
    """OMP_NUM_THREADS for the worker; tiny models are fastest with 1."""
