"""The run spec as typed objects. `load.py` reads files into these; `plan.py` turns them into a plan.

Fixed sections are pydantic models, here and in `sections.py`. A block with `use:` names a contribution; its other keys
are that contribution's settings, checked against its own model and kept in a `Plugged`. Every key says in its docstring
what moving it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from composer_core.plugins.contributions import Kind
from composer_core.plugins.settings import PathKind, Settings
from composer_core.spec.sections import PairsSpec, ReplaySpec, ReplicasSpec, RolloutSpec, TracesSpec


@dataclass(frozen=True)
class Plugged:
    """A `use:` block, resolved against the registry."""

    kind: Kind
    use: str
    """The name as the spec gives it, "owner/name" where it had to choose."""
    owner: str
    """Distribution that brought it, with its version."""
    settings: Settings
    weight: float = 1.0
    """Only channels and rewards have one."""

    @property
    def name(self) -> str:
        """The contribution's own name, without an owner."""
        return self.use.rpartition("/")[2]


class LoraSpec(Settings):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters: more is closer to full fine-tuning and costs memory."""
    alpha: int | None = Field(None, ge=1)
    """Scale of the adapters; default twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of the adapters' input while training."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules to adapt; `lm_head` cannot be one, the fused log-prob head needs it plain."""
    merge: bool = False
    """Save `model/` with the adapters merged into the weights, instead of the adapters alone."""

    @model_validator(mode="after")
    def _head_stays_plain(self) -> Self:
        if isinstance(self.targets, list) and any(name.split(".")[-1] == "lm_head" for name in self.targets):
            raise ValueError("lm_head cannot have an adapter: log-probs come from a fused head that reads its weight")
        return self


class ModelSpec(Settings):
    """The policy."""

    path: str | None = None
    """A Hugging Face id, or a folder (relative to the spec)."""
    gguf_file: str | None = None
    """A GGUF file inside `path`; dequantised once into a cached safetensors folder."""
    builtin: Literal["tiny"] | None = None
    """`tiny`: a random two-layer Qwen3 with a character tokenizer, made offline; for trying things out."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the loaded weights. bfloat16 halves memory, but full fine-tuning at under about 1e-5 then loses updates."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora: LoraSpec | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.builtin is None):
            raise ValueError("give either path or builtin")
        if self.gguf_file is not None and self.path is None:
            raise ValueError("gguf_file names a file inside path; path is missing")
        if self.revision is not None and self.path is None:
            raise ValueError("revision is a branch, tag or commit of path; path is missing")
        return self


class PromptsSpec(Settings):
    """Where prompts come from. All columns of a row reach the rewards."""

    path: str | None = None
    """A JSONL file (relative to the spec)."""
    dataset: str | None = None
    """A Hugging Face dataset: an id, or a folder written by `save_to_disk`."""
    split: str = "train"
    """Of `dataset`."""
    builtin: Literal["digits"] | None = None
    """`digits`: 64 short prompts to try a spec with; reward digits with `{use: regex, pattern: "[0-9]"}`."""
    column: str | None = None
    """The column that holds the prompt: text, or a list of chat messages. Default: `messages`, else `prompt`."""
    system: str | None = None
    """A system message put in front of every prompt."""
    chat: bool = True
    """A text prompt becomes a user message of the model's chat template; false: it is continued as raw text."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.path, self.dataset, self.builtin)) != 1:
            raise ValueError("give exactly one of path, dataset, builtin")
        if self.system is not None and not self.chat:
            raise ValueError("a system message needs chat: true")
        return self


class EvalSpec(PromptsSpec):
    """Held-out prompts, scored by the same rewards; nothing is learnt from them."""

    every: int = Field(50, ge=1)
    """Steps between two evaluations; one more at the end."""
    group_size: int = Field(1, ge=1)
    """Completions sampled per prompt."""


class DataSpec(Settings):
    """Prompts and how answers are scored."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompts: PromptsSpec | None = None
    """Prompts to answer; every spec has them but one with `rollouts: none`."""
    rewards: list[Plugged] = Field([], json_schema_extra={"minItems": 1})
    """`{use: name, weight: 1.0, ...}`; their weighted sum is the reward. Where there are prompts there is at least
    one."""
    eval: EvalSpec | None = None
    """Evaluate on held-out prompts while training; metrics under `eval/`."""
    traces: TracesSpec | None = None
    """Recorded sessions that channels learn from; see `rollouts`."""
    pairs: PairsSpec | None = None
    """Preference pairs that channels learn from."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence, prompt included, that is taken from prompts, traces and pairs. Longer prompts and pairs are
    left out, longer traces cut at their end and hints that are not whole there left out; all of it is counted. Default:
    4096 for traces, any length for the others."""


class LossSpec(Settings):
    """What is minimised: the objective plus weight x each channel."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    objective: Plugged | None = None
    """The policy loss; with `rollouts: none` it is `lm-ce` or left out."""
    channels: list[Plugged] = []
    """`{use: name, weight: 0.1, ...}`; each adds weight x its own loss. At weight 0 it is not computed."""


