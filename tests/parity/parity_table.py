"""The table that every backend is held to: fixed rollouts, hints, pairs and channels, and one row per circumstance.

No backend is named here. `parity_reference.py` says what each row must give; a backend joins with one file,
`join_<name>.py`, that has a `joiner` (see `Joiner`). To add a circumstance, add a row to `CASES`, above it why.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "third_party" / "acme-composer"))
from acme_composer.channel import Brevity
from acme_composer.plugin import BrevitySettings

from composer_core.batch import Batch
from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo, TaidSdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.lm_ce import LmCe
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, LmCeSettings
from composer_core.protocols import Need, RolloutText, Term

# -- what was sampled --------------------------------------------------------------------------------------------------

GROUP_SIZE = 2
LONGEST = 12
"""Completion tokens allowed."""
PROMPTS = [[10, 11, 12], [13], [14, 15, 16, 17, 18], [19, 20]]
"""One per group, of four lengths: padded by 2, 4, 0 and 3."""
LENGTHS = [5, 2, 11, 1, 9, 4, 12, 6]
END = 1
TRUNCATED = 6
"""The rollout that hit the limit."""
COMPLETIONS = [
    [30 + (7 * i + 3 * j) % 60 for j in range(n - 1)] + [END if i != TRUNCATED else 89] for i, n in enumerate(LENGTHS)
]
TOOL = {2: (range(3, 5), range(7, 8)), 4: (range(2, 4),), 7: (range(6),)}
"""Rollout -> tokens that came from a tool: twice in the middle of a trace, once, and all there is of another."""
REWARDS = [0.0, 1.0, 0.25, 0.5, 0.5, 1.0, 1.0, 0.5]
"""Within each group they differ. Rollouts 0 and 2 have failed: of two processes the second has no hint."""
SUCCESS = 0.5
HINT = [90, 91, 92]
PAIRS = [pair_row(PROMPTS[i], [40 + i] * (i + 1), [50, 51], reference=(-4.5 * (i + 1), -9.5)) for i in range(4)]
"""Answers of lengths 1 to 4; three pairs in a step, so that micro-batches and ranks share them unequally."""


# -- channels ----------------------------------------------------------------------------------------------------------


class Hinted(Sdpo):
    """A hint before each later turn of a failed rollout, or before its only one: one segment each."""

    def prepare(self, rollout: RolloutText):
        """In the middle of the trace where it has several turns, as `traces/rows.py` puts it, without a tokenizer."""
        if rollout.reward is None or rollout.reward >= SUCCESS:
            return None
        own, first = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
        flags = list(rollout.action)
        starts = [j for j, flag in enumerate(flags) if flag and (j == 0 or not flags[j - 1])]
        segments = []
        for turn in starts[1:] or starts:
            end = next((j for j in range(turn, len(flags)) if not flags[j]), len(flags))
            student = list(range(first + turn, first + end))
            segments.append(
                Segment(
                    teacher_ids=[*own[: first + turn], *HINT, *own[first + turn :]],
                    student=student,
                    teacher=[at + len(HINT) for at in student],
                    weight=[1.0 + 0.5 * k for k in range(len(student))],
                )
            )
        return pack(segments, rollout)


class TaidHinted(TaidSdpo, Hinted):
    """The same with TAID's target."""


class Certainty(ChannelDefaults):
    """A third party's, on logits: the largest probability at each sampled token, in float32."""

    def loss(self, view, batch: Batch) -> Term:
        """For `tokens`."""
        at = batch.rollouts.action.nonzero().flatten()
        logits = view.logits(batch.rollouts.seqs, at, grad=True, temperature=batch.temperature)
        return Term(logits.softmax(-1).max(-1).values.sum(), "tokens")


# -- circumstances -----------------------------------------------------------------------------------------------------

Dtype = Literal["float32", "float64", "bfloat16", "autocast"]
"""Of the weights; "autocast": of products only."""


@dataclass(frozen=True)
class Case:
    """One row: what differs from plain."""

    id: str
    objective: str = "dr-grpo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the objective."""
    native: bool = True
    """False: the core's objective on a backend that has one of the same name."""
    model: str = "qwen3"
    """A key of `parity_reference.MODELS`."""
    adapter: Literal["none", "fresh", "trained"] = "none"
    sdpo: Mapping[str, Any] | None = field(default_factory=dict)
    """Settings; None: without this channel."""
    replay: Mapping[str, Any] | None = field(default_factory=dict)
    third_parties: bool = True
    micro_batch: int = 8
    """Rollouts of one process in a micro-batch; a step has eight over all processes."""
    steps: int = 1
    """Optimiser steps on the same rollouts, by plain gradient descent."""
    rate: float = 0.02
    """Of the descent."""
    temperature: float = 0.8
    pad_to: int | None = None
    """A multiple that the backend is to pad to."""
    checkpointing: bool = False
    dtype: Dtype = "float32"
    drifted: bool = False
    """The policy has moved away from the folder that a KL's reference is loaded from."""
    unrewarded: tuple[int, ...] = ()
    """Rollouts that no reward applied to."""
    tolerance: float = 1e-5
    """Largest distance of a gradient from the reference's, over the norm of that."""


