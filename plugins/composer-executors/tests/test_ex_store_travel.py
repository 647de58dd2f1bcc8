"""What travels by a run's store: what a launch ships, what a worker's Pusher puts there, what is brought back."""

import json
import os

import pytest

from composer_core.errors import RunFailed, UsageError
from composer_core.jobs import Job
from composer_core.plugins.registry import Registry
from composer_core.run.directory import RunDirectory
from composer_core.run.files import fill_folder, is_complete, write_json
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_executors.bootstrap import Pusher
from composer_executors.bringing import Bringing, Courier
from composer_executors.journal import Reader, Writer
from composer_executors.shipping import bootstrap_argv, input_of, paths_of, ship, unpack, wished_to_stop
from composer_executors.store import Store

SPEC = """\
version: 1
name: travel
plugins: [./own_plugin.py]
model: {path: ./model}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: python, function: "./reward.py:digits"}, {use: regex, pattern: /etc/hostname}]
loss: {objective: {use: grpo}}
train: {steps: 2}
teachers: {strong: {use: openai, base_url: "http://127.0.0.1:9/v1", model: m, key: "${env:TEACHER_KEY}"}}
backend: {use: toy}
executor: {use: local, python: ./bin/python, store: store}
checkpoint: {every: 1, keep: 2}
"""


@pytest.fixture
def job(tmp_path):
    """Of a planned run, with its store beside it."""
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    (home / "bin").mkdir()
    for name in ("own_plugin.py", "prompts.jsonl", "reward.py", "model/config.json", "bin/python", "secret.txt"):
        (home / name).write_text(f"{name}\n" if not name.endswith(".py") else f"# {name}\n")
    (home / "spec.yaml").write_text(SPEC)
    registry = Registry.discover()
    plan = make_plan(load_spec(home / "spec.yaml", registry), registry)
    run = tmp_path / "runs" / "travel-1"
    for folder in ("logs", "checkpoints", "replicas", "scratch"):
        (run / folder).mkdir(parents=True)
    (run / "logs" / "worker.log").write_text("of an earlier part\n")
    (run / "events.jsonl").write_text('{"event": "started"}\n')
    write_json(run / "jobs.json", {})
    write_json(run / "plan.json", plan.to_json())
    argv = ("-m", "composer_core.run.worker", str(run / "plan.json"), "--quiet")
    return Job("travel-1", argv, run, store=(tmp_path / "store").as_uri())


@pytest.fixture
def there(tmp_path):
    """The worker's run directory."""
    path = tmp_path / "elsewhere" / "travel-1"
    (path / "logs").mkdir(parents=True)
    return RunDirectory(path)


@pytest.fixture
def away(job, there):
    """Shipped and unpacked: (store, Pusher, writer)."""
    ship(job)
    store = Store(job.store)
    writer = Writer(store, 0, {"launch": input_of(job)})
    unpack(store, input_of(job), there)
    pusher = Pusher(there, writer, {})
    pusher.look_at_lines()
    writer.begin([])
    return store, pusher, writer


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def save(directory, name, **files):
    with fill_folder(directory.path / name, step=1, prompts="abc") as folder:
        for inner, text in files.items():
            (folder / inner).write_text(text)


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- there -------------------------------------------------------------------------------------------------------------


def test_a_launch_ships_the_run_and_what_its_plan_names_and_nothing_else(job, there, tmp_path):
    ship(job)
    unpack(Store(job.store), input_of(job), there)
    found = sorted(content(there.path))
    assert found == [
        "events.jsonl",
        "files/0/own_plugin.py",
        "files/1/model/config.json",
        "files/2/prompts.jsonl",
        "files/3/reward.py",
        "plan.json",
    ]
    before = json.loads((job.run_dir / "plan.json").read_text())
    spec = json.loads((there.path / "plan.json").read_text())["spec"]
    assert spec["model"]["path"] == str(there.path / "files/1/model")
    assert spec["data"]["prompts"]["path"] == str(there.path / "files/2/prompts.jsonl")
    assert spec["data"]["rewards"][0]["settings"]["function"] == f"{there.path}/files/3/reward.py:digits"
    assert spec["data"]["rewards"][1]["settings"]["pattern"] == "/etc/hostname"  # looks like a path, is none
    assert spec["executor"] == before["spec"]["executor"]  # the control side's business
    assert spec["teachers"]["strong"]["settings"]["key"] == "${env:TEACHER_KEY}"
    plan = json.loads((there.path / "plan.json").read_text())
    assert [plugin["file"] for plugin in plan["plugins"] if plugin["file"]] == [f"{there.path}/files/0/own_plugin.py"]


