"""Why a run ends early: in process, over ranks, and through a worker."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from composer_core.run import rebuild, worker
from composer_core.run.control import Control, StopSignals, agree
from composer_core.run.directory import RunState
from composer_core.run.files import read_jsonl


class Trip:
    def check(self, step, metrics):
        return "it tripped" if metrics.get("bad") else None


def control(folder, **options):
    return Control(StopSignals(), stop_file=folder / "STOP", **options)


def test_there_is_no_reason_without_one(tmp_path):
    assert control(tmp_path, hours=1.0).reason() is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [("the reward\n collapsed \n", "the reward collapsed"), ("", "there is a file STOP"), ("x" * 999, "x" * 400)],
    ids=["text", "empty", "long"],
)
def test_the_text_of_a_stop_file_is_the_reason(tmp_path, text, reason):
    run = control(tmp_path)
    (tmp_path / "STOP").write_text(text)
    assert run.reason() == reason


def test_hours_count_from_the_start_of_the_worker_with_those_of_earlier_parts(tmp_path):
    now = [100.0]
    run = control(tmp_path, hours=0.5, spent_s=800.0, clock=lambda: now[0])
    now[0] += 999.0  # half an hour is 1800 s
    assert run.reason() is None
    now[0] += 1.0
    assert run.reason() == "limits.hours: 0.5 h are over"


def test_a_tripped_wire_names_its_step_and_the_first_reason_stays(tmp_path):
    run = control(tmp_path, tripwires=[Trip()])
    run.observe(1, {})
    assert run.reason() is None
    run.observe(2, {"bad": 1.0})
    run.observe(3, {"bad": 1.0})
    (tmp_path / "STOP").write_text("later")
    assert run.reason() == "it tripped at step 2"


def test_one_process_agrees_with_itself():
    assert agree("why") == "why"
    assert agree(None) is None


@pytest.mark.slow
def test_all_ranks_get_the_reason_of_the_lowest_rank_that_has_one(tmp_path):
    code = textwrap.dedent("""
        import json, sys
        import torch.distributed as dist
        from composer_core.run.control import agree
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
        said = [agree(None), agree("größer" if rank else None), agree(f"rank {rank}" if rank == 2 else None)]
        print(json.dumps(said))
        dist.destroy_process_group()
    """)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "meet")], env=environment, stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == [[None, "größer", "rank 2"]] * 3


# -- through a worker --------------------------------------------------------------------------------------------------


def series(**values):
    return f"backend.series={json.dumps(values)}"


@pytest.mark.parametrize(
    ("overrides", "step", "reason"),
    [
        (["backend.do=nan"], 2, "loss/total is nan at step 2"),
        (
            ["limits.kl=0.1", "loss.objective.kl_coef=0.1", series(**{"policy/kl": [0.0, 0.05, 0.2, 0.3]})],
            3,
            "limits.kl: policy/kl is 0.2, above 0.1 at step 3",
        ),
        (
            ["limits.reward_drop=0.5", "train.steps=20", series(**{"reward/mean": [1.0] * 10 + [0.0] * 10})],
            16,
            "limits.reward_drop: the mean reward of the last 10 logged steps is 0.4, more than 50% below the best, 1 "
            "at step 16",
        ),
    ],
    ids=["non-finite", "kl", "reward-drop"],
)
def test_a_tripwire_ends_the_run_with_exit_code_5_and_a_checkpoint(planned, overrides, step, reason):
    directory = planned("finish", *overrides)
    assert worker.main([str(directory.plan)]) == 5
    assert directory.state() == RunState("stopped", reason)
    assert directory.complete_checkpoints()[-1][0] == step
    assert read_jsonl(directory.metrics)[-1]["step"] == step


@pytest.mark.parametrize(("allowed", "code"), [("false", 5), ("true", 0)], ids=["stops", "allowed"])
def test_a_dead_channel_ends_the_run_unless_that_is_allowed(planned, allowed, code, monkeypatch):
    from composer_core.loss.composite import ActiveChannel, CompositeLoss
    from composer_core.loss.policy import PolicyObjective
    from composer_core.loss.presets import PRESETS
    from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
    from composer_core.testing.fakes import Brevity

    def composite(spec, *_):
        objective = PolicyObjective(PRESETS["grpo"], OBJECTIVE_SETTINGS["grpo"]())
        return CompositeLoss([ActiveChannel("mute", 1.0, Brevity())], objective)

    monkeypatch.setattr(rebuild, "composite", composite)
    mute = series(**{"active/mute": [0.5] * 4, "loss/mute": [0.0] * 4, "grad_norm/mute": [0.0] * 4})
    directory = planned("finish", "limits.dead_after=3", f"limits.allow_dead={allowed}", mute)
    assert worker.main([str(directory.plan)]) == code
    said = "channel 'mute' is dead: neither loss nor gradient in the last 3 logged steps, 3 of them with rows at step 3"
    if code:
        assert directory.state() == RunState("stopped", said)
    else:
        warnings = [event["reason"] for event in read_jsonl(directory.events) if event["event"] == "warning"]
        assert warnings == [said]


def test_a_stop_file_ends_the_run_with_its_text_as_reason(planned, capsys):
    directory = planned("wait")
    directory.stop_file.write_text("lunch")
    # before the first step nothing is there to save
    assert worker.main([str(directory.plan)]) == 5
    assert directory.state() == RunState("stopped", "lunch before the first step")


def test_a_stop_file_is_seen_after_the_step(planned):
    directory = planned("wait")

    def user():
        wait_for(directory.complete_checkpoints)
        directory.write_text("STOP", "lunch\n")

    thread = threading.Thread(target=user)
    thread.start()
    assert worker.main([str(directory.plan)]) == 5
    thread.join()
    assert directory.state() == RunState("stopped", "lunch")


def test_a_time_limit_ends_the_run(planned):
    directory = planned("wait", "limits.hours=0.0001")
    assert worker.main([str(directory.plan)]) == 5
    assert directory.state().reason in (
        "limits.hours: 0.0001 h are over", "limits.hours: 0.0001 h are over before the first step",
    )  # fmt: skip


@pytest.mark.slow
def test_a_second_worker_on_the_same_directory_is_refused_and_writes_nothing(planned):
    directory = planned("wait")
    command = [sys.executable, "-m", "composer_core.run.worker", str(directory.plan)]
    with subprocess.Popen(command) as first:
        wait_for(lambda: directory.complete_checkpoints(), first)
        before = directory.events.read_text()
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert second.stderr == (
            f"run {directory.name} is running already: process {first.pid}\n  fix: composer-run stop {directory.name}\n"
        )
        assert directory.events.read_text() == before
        assert directory.state() == RunState("running")
        first.terminate()
        assert first.wait(timeout=60) == 5


def test_a_lock_of_a_dead_process_is_taken_over(planned):
    directory = planned("finish")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    lock = {"pid": done.pid, "process_start": "1", "host": os.uname().nodename, "time": 0}
    directory.write_json("lock.json", lock)
    directory.lock()
    assert directory.read_json("lock.json")["pid"] == os.getpid()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's own")
def test_a_worker_whose_command_is_killed_stops_after_its_step(planned, tmp_path):
    directory = planned("wait")
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from composer_core.plugins.builtin_settings import InlineSettings
        from composer_core.jobs import Job
        from composer_core.run.inline import InlineExecutor
        plan = Path(sys.argv[1])
        inline = InlineExecutor(InlineSettings())
        job = Job(name="r", argv=("-m", "composer_core.run.worker", str(plan)), run_dir=plan.parent)
        inline.collect(inline.launch(job))
    """)
    with subprocess.Popen([sys.executable, "-c", code, str(directory.plan)], stderr=subprocess.DEVNULL) as command:
        wait_for(lambda: directory.complete_checkpoints(), command)
        command.send_signal(signal.SIGKILL)
        command.wait(timeout=60)
    wait_for(lambda: directory.state().state != "running")
    assert directory.state() == RunState("stopped", "the command that started it is gone")
    assert [step for step, _ in directory.complete_checkpoints()] == [1]


def wait_for(condition, process=None):
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