class TrainSpec(Settings):
    """Neutral numbers; each backend derives its own from them, and `plan` prints those."""

    steps: int = Field(ge=1)
    """Optimiser steps."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts in one optimiser step, over all processes; with `rollouts: none`, recorded rows (`group_size` counts
    nothing there). Preference pairs come on top: `pairs_per_step` of the channel `replay`."""
    group_size: int = Field(8, ge=2)
    """Completions sampled per prompt; advantages compare them."""
    micro_batch: int | None = Field(None, ge=1)
    """Sequences in one forward and backward pass per process; fewer need less memory, the result is the same.
    Default: the largest divisor of a step's sequences that is at most 8."""
    iterations: int = Field(1, ge=1)
    """Optimiser passes over the same rollouts; from 2 on the importance ratio leaves 1 and clipping engages."""
    max_completion_tokens: int = Field(256, ge=1)
    """Where a completion is cut off; one that was cut has not ended by itself."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; log-probs in the loss are taken at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; below 1 the loss sees more than was sampled
    from."""
    top_k: int = Field(0, ge=0)
    """0: all tokens."""
    learning_rate: float = Field(1e-6, gt=0)
    """At its highest. 1e-6 is usual for full fine-tuning, 1e-5 to 1e-4 for adapters."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after warm-up: stays, or falls to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A longer gradient is scaled down to this norm."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a fifth slower."""
    log_every: int = Field(1, ge=1)
    """Steps between two lines of metrics.jsonl."""
    sample_rollouts: int = Field(4, ge=0)
    """Completions kept in rollouts.jsonl per logged step."""

    @property
    def sequences_per_step(self) -> int:
        """Completions in one optimiser step, over all processes."""
        return self.prompts_per_step * self.group_size

    @property
    def micro_batch_size(self) -> int:
        """`micro_batch`, or its default."""
        return self.micro_batch or max(d for d in range(1, 9) if self.sequences_per_step % d == 0)


class CheckpointSpec(Settings):
    """Checkpoints in `checkpoints/step_N`, complete or absent."""

    every: int | None = Field(None, ge=1)
    """Steps between two checkpoints; default: only the trained model at the end."""
    keep: int = Field(3, ge=1)
    """How many of the newest stay on disk."""


class LimitsSpec(Settings):
    """When a run ends by itself: it finishes the step, saves, and exits with 5."""

    hours: float | None = Field(None, gt=0)
    """Wall-clock time from the start of the worker, earlier parts of a resumed run included."""
    usd: float | None = Field(None, gt=0)
    """Money for the executor's machines; needs an executor whose price is known."""
    teacher_usd: float | None = Field(None, gt=0)
    """Money for teachers; `composer-run replay` refuses to start above it, and a run asks no more once it is spent."""
    teacher_tokens: int | None = Field(None, gt=0)
    """Tokens that teachers may read and write, for servers without prices; kept as `teacher_usd` is."""
    kl: float | None = Field(None, gt=0)
    """Highest mean KL per token to the starting model; needs an objective with kl_coef > 0."""
    reward_drop: float | None = Field(None, gt=0, le=1)
    """Stop when the mean reward of the last 10 logged steps is below (1 - this) x the best such mean so far."""
    dead_after: int = Field(20, ge=1)
    """Logged steps in a row after which a channel with rows but without any loss or gradient is called dead."""
    allow_dead: bool = False
    """Log a dead channel instead of stopping."""


def _is_one(version: int) -> int:
    # not Literal[1], which takes true as well
    if version != 1:
        raise ValueError("must be 1")
    return version