SHALLOW = {"sdpo": None, "replay": None, "third_parties": False}
"""The objective alone."""
AFTER = {"steps": 3, "micro_batch": 4, "dtype": "float64"}
"""Two updates behind it, so that ratios have left 1, teachers differ and adapters are more than nothing. In float32
what rounding does to the first gradient grows with each step, to 1e-5 in the third."""

CASES = (
    Case("plain"),
    # -- where tokens lie
    Case("padded-to-a-multiple", pad_to=8),
    # -- how a step is split: the pairs, three, and hints, on three rollouts, leave micro-batches without any
    Case("two-micro-batches", micro_batch=4),
    Case("eight-micro-batches", micro_batch=1),
    Case("dapo-in-four", objective="dapo", settings={"drop_truncated": False}, micro_batch=2),
    # -- rollouts that count for less
    Case("dapo-without-truncated", objective="dapo", micro_batch=4),
    Case("core-without-truncated", objective="gmpo", settings={"drop_truncated": True}, native=False, micro_batch=4),
    Case("core-unrewarded", objective="gmpo", native=False, unrewarded=(0, 3)),
    # -- what costs memory
    Case("checkpointing", checkpointing=True, micro_batch=4),
    # -- models
    Case("untied", model="llama"),
    Case("soft-capped", model="gemma2", micro_batch=4),
    Case("logit-scale", model="cohere"),
    Case("logits-divided", model="granite"),
    # not in loss/heads.py: from its logits; the bias of its keys has a gradient of 0, which float32 has as 1e-7
    Case("unknown-model-type", model="opt", micro_batch=4, dtype="float64"),
    # -- whose weights read the hint
    Case("teacher-live", sdpo={"teacher": "self-live"}, **AFTER),
    Case("teacher-frozen", sdpo={"teacher": "self-frozen"}, **AFTER),
    Case("teacher-ema", sdpo={"teacher": "self-ema", "ema_rate": 0.3}, **AFTER),
    Case("teacher-ema-checkpointing", sdpo={"teacher": "self-ema", "ema_rate": 0.3}, checkpointing=True, **AFTER),
    # -- adapters: the first two steps of a fresh one tell A's gradient from nothing
    Case("lora-fresh", adapter="fresh", replay={"reference": "model"}, **AFTER),
    Case("lora-fresh-live", adapter="fresh", sdpo={"teacher": "self-live"}, **AFTER),
    Case("lora-trained", adapter="trained", replay={"reference": "model"}, **AFTER),
    Case("lora-trained-ema", adapter="trained", sdpo={"teacher": "self-ema"}, checkpointing=True, **AFTER),
    # the KL's reference is the adapter as it started; that of channels too
    Case("lora-kl", adapter="trained", objective="grpo", settings={"kl_coef": 0.2}, **AFTER),
    # -- temperatures: of sampling, of the divergence, and that of pairs, which is 1
    Case("temperature-one", temperature=1.0),
    Case("hot", temperature=1.7, sdpo={"temperature": 2.0}),
    # -- off policy: a low cap, so that importance ratios meet it
    Case("capped-ratios", sdpo={"is_clip": 1.01}, objective="grpo", **AFTER),
    Case("no-cap", sdpo={"is_clip": None}, objective="grpo", **AFTER),
    # -- forms of the channels
    Case("forward-kl-clipped", sdpo={"divergence": "kl_teacher_student", "token_clip": 0.02}, micro_batch=4),
    Case("top-k", sdpo={"support": "topk", "k": 7}),
    # its entries can be known before the student's logits are
    Case(
        "top-k-of-the-teacher",
        sdpo={"support": "topk", "k": 7, "side": "teacher", "temperature": 2.0, "teacher": "self-live"},
        temperature=1.7,
        micro_batch=2,
    ),
    Case("top-k-of-the-frozen-teacher", sdpo={"support": "topk", "k": 7, "side": "teacher"}, **AFTER),
    Case("sampled", sdpo={"support": "sampled", "divergence": "kl_student_teacher"}),
    Case("taid", sdpo={"target": {"use": "taid", "start": 0.3}}, **AFTER),
    Case("gate", sdpo={"gate": {"use": "soft"}}),
    Case("reference-of-pairs-from-the-model", replay={"reference": "model"}, **AFTER),
    Case("simpo", replay={"variant": "simpo"}, micro_batch=2),
    # -- the backend's own objectives beside channels
    Case("bnpo", objective="bnpo"),
    Case("cispo", objective="cispo", settings={"epsilon_high": 1.05}, **AFTER),
    Case("gspo", objective="gspo", **AFTER),
    Case("sapo", objective="sapo", **AFTER),
    Case("vespo", objective="vespo", **AFTER),
    Case("luspo", objective="luspo", **AFTER),
    Case("kl-in-the-loss", objective="grpo", settings={"kl_coef": 0.2}, drifted=True, **AFTER),
    # -- the core's objectives, for which the backend may have no code
    Case("core-gmpo", objective="gmpo", native=False, **AFTER),
    Case("core-dppo", objective="dppo", native=False, **AFTER),
    Case("core-maxrl", objective="maxrl", native=False, **AFTER),
    Case("core-gspo-token", objective="gspo-token", native=False, **AFTER),
    Case("core-composer2", objective="composer2", settings={"kl_coef": 0.05}, native=False, drifted=True, **AFTER),
    Case("core-lm-ce", objective="lm-ce", native=False, micro_batch=2),
    Case("core-lm-ce-smoothed", objective="lm-ce", settings={"label_smoothing": 0.1}, native=False),
    Case("core-vespo", objective="vespo", native=False, **AFTER),
    Case("core-k3", objective="gmpo", settings={"kl_coef": 0.2}, native=False, drifted=True, **AFTER),
    Case("core-alone", objective="gmpo", native=False, micro_batch=2, **SHALLOW),
    # -- fewer bits: two ways of rounding the same products to 3 digits, through two layers and back (seen: 0.04, 0.05)
    Case("bf16-weights", dtype="bfloat16", tolerance=0.1),
    Case("bf16-autocast", dtype="autocast", micro_batch=4, tolerance=0.1),
)


