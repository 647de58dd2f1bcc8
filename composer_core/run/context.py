"""What a backend sees of a run: its spec, its data, and the only ways to write into its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from composer_core.protocols import Objective, Reward
from composer_core.spec.model import RunSpec

if TYPE_CHECKING:
    from composer_core.run.recorded import RecordedRow


@dataclass(frozen=True)
class NamedReward:
    """One reward of the spec, checked: it raises RunFailed with its name and the sample when it misbehaves."""

    name: str
    weight: float
    score: Reward


@dataclass(frozen=True)
class RolloutSample:
    """One completion kept for reading."""

    prompt: str | list[dict[str, Any]]
    completion: str
    rewards: Mapping[str, float | None]
    advantage: float | None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that a run goes on from."""

    step: int
    """The last optimiser step that is in it; training goes on with the next."""
    folder: Path
    """What rank 0 filled in `RunContext.checkpoint`."""
    rank: int = 0
    """Of the process that this is for."""

    @property
    def own(self) -> Path:
        """What this rank filled; `folder` itself for rank 0."""
        return rank_folder(self.folder, self.rank)


def rank_folder(checkpoint: Path, rank: int) -> Path:
    """Where a rank's own part stands in the folder of a checkpoint."""
    return checkpoint / f"rank{rank}" if rank else checkpoint


class RunContext(Protocol):
    """Handed to `Backend.train`. Everything written goes through it, so that nothing is ever half-written."""

    spec: RunSpec
    upstream: Mapping[str, Any]
    """The upstream configuration the plan derived, with the paths of this run still to be filled in."""
    rewards: Sequence[NamedReward]
    objective: Objective | None
    """None with `rollouts: none`, unless the spec has one."""
    is_main: bool
    """Only the main process of several writes."""
    resume_from: Checkpoint | None
    """Where to go on from, None for a new run. A backend restores model, optimiser, schedule, random generators, data
    position and the loss's state, so that the run ends as if it had never been interrupted."""

    @property
    def scratch(self) -> Path:
        """A folder inside the run directory for upstream's own temporary files; removed at the end."""
        ...

    @property
    def plan_file(self) -> Path:
        """The plan of this run, from which a backend's other processes are built (`run/rebuild.py`)."""
        ...

    @property
    def logs(self) -> Path:
        """A folder for what upstream's own processes say."""
        ...

    def model_folder(self) -> Path:
        """The policy as a local Hugging Face folder (GGUF dequantised, the built-in model made)."""
        ...

    def prompts(self) -> list[dict[str, Any]]:
        """Rows with a `prompt` (chat messages or text) and all other columns; none with `rollouts: none`."""
        ...

    def eval_prompts(self) -> list[dict[str, Any]]:
        """Held-out rows of the same form; empty where the spec has no `data.eval`."""
        ...

    @property
    def recorded_file(self) -> Path:
        """Where the rows of `data.traces` stand; they are made before the backend is called."""
        ...

    def recorded(self) -> Sequence[RecordedRow]:
        """Rows of `data.traces` with `rollouts: none`, in the file's order; empty where the spec has no traces."""
        ...

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl (names: DESIGN section 11) and the progress display."""
        ...

    def log_rollouts(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Lines of rollouts.jsonl."""
        ...

    def event(self, kind: str, **facts: Any) -> None:
        """One line of events.jsonl."""
        ...

    def stop_reason(self) -> str | None:
        """Why the run should end after this step (signal, STOP file, limit, tripwire), or None.

        Each process has its own answer; with several, `run.control.agree` makes one of them.
        """
        ...

    def checkpoint(self, step: int) -> AbstractContextManager[Path]:
        """A folder to fill; on leaving without an exception it becomes `checkpoints/step_N`, complete.

        A collective of all processes. The main one writes what they share, and each what is its own: random generators,
        rollouts in use. It finds that again in `Checkpoint.own`.
        """
        ...

    def trained_model(self) -> AbstractContextManager[Path]:
        """A folder to fill; on leaving without an exception it becomes `model/`. Only the main process's counts."""
        ...
