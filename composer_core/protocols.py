"""What a plugin's objects must look like: the border between the core, its backends and third parties.

Nothing here is imported at run time but enums and dataclasses, so this module stays free of torch.
Letters: S sequences, N tokens of all sequences packed, K hint tokens, P pairs, V vocabulary.

A channel has two halves. `prepare` runs where rollouts end and returns a JSON row that survives every shuffle,
queue and message; `collate` and `loss` run beside the model, after every shuffle and split. A channel returns a
local SUM and the name of its denominator; only the adapter divides, by counts over all ranks and the whole
accumulation window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from composer_core.batch import Batch, Hints, Pairs, Rollouts, Seqs
    from composer_core.divergences import Divergence
    from composer_core.loss.composite import CompositeLoss
    from composer_core.run.context import RunContext
    from composer_core.traces.model import Trace
    from composer_core.traces.stats import Tally

Model = Literal["policy", "teacher", "reference"]
"""Which weights a view uses. `teacher` is live, EMA or frozen, as the backend owns it."""

Row = Mapping[str, list[int] | list[float] | float | str]
"""What `prepare` returns: JSON values only."""


class Need(StrEnum):
    """What a channel asks of a trainer; a plan is refused where a backend cannot serve it."""

    LOGPS = "logps"
    DIVERGENCE_FULL = "divergence-full"
    DIVERGENCE_TOPK = "divergence-topk"
    LOGITS = "logits"
    PAIRS = "pairs"
    REFERENCE = "reference"
    EMA = "ema"
    STATE = "state"
    OUTER_SYNC = "outer-sync"


class Aggregation(StrEnum):
    """How token losses of a batch become one number (names of the count that divides the sum in brackets)."""

    TOKEN_MEAN = "token-mean"
    """Sum over all action tokens of the step / their number over ranks and window [`tokens`]. DAPO."""
    TOKEN_MEAN_LOCAL = "token-mean-local"
    """The same within one micro-batch, then the mean over micro-batches [`micro_batches`]: depends on the split."""
    SEQUENCE_MEAN = "sequence-mean"
    """Mean over sequences of each sequence's token mean [`sequences`]. GRPO."""
    SEQUENCE_SUM = "sequence-sum"
    """Mean over sequences of each sequence's token sum [`sequences`]. LUSPO."""
    CONSTANT = "constant"
    """Sum over tokens / (sequences x the longest completion allowed) [`max_tokens`]. Dr. GRPO."""


@dataclass(frozen=True)
class Term:
    """One channel's part of the loss on one micro-batch."""

    sum: Tensor
    """Scalar, a local SUM, attached to the graph even when there was nothing to sum."""
    count: str
    """Key of `Batch.counts` that divides it."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached local sums for the log, each divided by the same count."""


@dataclass(frozen=True)
class RolloutText:
    """One finished rollout as `prepare` sees it: ids that were really generated, no tensors, no model."""

    uid: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    action: Sequence[bool]
    """One flag per completion token: False for tool output."""
    reward: float | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's data row, and what the rollout added to it (error sites, environment state)."""
    tokenizer: Any | None = field(default=None, repr=False, compare=False)
    """What made the ids (transformers' interface), for channels that add text to a prompt; None where there is none."""