def test_a_file_of_the_plan_that_is_gone_is_named(job, tmp_path):
    (tmp_path / "home" / "prompts.jsonl").unlink()
    with pytest.raises(UsageError) as refused:
        ship(job)
    assert str(refused.value) == f"plan.json: no such file or folder: {tmp_path}/home/prompts.jsonl"


def test_paths_of_a_plan_are_found_by_what_settings_say_of_themselves(job, tmp_path):
    plan = json.loads((job.run_dir / "plan.json").read_text())
    names = ["own_plugin.py", "model", "prompts.jsonl", "reward.py"]
    assert list(paths_of(plan, Registry.discover())) == [tmp_path / "home" / name for name in names]


def test_a_replica_runs_the_bootstrap_with_the_workers_options(job):
    assert bootstrap_argv(job, "17") == (
        "-m", "composer_executors.bootstrap", job.store, "--input", "17", "--", "--quiet"
    )  # fmt: skip


# -- back --------------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_are_written_each_once(job, there, away):
    _, pusher, _ = away
    here = Bringing(job)
    append(there.metrics, '{"step": 1}\n{"step": ')  # the second is still being written
    pusher.look()
    here.bring()
    assert (job.run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n'
    append(there.metrics, "2}\n")
    append(there.logs / "worker.log", "a line\n")
    pusher.look()
    here.bring()
    here.bring()
    assert (job.run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (job.run_dir / "logs" / "worker.log").read_text() == "a line\n"
    append(there.metrics, '{"step": 3}\n')
    append(there.logs / "worker.log", "no line break")
    pusher.finish(0)
    Bringing(job).bring()  # another process goes on where this one stopped
    assert (job.run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (job.run_dir / "logs" / "worker.log").read_text() == "a line\nno line break"
    assert (job.run_dir / "events.jsonl").read_text() == '{"event": "started"}\n'


def test_one_that_was_killed_before_it_wrote_down_what_it_brought_repeats_nothing(job, there, away):
    _, pusher, _ = away
    append(there.metrics, "1\n")
    pusher.look()
    Bringing(job).bring()
    progress = (job.run_dir / "replicas" / "store.json").read_text()
    append(there.metrics, "2\n")
    pusher.look()
    Bringing(job).bring()
    (job.run_dir / "replicas" / "store.json").write_text(progress)
    append(there.metrics, "3\n")
    pusher.look()
    Bringing(job).bring()
    assert (job.run_dir / "metrics.jsonl").read_text() == "1\n2\n3\n"


def test_a_line_that_a_command_added_here_stays(job, there, away):
    _, pusher, _ = away
    append(there.events, "worker\n")
    pusher.finish(1)
    Bringing(job).bring()
    append(job.run_dir / "events.jsonl", "command\n")
    Bringing(job).bring()
    assert (job.run_dir / "events.jsonl").read_text() == '{"event": "started"}\nworker\ncommand\n'


def test_folders_come_back_whole_equal_and_only_as_many_as_are_kept(job, there, away):
    store, pusher, _ = away
    here = Bringing(job)
    with fill_folder(there.checkpoints / "step_1") as folder:
        (folder / "w").write_text("1")
        pusher.look()  # not complete: not for the store
    (there.checkpoints / ".step_9.partial").mkdir()
    pusher._look_at_folders()
    here.bring()
    for step in (2, 3):
        save(there, f"checkpoints/step_{step}", w=str(step), v="v" * step)
        pusher._look_at_folders()
        pusher._look_at_folders()
    save(there, "model", weights="w")
    append(there.events, "finished\n")
    (there.path / "report.html").write_text("<html>")
    write_json(there.path / "lock.json", {"pid": 1, "host": "elsewhere"})
    pusher.finish(0)
    here.bring()
    assert sorted(path.name for path in (job.run_dir / "checkpoints").iterdir()) == ["step_2", "step_3"]
    for name in ("checkpoints/step_2", "checkpoints/step_3", "model"):
        assert is_complete(job.run_dir / name)
        assert content(job.run_dir / name) == content(there.path / name)
    assert (job.run_dir / "report.html").read_text() == "<html>"
    assert json.loads((job.run_dir / "lock.json").read_text()) == {"pid": 1, "host": "elsewhere"}
    trees = [record["tree"] for record in Reader(store, 0).records(0) if "tree" in record]
    assert trees == ["checkpoints/step_1", "checkpoints/step_2", "checkpoints/step_3", "model", "rest"]
    assert store.read("rank=0/writer=0/tree=1/w") is None  # step_1 was taken away for good


def test_a_damaged_checkpoint_is_not_taken_and_the_command_says_so(job, there, away, tmp_path):
    _, pusher, _ = away
    save(there, "checkpoints/step_1", w="1")
    append(there.events, "checkpoint\n")
    pusher.finish(0)
    (tmp_path / "store" / "rank=0/writer=0/tree=1/w").write_text("2")
    with pytest.raises(RunFailed, match="damaged in the store") as damaged:
        Bringing(job).bring()
    assert not (job.run_dir / "checkpoints" / "step_1").exists()
    assert "checkpoint\n" not in (job.run_dir / "events.jsonl").read_text()  # nothing speaks of what is not here
    said = []
    assert not Courier(job, said.append).last()
    assert said == [
        f"what the run left in its store is not all here: {damaged.value}\n  fix: composer-run status travel-1"
    ]


def test_another_writers_lines_take_the_place_of_the_first_ones(job, there, away, tmp_path):
    store, pusher, _ = away
    append(there.metrics, "1\n2\n3\n")
    pusher.look()
    here = Bringing(job)
    here.bring()
    again = RunDirectory(tmp_path / "again")
    again.path.mkdir()
    writer = Writer(store, 0, {"launch": input_of(job)})
    unpack(store, input_of(job), again)
    append(again.metrics, "1\n2\n")  # it goes on from step 2
    second = Pusher(again, writer, {})
    second.look_at_lines()
    here.bring()
    assert (job.run_dir / "metrics.jsonl").read_text() == "1\n2\n3\n"  # it has not begun
    writer.begin([0])
    append(again.metrics, "3 anew\n")
    second.look()
    append(there.metrics, "4 of one that was thought dead\n")
    pusher.look()
    here.bring()
    assert (job.run_dir / "metrics.jsonl").read_text() == "1\n2\n3 anew\n"


def test_a_stop_file_here_is_a_wish_there(job, away):
    store, _, _ = away
    here = Bringing(job)
    here.bring()
    assert wished_to_stop(store, input_of(job)) is None
    (job.run_dir / "STOP").write_text("the reward collapsed\n")
    here.bring()
    here.bring()
    assert wished_to_stop(store, input_of(job)) == b"the reward collapsed\n"


def test_a_checkpoint_that_is_pruned_while_it_is_put_away_is_no_tree(there, away, monkeypatch):
    store, pusher, _ = away
    save(there, "checkpoints/step_1", w="1")
    link = os.link

    def pruned_meanwhile(source, target, **options):
        (there.checkpoints / "step_1" / "w").unlink(missing_ok=True)
        link(source, target, **options)

    monkeypatch.setattr("composer_executors.bootstrap.os.link", pruned_meanwhile)
    pusher._look_at_folders()
    assert Reader(store, 0).trees() == {}
