"""Loading: overrides, sources, paths, local plugin files, and files that cannot be read."""

from __future__ import annotations

import json

import pytest

from composer_core.errors import SpecError, UsageError
from composer_core.plugins.contributions import Kind
from composer_core.spec.load import load_spec
from composer_core.spec.resolved import values
from composer_core.spec.yaml import parse

LOCAL_PLUGIN = """\
from composer_core.plugins.contributions import LossChannelPlugin
from composer_core.plugins.hookspecs import hookimpl

@hookimpl
def composer_loss_channels():
    yield LossChannelPlugin(name="local", summary="", target=f"{__name__}:Local")

class Local:
    pass
"""


def test_a_right_spec_becomes_typed_objects(load, spec_text):
    loaded = load(spec_text)
    assert loaded.spec.train.steps == 5
    assert loaded.text == spec_text
    channel = loaded.spec.loss.channels[0]
    assert (channel.kind, channel.name, channel.owner, channel.weight) == (Kind.CHANNEL, "lean", "fake 1.2", 0.5)
    assert channel.settings.strength == 2.0
    assert loaded.spec.executor.use == "inline"


def test_the_same_spec_as_json_is_the_same_run(load, tmp_path, registry, spec_text):
    expected = load(spec_text).spec
    (tmp_path / "spec.json").write_text(json.dumps(parse(spec_text, "s").data))
    assert load_spec("spec.json", registry).spec == expected


def test_every_value_of_the_resolved_spec_has_a_source(load, spec_text):
    loaded = load(spec_text, "train.steps=7", "loss.channels.lean.span=[a, b]")
    assert set(loaded.sources) == set(values(loaded.spec))
    picked = ("version", "train.steps", "train.group_size", "executor.use", "loss.channels[0].strength")
    assert {key: loaded.sources[key] for key in picked} == {
        "version": "spec.yaml:1:1",
        "train.steps": "command line",
        "train.group_size": "default",
        "executor.use": "default",
        "loss.channels[0].strength": "spec.yaml:11:32",
    }
    assert loaded.sources["loss.channels[0].span[1]"] == "command line"


# -- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=9", "train.steps", 9),
        ("train.learning_rate=1e-5", "train.learning_rate", 1e-5),
        ("loss.channels.lean.weight=0", "loss.channels[0].weight", 0.0),
        ("loss.channels[0].weight=0.25", "loss.channels[0].weight", 0.25),
        ("data.rewards.regex.pattern=a=b", "data.rewards[0].pattern", "a=b"),
        ("checkpoint.every=2", "checkpoint.every", 2),  # the spec has no such section
        ("checkpoint={every: 3, keep: 1}", "checkpoint.keep", 1),
        ("loss.channels=[]", "loss.channels", []),
        ("model.lora={rank: 4}", "model.lora.rank", 4),
        ("executor.threads=2", "executor.threads", 2),
    ],
)
def test_an_override_reaches_its_value(load, override, key, value, spec_text):
    overrides = ["executor.use=inline", override] if override.startswith("executor") else [override]
    assert values(load(spec_text, *overrides).spec)[key] == value


def test_the_last_of_two_overrides_holds(load, spec_text):
    assert load(spec_text, "train.steps=1", "train.steps=2").spec.train.steps == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.stepz=5",
            "command line (train.stepz=5): train.stepz: unknown key\n  fix: did you mean train.steps?",
        ),
        (
            "loss.channels.sdpo.weight=1",
            "command line (loss.channels.sdpo.weight=1): loss.channels.sdpo.weight: "
            "no item of loss.channels uses 'sdpo', there is lean",
        ),
        (
            "loss.channels[3].weight=1",
            "command line (loss.channels[3].weight=1): loss.channels[3].weight: "
            "loss.channels has 1 items, the last is loss.channels[0]",
        ),
        ("train.steps.more=1", "command line (train.steps.more=1): train.steps.more: train.steps is 5, not a section"),
        ("train[0]=1", "command line (train[0]=1): train[0]: train is a section, not a list"),
        (
            "train.steps",
            "command line (train.steps): this is not an override\n  fix: write key=value, e.g. train.steps=5",
        ),
        (
            "train..steps=1",
            "command line (train..steps=1): this is not an override\n  fix: write key=value, e.g. train.steps=5",
        ),
        ("train.steps=ten", "command line (train.steps=ten): train.steps: must be a whole number, got 'ten'"),
        (
            "train={steps: 1, steps: 2}",
            "command line (train={steps: 1, steps: 2}): train: this key stands twice (first at line 1)\n"
            "  fix: remove one of them",
        ),
    ],
)
def test_an_override_that_does_not_apply_is_named_as_the_place(load, override, message, spec_text):
    with pytest.raises(SpecError) as error:
        load(spec_text, override)
    assert str(error.value) == message


