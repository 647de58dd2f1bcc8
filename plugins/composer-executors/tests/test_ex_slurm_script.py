"""The batch script: its whole text, and what it does with signals, without Slurm."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_executors.contract_env import folder_of
from composer_executors.service import Replica
from composer_executors.settings import SlurmSettings
from composer_executors.slurm_script import arrays, label, read_label, script

RUN_DIR = Path("/data/runs/it's 100%/run-7")
WHOLE = """\
#!/bin/bash
#SBATCH --job-name=run-7
#SBATCH --comment=composer-run:run-7:0
#SBATCH --array=0,1
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --constraint='nvlink&ib'
#SBATCH --mem=64G
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:h200:8
#SBATCH --time=62
#SBATCH --signal=B:TERM@120
#SBATCH --output='/data/runs/it'"'"'s 100%%/run-7/replicas/%a/attempt_0/slurm-%A_%a.log'
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --reservation=maintenance
#SBATCH --exclusive

# From the environment of sbatch, beside what it has itself: COMPOSER_ATTEMPT, COMPOSER_RUN_ID, HF_TOKEN
export COMPOSER_RANK=$SLURM_ARRAY_TASK_ID
export COMPOSER_ATTEMPT=$((COMPOSER_ATTEMPT + ${SLURM_RESTART_COUNT:-0}))
ended=/data/runs/'it'"'"'s 100%'/run-7/replicas/$SLURM_ARRAY_TASK_ID/attempt_0/\
slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.exit
rm -f "$ended"
wish=- signal= child=
pass_on() {
  signal=$2
  if [ "$wish" != cancelled ]; then wish=$1; fi
  if [ -n "$child" ]; then kill -s "$signal" -- "$3$child" 2>/dev/null; fi
}
trap 'if [ "$SECONDS" -ge 3540 ]; then pass_on timeout TERM ""; else pass_on terminated TERM ""; fi' TERM
trap 'pass_on cancelled TERM ""' USR1
trap 'pass_on cancelled KILL -' USR2
setsid /opt/venv/bin/python -m composer_core.run.worker 'a b' &
child=$!
if [ -n "$signal" ]; then kill -s "$signal" -- "$child" 2>/dev/null; signal=; fi  # it came while the command started
# a signal to this script ends `wait` before the command has ended
until wait "$child"; code=$?; [ -z "$signal" ]; do signal=; done
echo "$code $wish" > "$ended.new" && mv "$ended.new" "$ended"
exit "$code"
"""


def a_replica(rank=0, **changes):
    attempt = changes.pop("attempt", 0)
    values = {
        "job": "run-7",
        "rank": rank,
        "world": 2,
        "attempt": attempt,
        "command": ("/opt/venv/bin/python", "-m", "composer_core.run.worker", "a b"),
        "env": {"COMPOSER_RUN_ID": "run-7", "COMPOSER_RANK": str(rank), "COMPOSER_ATTEMPT": str(attempt)},
        "folder": folder_of(RUN_DIR, rank=rank, attempt=attempt),
        "time_limit_s": None,
        "gpu": None,
    }
    return Replica(**{**values, **changes})


def text(settings=None, **changes):
    (array,) = arrays([a_replica(**changes)])
    return script(array, settings or SlurmSettings())


def test_the_whole_script_of_two_replicas():
    settings = SlurmSettings(
        partition="gpu",
        account="lab",
        qos="high",
        constraint="nvlink&ib",
        mem="64G",
        cpus_per_task=16,
        requeue=True,
        stop_seconds=120,
        sbatch={"reservation": "maintenance", "exclusive": ""},
    )
    # an hour of ours, and the two minutes of `stop_seconds` that the executor adds
    more = {"gpu": ("h200", 8), "time_limit_s": 3720.0, "secrets": {"HF_TOKEN": "hf_top_secret"}}
    (array,) = arrays([a_replica(0, **more), a_replica(1, **more)])
    assert script(array, settings) == WHOLE


def test_without_settings_there_are_no_options_of_theirs():
    options = [line for line in text().splitlines() if line.startswith("#SBATCH")]
    assert [option.removeprefix("#SBATCH --").partition("=")[0] for option in options] == [
        *("job-name", "comment", "array", "nodes", "ntasks", "output", "open-mode", "no-requeue", "export")
    ]


def test_any_gpu_has_no_kind():
    assert "#SBATCH --gres=gpu:2\n" in text(gpu=("", 2))


@pytest.mark.parametrize(
    ("seconds", "minutes", "notice"),
    # 61 s need a second minute; a notice longer than half of the time would come at once
    [(60.0, 1, 30), (61.0, 2, 30), (600.0, 10, 300), (6e6, 100000, 300)],
    ids=["a-minute", "begun", "half", "long"],
)
def test_limits_are_minutes_and_a_notice(seconds, minutes, notice):
    assert f"#SBATCH --time={minutes}\n#SBATCH --signal=B:TERM@{notice}\n" in text(time_limit_s=seconds)


def test_pyxis_sees_working_directory_and_run():
    said = text(SlurmSettings(container={"image": "docker://a b", "runtime": "pyxis"}))
    run_dir = "'/data/runs/it'\"'\"'s 100%/run-7:/data/runs/it'\"'\"'s 100%/run-7'"
    assert (
        f"setsid srun --container-image='docker://a b' --container-mounts=\"$PWD:$PWD\",{run_dir} "
        "--container-workdir=\"$PWD\" /opt/venv/bin/python -m composer_core.run.worker 'a b' &\n"
    ) in said


def test_apptainer_sees_the_run():
    said = text(SlurmSettings(container={"image": "/images/train.sif", "runtime": "apptainer"}))
    assert (
        "setsid apptainer exec --nv --bind '/data/runs/it'\"'\"'s 100%/run-7' /images/train.sif "
        "/opt/venv/bin/python -m composer_core.run.worker 'a b' &\n"
    ) in said


@pytest.mark.parametrize(
    "other",
    [
        a_replica(1, attempt=2),
        a_replica(1, command=("true",)),
        a_replica(1, env={"COMPOSER_RANK": "0"}),
        a_replica(1, secrets={"A": "1"}),
        a_replica(1, folder=Path("/elsewhere")),
        a_replica(1, folder=Path("/data/runs/it's 100%/run-8/replicas/1/attempt_0")),
    ],
    ids=["attempt", "command", "environment", "secret", "depth", "folder"],
)
def test_replicas_that_differ_by_more_than_their_rank_get_arrays_of_their_own(other):
    assert [array.replicas for array in arrays([a_replica(0), other])] == [(a_replica(0),), (other,)]


def test_a_rank_that_is_also_part_of_the_path_stays_there():
    pair = [a_replica(rank, folder=Path(f"/runs/1/replicas/{rank}/0")) for rank in (0, 1)]
    (array,) = arrays(pair)
    assert array.log_pattern() == "/runs/1/replicas/%a/0/slurm-%A_%a.log"
    assert array.file("9", 1, "exit") == Path("/runs/1/replicas/1/0/slurm-9_1.exit")


def test_one_replica_alone_has_its_own_folder():
    (array,) = arrays([a_replica(3)])
    assert array.log_pattern() == "/data/runs/it's 100%%/run-7/replicas/3/attempt_0/slurm-%A_%a.log"


@pytest.mark.parametrize("job", ["run-7", "a:b", "x y"])
def test_a_label_can_be_read_again(job):
    assert read_label(label(a_replica(job=job, attempt=12))) == (job, 12)


@pytest.mark.parametrize("comment", ["", "(null)", "mine", "composer-run:7", "composer-run:a:b", "other:a:1"])
def test_a_comment_of_others_is_no_label(comment):
    assert read_label(comment) is None


# -- as bash runs it ---------------------------------------------------------------------------------------------------

PATIENT = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(5)))\n"
    "print('up', flush=True); time.sleep(60)"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time; child = subprocess.Popen(['sleep', '61']); print(child.pid, flush=True); "
    "time.sleep(60)"
)


@pytest.fixture
def started(tmp_path):
    """Runs the script of one program until its first line; gives process, line and exit file."""
    processes = []

    def start(code, **changes):
        folder = tmp_path / "it's $HOME"
        folder.mkdir()
        (array,) = arrays([a_replica(command=(sys.executable, "-c", code), folder=folder, **changes)])
        file = tmp_path / "script.sh"
        file.write_text(script(array, SlurmSettings(stop_seconds=1)))
        env = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "9"}
        process = subprocess.Popen(
            ["bash", str(file)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        processes.append(process)
        return process, process.stdout.readline().strip(), folder / "slurm-9_0.exit"

    yield start
    for process in processes:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_commands_and_stands_in_the_file(started, code):
    process, line, file = started(f"import os; print(os.environ['COMPOSER_RANK']); raise SystemExit({code})")
    assert (process.wait(10), line, file.read_text()) == (code, "0", f"{code} -\n")


@pytest.mark.parametrize(
    ("number", "limit", "wish"),
    [
        (signal.SIGUSR1, None, "cancelled"),
        (signal.SIGTERM, 60.0, "timeout"),
        # of an hour, not one minute has passed
        (signal.SIGTERM, 3600.0, "terminated"),
        (signal.SIGTERM, None, "terminated"),
    ],
    ids=["by-us", "time-limit", "too-early-for-it", "no-limit"],
)
def test_a_wish_to_end_leaves_the_command_time_to_save(started, number, limit, wish):
    process, _, file = started(PATIENT, time_limit_s=limit)
    process.send_signal(number)
    assert (process.wait(10), file.read_text()) == (5, f"5 {wish}\n")


def test_a_second_signal_while_it_saves_does_no_harm(started):
    process, _, file = started(PATIENT)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert (process.wait(10), file.read_text()) == (5, "5 cancelled\n")


def test_a_program_that_does_not_want_to_end_is_killed(started):
    process, _, file = started(STUBBORN)
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGUSR2)
    assert (process.wait(10), file.read_text()) == (137, "137 cancelled\n")


def test_killed_with_its_children(started):
    process, child, _ = started(PARENT)
    process.send_signal(signal.SIGUSR2)
    process.wait(10)
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
