"""The batch script of a Slurm array: a pure function from replicas to text, which is what gets submitted.

The script starts the command in a session of its own, waits for it and writes how it ended beside its log, which
outlasts Slurm's memory. Slurm's signals reach the script alone (`B:`); it hands on what they mean:

    TERM   from Slurm, before the time limit or a preemption: SIGTERM to the command, which saves and ends
    USR1   from `terminate`: the same, and the replica counts as cancelled
    USR2   from `kill`: SIGKILL to the command and its process group

Not here: the call of sbatch and the meaning of its answers (`slurm.py`, `slurm_commands.py`). The lines for containers
follow the documentation of pyxis and apptainer; only their text is tested.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_executors.service import LABEL, Replica
from composer_executors.settings import Container, SlurmSettings

ASK, END = "USR1", "USR2"
"""Signals to the script by which a replica is cancelled: at leisure, and at once."""
CANCELLED, TIMEOUT, TERMINATED = "cancelled", "timeout", "terminated"
"""Second word of an exit file: why the command was asked to end (by us, for its time limit, by Slurm for another reason
such as preemption); "-" where it was not."""
RUN_DIR_ABOVE = 2
"""How far above a replica's folder the run directory is (`contract_env.folder_of`): a container must see it."""
LONGEST_NOTICE_S = 65535
"""Slurm's bound of `--signal`."""
NEVER_S = 1 << 31
_RANK = "$SLURM_ARRAY_TASK_ID"
_BODY = """\
wish=- signal= child=
pass_on() {{
  signal=$2
  if [ "$wish" != {cancelled} ]; then wish=$1; fi
  if [ -n "$child" ]; then kill -s "$signal" -- "$3$child" 2>/dev/null; fi
}}
trap 'if [ "$SECONDS" -ge {late} ]; then pass_on {timeout} TERM ""; else pass_on {terminated} TERM ""; fi' TERM
trap 'pass_on {cancelled} TERM ""' {ask}
trap 'pass_on {cancelled} KILL -' {end}
setsid {command} &
child=$!
if [ -n "$signal" ]; then kill -s "$signal" -- "$child" 2>/dev/null; signal=; fi  # it came while the command started
# a signal to this script ends `wait` before the command has ended
until wait "$child"; code=$?; [ -z "$signal" ]; do signal=; done
echo "$code $wish" > "$ended.new" && mv "$ended.new" "$ended"
exit "$code"
"""


@dataclass(frozen=True)
class Array:
    """One call of sbatch: one task for each of some replicas, with the rank as its number."""

    replicas: tuple[Replica, ...]
    folder: tuple[str | None, ...]
    """Parts of the path of a replica's folder; None for one that is the rank."""

    def file(self, job: str, rank: int, ending: str) -> Path:
        """What Slurm or the script writes for one task, in the replica's folder."""
        return Path(*(part or str(rank) for part in self.folder)) / f"slurm-{job}_{rank}.{ending}"

    def log_pattern(self) -> str:
        """As `--output` takes it."""
        parts = ["%a" if part is None else part.replace("%", "%%") for part in self.folder]
        return str(Path(*parts, "slurm-%A_%a.log"))

    def exit_file(self) -> str:
        """In the words of a shell."""
        folder = "".join(
            f"/{_RANK}" if part is None else "/" + shlex.quote(part) for part in self.folder if part != "/"
        )
        return f"{folder}/slurm-${{SLURM_ARRAY_JOB_ID}}_{_RANK}.exit"


def arrays(replicas: Sequence[Replica]) -> list[Array]:
    """One array where the replicas differ by nothing but their rank, else one for each."""
    folder = _common_folder(replicas)
    if folder is not None and len({_common(replica) for replica in replicas}) == 1:
        return [Array(tuple(replicas), folder)]
    return [Array((replica,), replica.folder.parts) for replica in replicas]


def script(array: Array, settings: SlurmSettings) -> str:
    """The whole text, options included: `sbatch FILE` submits it. Names of secrets, no values."""
    first = array.replicas[0]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(array, settings)), ""]
    names = ", ".join(sorted({*first.env, *first.secrets} - {"COMPOSER_RANK"}))
    lines.append(f"# From the environment of sbatch, beside what it has itself: {names}")
    lines.append(f"export COMPOSER_RANK={_RANK}")
    if settings.requeue:
        lines.append("export COMPOSER_ATTEMPT=$((COMPOSER_ATTEMPT + ${SLURM_RESTART_COUNT:-0}))")
    lines.append(f"ended={array.exit_file()}")
    if settings.requeue:
        lines.append('rm -f "$ended"')
    body = _BODY.format(
        command=_command(first, settings.container),
        late=_late(first, settings),
        timeout=TIMEOUT,
        terminated=TERMINATED,
        cancelled=CANCELLED,
        ask=ASK,
        end=END,
    )
    return "\n".join(lines) + "\n" + body