class PolicyView(Protocol):
    """A model seen through log-probs and divergences, the cheapest exact way its trainer has.

    No dropout when `grad` is False. The same number of forwards on every rank.
    """

    def logps(self, seqs: Seqs, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """Log-prob of each token given those before it, (N,); 0 for the first token of each sequence, and for tokens
        that `seqs.scored` leaves out.
        """
        ...

    def divergence(self, hints: Hints, spec: Divergence, *, teacher: Model = "policy") -> Tensor:
        """Divergence between teacher and student at each hint token, (K,). Gradients reach the student only.

        With the sampled support, the sampled ids are those of the rollout tokens that the hints point at.
        """
        ...

    def logits(self, seqs: Seqs, at: Tensor, *, model: Model = "policy", grad: bool, temperature: float) -> Tensor:
        """Logits that predict the tokens at flat indices `at`, (len(at), V); only with `Need.LOGITS`."""
        ...


class LossChannel(Protocol):
    """A loss beside the policy loss. Inherit `loss.channel.ChannelDefaults` and `loss` alone is enough."""

    def prepare(self, rollout: RolloutText) -> Row | None:
        """A JSON row for a finished rollout, or None when it has nothing for this channel."""
        ...

    def count(self, row: Row | None) -> Mapping[str, float]:
        """What a row adds to the denominators; additive over rows."""
        ...

    def collate(self, rows: Sequence[Row | None], rollouts: Rollouts | None) -> Hints | Pairs | Mapping[str, Tensor]:
        """Tensors for the rows of one micro-batch; None becomes filler, so that every rank runs the same forwards."""
        ...

    def divergences(self, step: int) -> tuple[Divergence, ...]:
        """The divergences `loss` will ask for at this step; a trainer may have to know before the forward."""
        ...

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over this micro-batch, from a `batch` whose hints, pairs and extra are this channel's own."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A channel or objective with state that a checkpoint must hold (a schedule, an EMA)."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called once per optimiser step on every rank with the same all-reduced metrics.

        Its own are there under bare names too: `loss` for `loss/<name>`, `active` for `active/<name>`.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """JSON values and tensors only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...


class Objective(Protocol):
    """A policy objective on rewarded rollouts."""

    aggregation: Aggregation

    def advantages(self, rewards: Tensor, group: Tensor, lengths: Tensor, ref_kl: Tensor | None) -> Tensor:
        """Per-sequence advantages, (S,), from rewards (S,; NaN = not rewarded), group ids (S,), action lengths (S,)
        and the per-sequence KL to the reference (S,) where it goes into the reward.
        """
        ...

    def loss(self, view: PolicyView, batch: Batch) -> Term:
        """The local sum over this micro-batch."""
        ...


class Reward(Protocol):
    """TRL's reward signature: one float per completion, None where it does not apply."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """Score completions (texts or lists of chat messages); `columns` holds the data rows' columns as lists."""
        ...


@dataclass(frozen=True)
class TeacherRequest:
    """What a teacher is asked: the assistant message that follows."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI chat form."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Definitions of the tools it may call."""
    sample: int = 0
    """Which of several answers to the same request."""
    state_id: str = ""
    """The trace state it belongs to; not sent, and no part of what a cached answer is found by."""


@dataclass(frozen=True)
class ScoreRequest:
    """A text that a teacher reads, as token ids; it gives the log-probs of those from `start` on."""

    ids: Sequence[int]
    start: int
    """At least 1: nothing predicts the first token."""
    state_id: str = ""
    """The rollout it belongs to; not sent."""


@dataclass(frozen=True)
class Cost:
    """Dollars and tokens of a call, prompt and answer together."""

    usd: float
    tokens: int


@dataclass(frozen=True)
class TeacherReply:
    """What a teacher answered, and what it cost."""

    message: Mapping[str, Any] | None
    """The assistant message, or what `Scores.score` found; None where there was none."""
    finish: str
    """`stop`, `tool_calls`, `length` (cut off), ..., as the server says."""
    prompt_tokens: int
    completion_tokens: int
    usd: float
    model: str
    """As the server names it."""

    def as_json(self) -> dict[str, Any]:
        """For storing; `TeacherReply(**as_json())` is the same reply."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class TeacherSource(Protocol):
    """A model that answers in the agent's place. Constructed with its settings.

    It makes one attempt at a time and books nothing: cache, budget, limits and retries are the caller's.
    """

    identity: str
    """Who answers (address and model): with the body, what a cached answer is found by. "" is never cached."""
    concurrency: int
    requests_per_minute: int | None
    attempts: int

    def body(self, request: TeacherRequest) -> Mapping[str, Any]:
        """Everything that decides the answer, as JSON."""
        ...

    def worst(self, request: TeacherRequest) -> Cost:
        """An upper bound of what one attempt costs."""
        ...

    def estimate(self, request: TeacherRequest) -> Cost:
        """What one attempt is likely to cost."""
        ...

    async def complete(self, request: TeacherRequest) -> TeacherReply:
        """One attempt; failures are those of `teachers.errors`."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


@runtime_checkable
class Scores(Protocol):
    """A `TeacherSource` that can also read a text and say how likely it finds it (`TeacherPlugin.scores`).

    It must have the tokenizer of whoever asks: what is sent and what comes back are token ids and their log-probs.
    """

    def worst_score(self, request: ScoreRequest) -> Cost:
        """An upper bound of what one attempt costs."""
        ...

    async def score(self, request: ScoreRequest) -> TeacherReply:
        """One attempt; failures are those of `teachers.errors`.

        The reply's message is {"logps": [float], "tokens": [str | None]}: for each of `request.ids[request.start:]` its
        log-prob given all before it, in nats at temperature 1, and the text that the teacher takes it for, None where
        it does not say.
        """
        ...


class TraceReader(Protocol):
    """A file format of agent sessions. Constructed with its settings."""

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether a file that begins with `head` is of this format, by its content."""
        ...

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """The file's traces. Every record, and every one that cannot be read, is counted in `tally`; none is fatal."""
        ...


class HintTemplate(Protocol):
    """The text of a hint. Constructed with its settings."""

    def __call__(self, context: Mapping[str, Any]) -> str | None:
        """What the agent should have known; None when this context gives nothing to say."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """What a backend reports when it is done."""

    steps: int
    stopped: str = ""
    """Why it ended before the last step; empty when it did not."""


class Backend(Protocol):
    """A trainer. Constructed with its settings, it runs in the worker process."""

    def check(self) -> list[str]:
        """Problems of the installed upstream, each a sentence; empty when the private surface is as expected."""
        ...

    def train(self, run: RunContext, loss: CompositeLoss) -> TrainResult:
        """Train to the end of the plan, or until `run.stop_reason()` is not None."""
        ...