class RunSpec(Settings):
    """A whole run."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    version: Annotated[int, AfterValidator(_is_one), Field(json_schema_extra={"const": 1})]
    """Of this format; always 1."""
    extends: str | None = None
    """Another spec (relative to this file) that this one changes: sections merge, a block with another `use` and a
    list replace what the other file has, and its own relative paths stay relative to it."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run directory: letters, digits, dot, underscore, hyphen."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of everything random: weights of new layers and adapters, order of prompts, sampling."""
    rollouts: Literal["generate", "none"] = "generate"
    """`none`: nothing is generated or scored. The run learns from `data.traces` and `data.pairs` alone, by channels
    and, if it is given, the objective `lm-ce`; so there are no prompts and rewards."""
    plugins: list[str] = []
    """Local plugin files, relative to the spec."""
    model: ModelSpec
    data: DataSpec
    rollout: RolloutSpec | None = None
    loss: LossSpec
    train: TrainSpec
    teachers: dict[str, Plugged] = {}
    """Models that answer in the agent's place, by a name of your choice: `strong: {use: openai, ...}`."""
    replay: ReplaySpec = ReplaySpec()
    backend: Plugged
    """The trainer."""
    executor: Plugged
    """Where the worker runs."""
    replicas: ReplicasSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    limits: LimitsSpec = LimitsSpec()
    sinks: list[Literal["tensorboard", "trackio", "wandb"]] = []
    """Where metrics go besides metrics.jsonl; each needs its package."""


class Shape(StrEnum):
    """How many `use:` blocks a place takes."""

    ONE = "one"
    LIST = "list"
    MAP = "map"
    """Each under a name of the user's."""


@dataclass(frozen=True)
class PlugPoint:
    """A place for `use:` blocks."""

    kind: Kind
    shape: Shape
    default: str | None = None
    """What a spec without the block uses."""

    def map(self, function: Callable[[Any], Any], found: Any) -> Any:
        """What stands here, with `function` of each block in the block's place; None where nothing does."""
        if found is None:
            return None
        if self.shape is Shape.ONE:
            return function(found)
        if self.shape is Shape.LIST:
            return [function(block) for block in found]
        return {name: function(block) for name, block in found.items()}


PLUG_POINTS: dict[tuple[str, ...], PlugPoint] = {
    ("data", "rewards"): PlugPoint(Kind.REWARD, Shape.LIST),
    ("loss", "objective"): PlugPoint(Kind.OBJECTIVE, Shape.ONE),
    ("loss", "channels"): PlugPoint(Kind.CHANNEL, Shape.LIST),
    ("teachers",): PlugPoint(Kind.TEACHER, Shape.MAP),
    ("backend",): PlugPoint(Kind.BACKEND, Shape.ONE),
    ("executor",): PlugPoint(Kind.EXECUTOR, Shape.ONE, "inline"),
}

WEIGHTED = frozenset({Kind.CHANNEL, Kind.REWARD})
"""Kinds whose block takes `weight` beside its settings."""

OPTIONAL = (
    "rollouts",
    "rollout",
    "data.eval",
    "data.traces",
    "data.pairs",
    "data.max_tokens",
    "replicas",
    "limits.kl",
)
"""Keys that not every backend carries out: a spec with one that its backend does not list in `honours` is refused."""

REPLAY_ONLY = ("teachers", "replay")
"""Sections that `composer-run replay` reads. A worker neither needs nor gets their secrets, but for those of teachers
that score for a channel (`scorers.py`), which it fills in itself."""


PATH_KEYS: Mapping[tuple[str, ...], PathKind] = {
    ("model", "path"): PathKind.IF_THERE,
    ("data", "prompts", "path"): PathKind.ALWAYS,
    ("data", "prompts", "dataset"): PathKind.IF_THERE,
    ("data", "eval", "path"): PathKind.ALWAYS,
    ("data", "eval", "dataset"): PathKind.IF_THERE,
    ("data", "traces", "path"): PathKind.ALWAYS,
    ("data", "pairs", "path"): PathKind.ALWAYS,
    ("rollout", "environment", "factory"): PathKind.FUNCTION,
    ("rollout", "tools"): PathKind.FUNCTION,
    ("replay", "normalise", "data_juicer", "python"): PathKind.IF_THERE,
    ("replay", "normalise", "data_juicer", "recipe"): PathKind.ALWAYS,
    ("replicas", "store"): PathKind.STORE,
}
"""Keys that hold a path, or a list of them, relative to the file that they were written in."""


def dump(plugged: Plugged) -> dict[str, Any]:
    """A block as plan.json keeps it."""
    return {
        "use": plugged.use,
        "owner": plugged.owner,
        "weight": plugged.weight,
        "settings": plugged.settings.model_dump(mode="json"),
    }
