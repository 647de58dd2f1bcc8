"""What a spec may say of the channels `sdpo` and `replay`, and what each asks of a trainer. Light: no torch here.

A default is the value we would use; a field says what moving it does. The loss forms themselves are in
`loss/divergence.py` and `loss/preference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from composer_core.loss.preference_forms import PREFERENCE_FORMS, PreferenceForm
from composer_core.plugins.settings import Settings
from composer_core.protocols import Need

# -- sdpo --------------------------------------------------------------------------------------------------------------

Way = Literal["full", "topk", "sampled"]
"""Which vocabulary entries a divergence sees."""
SelfTeacherName = Literal["self-frozen", "self-ema", "self-live"]

NEED_OF: Mapping[Way, Need] = {
    "full": Need.DIVERGENCE_FULL,
    "topk": Need.DIVERGENCE_TOPK,
    "sampled": Need.LOGPS,
}
"""What the trainer must provide for it, best first."""


class TaidSettings(Settings):
    """TAID: the target moves from the student itself towards the teacher as training goes on (2501.16937)."""

    use: Literal["taid"]
    start: float = Field(0.4, ge=0, lt=1)
    """Teacher's share of the target at the first step; at 0 the student imitates itself and learns nothing."""
    end: float = Field(1.0, gt=0, le=1)
    """Its share at the last step."""
    alpha: float = Field(5e-4, ge=0, le=1)
    """How far one step may run ahead of the straight line when the loss falls."""
    momentum: float = Field(0.99, ge=0, lt=1)
    """Decay of the running mean of the loss's relative fall."""
    adaptive: bool = True
    """False: the straight line only. Loosely coupled replicas always use that."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps from start to end; default: those of the run."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"the teacher's share must not fall: start is {self.start:g}, end is {self.end:g}")
        return self


class SoftGateSettings(Settings):
    """Forward KL where the teacher is unsure, reverse KL where it is sure, mixed by its entropy."""

    use: Literal["soft"]
    h_max: float | None = Field(None, gt=0)
    """Entropy, in nats, from which on only the forward KL counts; default: log of the vocabulary."""


class PaperGateSettings(Settings):
    """Reverse KL everywhere, plus alpha x forward KL on tokens where the teacher's entropy exceeds tau (2603.07079)."""

    use: Literal["paper"]
    tau: float = Field(0.8, ge=0)
    """Nats."""
    alpha: float = Field(1.0, gt=0)
    k: int = Field(16, ge=1)
    """The forward KL is over the teacher's top k tokens."""


class HintSettings(Settings):
    """Which hint the teacher reads, and where."""

    at: Literal["turn", "prompt-end", "system"] = "turn"
    """`turn`: a message before the faulty turn; `prompt-end`: at the end of the last prompt message; `system`: in the
    system message."""
    span: Literal["turn", "rest"] = "turn"
    """What is taught: the faulty turn's own tokens, or all that the policy wrote from there on. A hint about the whole
    answer always teaches all of it."""
    column: str | None = Field(None, min_length=1)
    """A column of the data that holds a hint about the whole answer (null: none for this row), instead of hints made
    from errors in the rollout."""
    templates: dict[str, str] = {}
    """Texts of hints by kind of error, in place of the built-in ones, with `$name` for what the context holds."""


class SdpoSettings(Settings):
    """Self-distillation: the policy with a hint teaches the policy without it."""

    divergence: Literal["jsd", "kl_teacher_student", "kl_student_teacher"] = "jsd"
    """Named by the formula: `kl_teacher_student` is KL(teacher || student). Its gradient is several times that of
    `jsd`, so the weight wants to be smaller."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Teacher's share of the mixture, for `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Both sides' logits are divided by it; above 1 unlikely tokens teach more."""
    support: Literal["auto", "full", "topk", "sampled"] = "auto"
    """Which vocabulary entries count. `auto`: the first of `full`, `topk`, `sampled` that the trainer provides; the
    plan says which. `sampled` sees only the token that was sampled, and needs divergence: kl_student_teacher."""
    k: int = Field(100, ge=1)
    """Entries kept by `topk`."""
    side: Literal["student", "teacher", "union"] = "student"
    """Whose most likely entries `topk` keeps."""
    tail: bool = True
    """`topk` keeps the other entries as one, so that equal distributions give 0; without it the loss is biased."""
    token_clip: float | None = Field(None, gt=0)
    """Cap on each token's divergence, after the sum over the vocabulary."""
    target: TaidSettings | None = None
    """`{use: taid, ...}`: a target between student and teacher. Default: the teacher."""
    gate: SoftGateSettings | PaperGateSettings | None = Field(None, discriminator="use")
    """`{use: soft}` or `{use: paper}`: forward and reverse KL by the teacher's entropy, in place of `divergence`."""
    teacher: SelfTeacherName | Annotated[str, Field(min_length=1)] = "self-frozen"
    """Who reads the hint: the starting model, a moving average of the policy (`self-ema`), the policy of today
    (`self-live`), or a teacher of yours by its name under `teachers:`. `self` is `self-frozen`. A live teacher forgets
    how to read hints at a high learning rate. Yours must have the policy's tokenizer and a server that `scores`; it
    needs divergence: kl_student_teacher."""
    ema_rate: float = Field(0.05, gt=0, le=1)
    """How much of the policy goes into the average at each step, for `self-ema`."""
    on: Literal["failed", "all"] = "failed"
    """Which rollouts are hinted: those with a reward below `success`, or all. Recorded traces are hinted at their
    errors; `failed` spares those whose reward reaches `success`."""
    success: float = 1.0
    """Reward from which on a rollout has not failed."""
    is_clip: float | None = Field(2.0, gt=0)
    """Cap on the importance ratio that weights each token when the policy has moved since it sampled; null: none."""
    hint_gain: bool = True
    """Log by how much the hint raises the log-prob of the sampled tokens (at `temperature`), on average. Near zero the
    hints carry no information, and then they hurt; a good hint lowers it where the tokens are wrong."""
    hints: HintSettings = HintSettings()

    @field_validator("teacher", mode="before")
    @classmethod
    def _self_is_frozen(cls, value: object) -> object:
        return "self-frozen" if value == "self" else value

    @model_validator(mode="after")
    def _one_formula(self) -> Self:
        if self.support == "sampled" and not self.can_be_sampled:
            raise ValueError(
                "sampled support has one formula: divergence: kl_student_teacher, without target, gate, token_clip and "
                "temperature"
            )
        if self.named_teacher is not None and not (self.can_be_sampled and self.support in ("auto", "sampled")):
            raise ValueError(
                f"teacher {self.named_teacher!r} is none of {', '.join(get_args(SelfTeacherName))}, so it is one of "
                "yours, and a server gives log-probs of tokens, not distributions: set divergence: kl_student_teacher, "
                "and leave out target, gate, token_clip, temperature and any support but sampled"
            )
        return self

    @property
    def named_teacher(self) -> str | None:
        """The name under `teachers:` of who reads the hint; None where it is the policy itself."""
        return None if self.teacher in get_args(SelfTeacherName) else self.teacher

    @property
    def can_be_sampled(self) -> bool:
        """Whether the sampled token alone gives an estimate of this divergence."""
        plain = self.target is None and self.gate is None and self.token_clip is None and self.temperature == 1
        return self.divergence == "kl_student_teacher" and plain