def test_an_override_for_two_rewards_of_one_kind_asks_for_the_number(load, spec_text):
    text = spec_text.replace("loss:", '    - {use: regex, pattern: "x"}\nloss:')
    with pytest.raises(SpecError) as error:
        load(text, "data.rewards.regex.weight=2")
    assert error.value.problems[0].problem == "'regex' is both data.rewards[0] and data.rewards[1]"


def test_an_override_of_channels_that_are_not_there_is_refused(load, spec_text):
    text = spec_text.replace("  channels:\n    - {use: lean, weight: 0.5, strength: 2}\n", "")
    with pytest.raises(SpecError) as error:
        load(text, "loss.channels.lean.weight=1")
    assert error.value.problems[0].problem == "the spec has no loss.channels"


# -- paths -----------------------------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_spec_and_hub_ids_stay(load, tmp_path, monkeypatch, spec_text):
    (tmp_path / "weights").mkdir()
    reward = '{use: python, function: "./r.py:f"}'
    text = spec_text.replace("{builtin: tiny}", "{path: weights}").replace("{builtin: digits}", "{path: a/b.jsonl}")
    spec = load(text.replace('{use: regex, pattern: "[0-9]"}', reward)).spec
    assert spec.model.path == str(tmp_path / "weights")
    assert spec.data.prompts.path == str(tmp_path / "a" / "b.jsonl")  # whether it is there or not
    assert spec.data.rewards[0].settings.function == f"{tmp_path / 'r.py'}:f"
    hub = spec_text.replace("{builtin: tiny}", "{path: Qwen/Qwen3-0.6B}").replace("{builtin: digits}", "{dataset: a/b}")
    spec = load(hub).spec
    assert (spec.model.path, spec.data.prompts.dataset) == ("Qwen/Qwen3-0.6B", "a/b")


def test_home_is_expanded(load, tmp_path, monkeypatch, spec_text):
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = load(spec_text.replace("{builtin: digits}", "{path: ~/p.jsonl}")).spec
    assert spec.data.prompts.path == str(tmp_path / "p.jsonl")


# -- local plugin files -----------------------------------------------------------------------------------------------


def test_a_local_plugin_file_brings_its_channel(load, tmp_path, spec_text):
    (tmp_path / "mine.py").write_text(LOCAL_PLUGIN)
    spec = load(
        "plugins: [./mine.py]\n" + spec_text.replace("{use: lean, weight: 0.5, strength: 2}", "{use: local}")
    ).spec
    assert spec.loss.channels[0].owner == "mine.py (local file)"
    assert spec.plugins == [str(tmp_path / "mine.py")]


def test_a_broken_local_plugin_file_is_an_error_at_its_line(load, tmp_path, spec_text):
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(SpecError) as error:
        load(spec_text + "plugins:\n  - mine.py\n")
    assert str(error.value) == (
        "spec.yaml:16:5: plugins[0]: mine.py: this plugin file does not load: ZeroDivisionError: division by zero"
    )


def test_a_plugin_file_listed_twice_is_refused(load, tmp_path, spec_text):
    (tmp_path / "mine.py").write_text(LOCAL_PLUGIN)
    with pytest.raises(SpecError) as error:
        load(spec_text + "plugins: [mine.py, ./mine.py]\n")
    assert str(error.value) == "spec.yaml:15:20: plugins[1]: ./mine.py stands twice\n  fix: remove one"


# -- files that cannot be read ----------------------------------------------------------------------------------------


def test_a_spec_that_is_not_there(tmp_path, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"\Anope\.yaml: no such spec\Z"):
        load_spec("nope.yaml", registry)


def test_a_folder_is_not_a_spec(tmp_path, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"\Afolder: a spec is a file, this is not one\Z"):
        load_spec("folder", registry)


def test_a_spec_that_is_not_utf8(tmp_path, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UsageError, match=r"\Aspec\.yaml: not text in UTF-8 \(byte 6\)\Z"):
        load_spec("spec.yaml", registry)
