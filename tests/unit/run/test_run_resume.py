"""What a resume checks and what it leaves, on the fake backend; real trainers in tests/e2e and the plugins."""

import json
import os
import shutil
from pathlib import Path

import pytest

from composer_core.errors import UsageError
from composer_core.plugins.registry import Registry
from composer_core.run import worker
from composer_core.run.directory import RunState
from composer_core.run.files import read_jsonl, write_lines
from composer_core.run.resume import plan_resume, set_lines_aside, spent_seconds, write_resume


@pytest.fixture
def interrupted(planned):
    """A run of four steps that was stopped after `steps` of them."""

    def run(steps=2, do="finish", **more):
        directory = planned(do, f"train.steps={steps}", *(f"{key}={value}" for key, value in more.items()))
        assert worker.main([str(directory.plan), "--quiet"]) == 0
        return directory

    return run


def resume(directory, *overrides):
    planned = plan_resume(directory, Registry.discover(), overrides)
    write_resume(directory, planned)
    return worker.main([str(directory.plan), "--quiet", "--resume", str(planned.step)])


def steps_of(path):
    return [line["step"] for line in read_jsonl(path)]


def test_a_longer_run_goes_on_in_its_own_directory(interrupted):
    directory = interrupted()
    assert resume(directory, "train.steps=4") == 0
    assert steps_of(directory.metrics) == [1, 2, 3, 4]
    assert directory.state() == RunState("done")
    events = [event for event in read_jsonl(directory.events) if event["event"] in ("changed", "resumed")]
    assert [{k: v for k, v in event.items() if k != "time"} for event in events] == [
        {"event": "changed", "changes": {"train.steps": [2, 4]}},
        {"event": "resumed", "pid": os.getpid(), "step": 2},
    ]
    assert directory.read_json("resolved.json")["train.steps"] == {"value": 4, "source": "command line"}
    assert directory.read_json("plan.json")["spec_path"].endswith("spec.yaml")


def test_the_newest_checkpoint_that_is_whole_is_taken_and_broken_ones_are_named(interrupted):
    directory = interrupted(3)
    (directory.checkpoints / "step_3" / "weights").unlink()
    (directory.checkpoints / ".step_5.partial").mkdir()
    planned = plan_resume(directory, Registry.discover(), ["train.steps=4"])
    assert planned.step == 2
    assert planned.notes == (
        "step_3 is incomplete, resuming from step_2",
        "step_5 is incomplete, resuming from step_2",
    )
    assert resume(directory, "train.steps=4") == 0
    assert steps_of(directory.metrics) == [1, 2, 3, 4]
    # what was trained after the checkpoint is kept apart
    assert steps_of(directory.path / "metrics.dropped.jsonl") == [3]
    assert steps_of(directory.path / "rollouts.dropped.jsonl") == [3]


def test_what_the_last_part_left_is_cleared(interrupted):
    directory = interrupted()
    directory.stop_file.write_text("enough")
    (directory.scratch / "rank7").mkdir(parents=True)
    assert resume(directory, "train.steps=3") == 0
    assert not directory.stop_file.exists()
    assert not directory.scratch.exists()


def refusal(directory, *overrides):
    before = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as caught:
        plan_resume(directory, Registry.discover(), overrides)
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == before
    return str(caught.value)


def test_an_override_that_would_make_it_another_run_is_refused_with_the_difference(interrupted):
    directory = interrupted()
    overrides = ["train.learning_rate=0.1", "loss.objective.epsilon=0.3", "train.steps=9", "limits.hours=1"]
    assert refusal(directory, *overrides) == (
        "this would be another run:\n"
        "  loss.objective.epsilon: 0.2 -> 0.3\n"
        "  train.learning_rate: 1e-06 -> 0.1\n"
        f"  fix: leave it as it was; or start a new run of {directory.path.parents[1]}/spec.yaml"
    )


def test_a_plugin_file_that_changed_makes_another_run(interrupted, tmp_path):
    # conftest's spec names the fake backend's own file; the plan is given a copy that can change
    directory = interrupted()
    copy = tmp_path / "fake_backend.py"
    shutil.copy(Path(__file__).with_name("fake_backend.py"), copy)
    text = json.dumps(directory.read_json("plan.json"))
    directory.write_text("plan.json", text.replace(str(Path(__file__).with_name("fake_backend.py")), str(copy)))
    assert plan_resume(directory, Registry.discover(), ["train.steps=3"]).step == 2
    copy.write_text(copy.read_text() + "\n# changed\n")
    assert refusal(directory, "train.steps=3").startswith("this would be another run:\n  plugin fake_backend.py: ")


@pytest.mark.parametrize(
    "harmless",
    ["train.log_every=2", "checkpoint.keep=1", "checkpoint.every=2", "limits={hours: 3}", "sinks=[tensorboard]",
     "executor.threads=1", "train.sample_rollouts=0"],
)  # fmt: skip
def test_what_does_not_reach_the_weights_may_change(interrupted, harmless):
    planned = plan_resume(interrupted(), Registry.discover(), ["train.steps=3", harmless])
    assert {key.partition("[")[0].partition("=")[0] for key in planned.changes} - {"train.steps"}


def test_a_finished_run_has_nothing_left(interrupted):
    directory = interrupted()
    assert refusal(directory) == (
        f"nothing is left to do: run {directory.name} is done\n  fix: train.steps=4 trains longer"
    )