_NEED_OF_TEACHER: Mapping[str, frozenset[Need]] = {
    "self-frozen": frozenset({Need.REFERENCE}),
    "self-ema": frozenset({Need.EMA}),
    "self-live": frozenset(),
}


def sdpo_needs(settings: SdpoSettings) -> tuple[frozenset[Need], ...]:
    """Alternatives, best first."""
    beside = set(_NEED_OF_TEACHER.get(settings.teacher, ()))
    if settings.target is not None:
        beside.add(Need.STATE)
    return tuple(frozenset({NEED_OF[way], Need.LOGPS} | beside) for way in ways(settings))


def sdpo_teachers(settings: SdpoSettings) -> tuple[str, ...]:
    """Who must score hinted texts for it."""
    return () if settings.named_teacher is None else (settings.named_teacher,)


def ways(settings: SdpoSettings) -> tuple[Way, ...]:
    """The ways in which a spec lets this divergence be computed, best first."""
    if settings.named_teacher is not None:
        return ("sampled",)
    if settings.support != "auto":
        return (settings.support,)
    if settings.gate is not None:
        return ("full",)
    return ("full", "topk", "sampled") if settings.can_be_sampled else ("full", "topk")


# -- replay ------------------------------------------------------------------------------------------------------------


class ReplaySettings(Settings):
    """Preference pairs: what teachers agreed on against what the agent did."""

    variant: Literal["dpo", "robust", "ipo", "simpo", "sigmoid-norm", "apo-zero", "apo-down", "orpo", "imitate"] = "dpo"
    """The loss of a pair (`loss/preference_forms.py`). `simpo`, `orpo` and `imitate` need no reference; `imitate` only
    raises the chosen answer. `kto` compares with answers to other prompts, which pairs do not hold: use `apo-zero`."""
    beta: float | None = Field(None, gt=0)
    """How sharply the margin counts; default: the variant's own (dpo 0.1, simpo 2.0, sigmoid-norm 5.0, ...)."""
    gamma: float | None = Field(None, ge=0)
    """Margin that the chosen answer must win by, for `simpo`; default 1.0."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """Share of pairs believed to be the wrong way round, for `dpo`, `simpo` (default 0) and `robust` (0.1)."""
    reference: Literal["stored", "model"] = "stored"
    """Where reference log-probs come from: the pair file, or the starting model, at two more forwards a step."""
    pairs_per_step: int = Field(8, ge=1)
    """Pairs in one optimiser step, over all processes."""
    max_tokens: int = Field(4096, ge=2)
    """Pairs with a longer side are left out, and counted."""
    seed: int = 0
    """Order of the pairs."""

    @model_validator(mode="after")
    def _numbers_of_the_variant(self) -> Self:
        for name in ("beta", "gamma", "label_smoothing"):
            if getattr(self, name) is not None and name not in self.form.defaults:
                takes = ", ".join(self.form.defaults) or "no number"
                raise ValueError(f"variant {self.variant} has no {name}: it takes {takes}")
        return self

    @property
    def form(self) -> PreferenceForm:
        """The variant's row of the table."""
        return PREFERENCE_FORMS[self.variant]

    @property
    def numbers(self) -> dict[str, float]:
        """What the variant's function takes by keyword."""
        given = {"beta": self.beta, "gamma": self.gamma, "label_smoothing": self.label_smoothing}
        return {**self.form.defaults, **{name: value for name, value in given.items() if value is not None}}


def replay_needs(settings: ReplaySettings) -> tuple[frozenset[Need], ...]:
    """One way only."""
    needs = {Need.LOGPS, Need.PAIRS}
    if settings.form.reference and settings.reference == "model":
        needs.add(Need.REFERENCE)
    return (frozenset(needs),)