def label(replica: Replica) -> str:
    """The comment by which a job is found as ours, with all that a handle needs beside Slurm's own facts."""
    return f"{LABEL}:{replica.job}:{replica.attempt}"


def read_label(comment: str) -> tuple[str, int] | None:
    """Job and attempt; None for a comment that is not ours."""
    label, _, rest = comment.partition(":")
    job, _, attempt = rest.rpartition(":")
    return (job, int(attempt)) if label == LABEL and job and attempt.isdigit() else None


def _options(array: Array, settings: SlurmSettings) -> Iterator[str]:
    first = array.replicas[0]
    yield _option("job-name", first.job)
    yield _option("comment", label(first))
    yield _option("array", ",".join(str(replica.rank) for replica in array.replicas))
    yield "--nodes=1"
    yield "--ntasks=1"
    for name in ("partition", "account", "qos", "constraint", "mem"):
        if getattr(settings, name) is not None:
            yield _option(name, getattr(settings, name))
    if settings.cpus_per_task is not None:
        yield f"--cpus-per-task={settings.cpus_per_task}"
    if first.gpu is not None:
        kind, count = first.gpu
        yield _option("gres", f"gpu:{kind}:{count}" if kind else f"gpu:{count}")
    yield from _limits(first, settings)
    yield _option("output", array.log_pattern())
    yield "--open-mode=append"  # a replica that is requeued goes on behind its first lines
    yield "--requeue" if settings.requeue else "--no-requeue"
    # a name instead of ALL would make Slurm read the login environment on the node, which can take minutes and fail
    yield "--export=ALL"
    for name, value in settings.sbatch.items():
        yield _option(name, value) if value else f"--{name}"


def _limits(replica: Replica, settings: SlurmSettings) -> Iterator[str]:
    """Slurm counts in minutes; what is beyond the limit of ours that way, the executor cuts off."""
    if replica.time_limit_s is not None:
        yield f"--time={math.ceil(replica.time_limit_s / 60)}"
        yield f"--signal=B:TERM@{_notice(replica.time_limit_s, settings)}"


def _notice(time_limit_s: float, settings: SlurmSettings) -> int:
    """Seconds before the limit at which the command is asked to end."""
    return max(1, round(min(settings.stop_seconds, time_limit_s / 2, LONGEST_NOTICE_S)))


def _late(replica: Replica, settings: SlurmSettings) -> int:
    """From which second on SIGTERM means the time limit: Slurm may send it a minute early."""
    if replica.time_limit_s is None:
        return NEVER_S
    limit = 60 * math.ceil(replica.time_limit_s / 60)
    return max(0, limit - _notice(replica.time_limit_s, settings) - 60)


def _option(name: str, value: str) -> str:
    """Quoted as sbatch reads it, which is as a shell does."""
    return f"--{name}={shlex.quote(value)}"


def _command(replica: Replica, container: Container | None) -> str:
    command = shlex.join(replica.command)
    if container is None:
        return command
    image, run_dir = shlex.quote(container.image), str(replica.folder.parents[RUN_DIR_ABOVE])
    if container.runtime == "apptainer":  # binds the working directory by itself
        return f"apptainer exec --nv --bind {shlex.quote(run_dir)} {image} {command}"
    mounts = f'"$PWD:$PWD",{shlex.quote(f"{run_dir}:{run_dir}")}'
    return f'srun --container-image={image} --container-mounts={mounts} --container-workdir="$PWD" {command}'


# -- what replicas have in common --------------------------------------------------------------------------------------


def _common(replica: Replica) -> tuple[object, ...]:
    env = {**replica.env, **replica.secrets}
    own_rank = env.pop("COMPOSER_RANK", None) == str(replica.rank)
    return (
        replica.job,
        replica.attempt,
        replica.command,
        tuple(sorted(env.items())),
        own_rank,
        replica.gpu,
        replica.time_limit_s,
    )


def _common_folder(replicas: Sequence[Replica]) -> tuple[str | None, ...] | None:
    """None where the folders differ by more than the rank."""
    if len({len(replica.folder.parts) for replica in replicas}) != 1:
        return None
    ranks = tuple(str(replica.rank) for replica in replicas)
    parts: list[str | None] = []
    for column in zip(*(replica.folder.parts for replica in replicas), strict=True):
        if len(set(column)) > 1 and column != ranks:
            return None
        parts.append(column[0] if len(set(column)) == 1 else None)
    return tuple(parts)