def composite(case: Case) -> CompositeLoss:
    """A fresh loss for one run of a case."""
    channels = []
    if case.sdpo is not None:
        settings = SdpoSettings(success=SUCCESS, **case.sdpo)
        channel = Hinted(settings) if settings.target is None else TaidHinted(settings)
        channels.append(ActiveChannel("sdpo", 3.0, channel, sdpo_needs(settings)[0]))
    if case.replay is not None:
        replay = Replay(ReplaySettings(pairs_per_step=3, **case.replay))
        replay.take_pairs(PAIRS)
        channels.append(ActiveChannel("replay", 0.5, replay, replay_needs(replay.settings)[0]))
    if case.third_parties:
        channels.append(ActiveChannel("brevity", 0.002, Brevity(BrevitySettings(free=4)), frozenset({Need.LOGPS})))
        channels.append(ActiveChannel("certainty", 0.2, Certainty(), frozenset({Need.LOGITS})))
    return CompositeLoss(channels, objective(case))


def objective_settings(case: Case) -> Any:
    """The settings of its objective."""
    return (LmCeSettings if case.objective == "lm-ce" else OBJECTIVE_SETTINGS[case.objective])(**case.settings)


def objective(case: Case) -> Any:
    """The core's objective of a case."""
    settings = objective_settings(case)
    return LmCe(settings) if case.objective == "lm-ce" else PolicyObjective(PRESETS[case.objective], settings)


# -- its rollouts ------------------------------------------------------------------------------------------------------


def action(i: int) -> list[bool]:
    """Which completion tokens of rollout i the policy sampled."""
    return [not any(j in tool for tool in TOOL.get(i, ())) for j in range(LENGTHS[i])]


def kept(i: int, case: Case) -> bool:
    """Whether the loss sees the completion of rollout i: `drop_truncated` leaves out those that hit the limit."""
    return i != TRUNCATED or not getattr(objective_settings(case), "drop_truncated", False)


def reward(i: int, case: Case) -> float | None:
    """Of rollout i."""
    return None if i in case.unrewarded else REWARDS[i]


def rollout(i: int, case: Case) -> RolloutText:
    """As `prepare` sees it."""
    completion, flags = (COMPLETIONS[i], action(i)) if kept(i, case) else ([], [])
    return RolloutText(str(i), PROMPTS[i // GROUP_SIZE], completion, flags, reward(i, case))


# -- what a backend gives ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimiser step, before the optimiser."""

    losses: Mapping[str, float]
    """`loss/total`, `loss/policy` and `loss/<channel>`, over all ranks and micro-batches."""
    gradients: Mapping[str, Tensor]
    """Of each trained parameter, by its name in the model that `parity_reference.build` gives."""


class Joiner(Protocol):
    """A backend's way into the table: the module attribute `joiner` of a file `join_<name>.py`."""

    def refuses(self, case: Case) -> str | None:
        """Why this backend does not do such a run; None where it does."""
        ...

    def run(self, case: Case, folder: Path, scratch: Path) -> Sequence[Step]:
        """Run a case through the backend itself. `folder` has the models, `scratch` is empty."""
        ...