def test_fewer_steps_than_are_done_leave_nothing(interrupted):
    directory = interrupted(3)
    directory.event("failed", reason="later")
    assert refusal(directory, "train.steps=3") == (
        "nothing is left to do: the checkpoint is at step 3 of 3\n  fix: train.steps=6 trains longer"
    )


def test_without_a_complete_checkpoint_there_is_nothing_to_go_on_from(interrupted):
    directory = interrupted()
    for marker in directory.checkpoints.glob("*/COMPLETE"):
        marker.unlink()
    assert refusal(directory, "train.steps=4") == (
        f"{directory.checkpoints}: run {directory.name} has no complete checkpoint to go on from\n"
        "  fix: start it anew, with checkpoint.every=N for checkpoints on the way"
    )


def test_a_schedule_over_all_steps_cannot_be_made_longer(interrupted):
    directory = interrupted(**{"train.schedule": "cosine"})
    assert refusal(directory, "train.steps=4").startswith("train.steps: a cosine schedule stretches over all steps")


def test_a_run_that_still_runs_is_left_alone(interrupted):
    directory = interrupted()
    directory.lock()
    directory.event("started")
    assert refusal(directory) == (f"run {directory.name} is running\n  fix: composer-run stop {directory.name}")


def test_the_spec_file_may_have_changed_and_that_is_said(interrupted):
    directory = interrupted()
    spec = Path(directory.read_json("plan.json")["spec_path"])
    spec.write_text(spec.read_text().replace("steps: 4", "steps: 400"))
    planned = plan_resume(directory, Registry.discover(), ["train.steps=3"])
    assert planned.notes == (f"note: {spec} has changed; the run goes on with the spec it was started with",)
    assert planned.spec.train.steps == 3


def test_another_version_than_the_checkpoints_is_said(interrupted):
    directory = interrupted()
    facts = directory.read_json("provenance.json")
    now = facts["worker"]["versions"]["torch"]
    facts["worker"]["versions"]["torch"] = "1.0"
    directory.write_json("provenance.json", facts)
    (note,) = plan_resume(directory, Registry.discover(), ["train.steps=3"]).notes
    assert note == f"note: torch was 1.0 and is {now} now; the last digits may differ"


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("forget", "backend 'fake' resumed after step 2, but logs step 1 first"),
        ("idle", "backend 'fake' resumed after step 2 and trained no step"),
    ],
)
def test_a_backend_that_does_not_really_resume_fails(interrupted, capsys, do, said):
    directory = interrupted(do=do)
    assert resume(directory, "train.steps=4") == 4
    assert capsys.readouterr().err == said + "\n"


def test_a_checkpoint_that_went_away_since_is_a_failure(interrupted, capsys):
    directory = interrupted()
    assert worker.main([str(directory.plan), "--resume", "7"]) == 4
    said = f"{directory.checkpoints}: checkpoint step_7 is not there or not complete\n"
    assert capsys.readouterr().err.endswith(said)


def test_other_prompts_than_the_checkpoints_are_refused(interrupted):
    from composer_core.run.control import Control, StopSignals
    from composer_core.run.progress import Silent
    from composer_core.run.resume import checkpoint_of
    from composer_core.run.session import RunSession

    directory = interrupted()
    spec = plan_resume(directory, Registry.discover(), ["train.steps=4"]).spec

    def session(spec, checkpoint):
        return RunSession(
            directory, spec, upstream={}, rewards=[], objective=None, display=Silent(), resume_from=checkpoint,
            control=Control(StopSignals(), stop_file=directory.stop_file),
        )  # fmt: skip

    first = session(spec, None)
    first.prompts()
    with first.checkpoint(3) as folder:
        (folder / "weights").write_text("3")
    assert session(spec, checkpoint_of(directory, 3)).prompts()
    fewer = spec.model_copy(update={"data": spec.data.model_copy(update={
        "prompts": spec.data.prompts.model_copy(update={"limit": 5})})})  # fmt: skip
    with pytest.raises(UsageError, match="these are not the prompts that the run began with"):
        session(fewer, checkpoint_of(directory, 3)).prompts()


def test_lines_are_set_aside_once_and_none_is_lost(interrupted):
    directory = interrupted(3)
    lines = read_jsonl(directory.metrics)
    set_lines_aside(directory, 1)
    set_lines_aside(directory, 1)
    assert read_jsonl(directory.metrics) == lines[:1]
    assert read_jsonl(directory.path / "metrics.dropped.jsonl") == lines[1:]


def test_time_spent_is_that_of_all_parts_to_their_last_sign_of_life(planned):
    directory = planned("finish")
    # part one: 100..107 by its metrics, killed; part two: 200..203 by its end; 93 s of pause do not count
    write_lines(directory.metrics, [{"step": 1, "time": 104.0}, {"step": 2, "time": 201.0}])
    write_lines(directory.path / "metrics.dropped.jsonl", [{"step": 2, "time": 107.0}])
    write_lines(directory.events, [
        {"event": "started", "time": 100.0}, {"event": "changed", "time": 199.0}, {"event": "resumed", "time": 200.0},
        {"event": "finished", "time": 203.0},
    ])  # fmt: skip
    assert spent_seconds(directory) == pytest.approx(7 + 3)
