"""`extends`: what merges, what replaces, where values come from and what their paths are relative to."""

from __future__ import annotations

import pytest

from composer_core.errors import SpecError
from composer_core.spec.load import load_spec
from composer_core.spec.resolved import values


@pytest.fixture
def extend(tmp_path, monkeypatch, registry, spec_text):
    """`extend(text, *overrides, base=...)`: a spec in the current folder, over base.yaml in the folder `shared`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()

    def _extend(text, *overrides, base=spec_text):
        (tmp_path / "shared" / "base.yaml").write_text(base)
        (tmp_path / "spec.yaml").write_text("extends: shared/base.yaml\n" + text)
        return load_spec("spec.yaml", registry, overrides=overrides)

    return _extend


def test_sections_merge_and_the_rest_stays(extend):
    spec = extend("name: mine\ntrain: {learning_rate: 1e-4}\n").spec
    assert (spec.name, spec.train.learning_rate, spec.train.steps) == ("mine", 1e-4, 5)
    assert spec.loss.channels[0].settings.strength == 2.0


def test_a_block_with_the_same_use_or_none_merges(extend, spec_text):
    base = spec_text.replace("{use: grpo}", "{use: grpo, epsilon: 0.1, kl_coef: 0.5}")
    objective = extend("loss: {objective: {use: grpo, epsilon: 0.3}}\n", base=base).spec.loss.objective
    assert (objective.settings.epsilon, objective.settings.kl_coef) == (0.3, 0.5)
    objective = extend("loss: {objective: {epsilon: 0.3}}\n", base=base).spec.loss.objective
    assert (objective.name, objective.settings.epsilon, objective.settings.kl_coef) == ("grpo", 0.3, 0.5)


def test_a_block_with_another_use_replaces_all_of_it(extend, spec_text):
    base = spec_text.replace("{use: grpo}", "{use: grpo, epsilon: 0.1, kl_coef: 0.5}")
    objective = extend("loss: {objective: {use: cispo}}\n", base=base).spec.loss.objective
    assert (objective.name, objective.settings.kl_coef) == ("cispo", 0.0)


def test_a_list_replaces(extend):
    assert extend("loss: {channels: []}\n").spec.loss.channels == []


def test_null_takes_a_section_out(extend, spec_text):
    base = spec_text.replace("{builtin: tiny}", "{builtin: tiny, lora: {rank: 4}}")
    assert extend("model: {lora: null}\n", base=base).spec.model.lora is None


def test_each_value_says_which_file_it_comes_from(extend):
    loaded = extend("train: {learning_rate: 1e-4}\nloss: {channels: [{use: lean}]}\n", "seed=3")
    picked = ("train.learning_rate", "train.steps", "loss.channels[0].use", "seed", "loss.channels[0].strength")
    assert {key: loaded.sources[key] for key in picked} == {
        "train.learning_rate": "spec.yaml:2:9",
        "train.steps": "shared/base.yaml:13:3",
        "loss.channels[0].use": "spec.yaml:3:20",
        "seed": "command line",
        # the base's list had a strength at this key; the new list has not, so nothing of it may shine through
        "loss.channels[0].strength": "default",
    }
    assert set(loaded.sources) == set(values(loaded.spec))


def test_overrides_win_over_both_files(extend):
    assert extend("train: {steps: 6}\n", "train.steps=7", "loss.channels.lean.weight=0").spec.train.steps == 7


def test_paths_are_relative_to_the_file_that_holds_them(extend, tmp_path, spec_text):
    base = spec_text.replace("{builtin: digits}", "{path: tasks.jsonl}").replace(
        '{use: regex, pattern: "[0-9]"}', '{use: python, function: "./r.py:f"}'
    )
    spec = extend("data: {eval: {path: held.jsonl}}\n", base=base).spec
    assert spec.data.prompts.path == str(tmp_path / "shared" / "tasks.jsonl")
    assert spec.data.rewards[0].settings.function == f"{tmp_path / 'shared' / 'r.py'}:f"
    assert spec.data.eval.path == str(tmp_path / "held.jsonl")
    spec = extend("", "data.prompts.path=other.jsonl", base=base).spec  # as without a base: relative to the spec
    assert spec.data.prompts.path == str(tmp_path / "other.jsonl")


def test_a_chain_of_three_with_the_nearest_on_top(extend, tmp_path, spec_text):
    (tmp_path / "root.yaml").write_text(spec_text.replace("{builtin: digits}", "{path: p.jsonl}"))
    loaded = extend("name: top\n", base="extends: ../root.yaml\nname: middle\nseed: 8\n")
    assert (loaded.spec.name, loaded.spec.seed, loaded.spec.train.steps) == ("top", 8, 5)
    assert loaded.spec.data.prompts.path == str(tmp_path / "p.jsonl")
    assert loaded.sources["train.steps"] == "root.yaml:13:3"
    assert loaded.sources["seed"] == "shared/base.yaml:3:1"


def test_a_base_may_be_named_by_an_absolute_path_or_a_link(tmp_path, registry, spec_text):
    (tmp_path / "base.yaml").write_text(spec_text)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "base.yaml")
    (tmp_path / "spec.yaml").write_text(f"extends: {tmp_path / 'link.yaml'}\nname: mine\n")
    assert load_spec(tmp_path / "spec.yaml", registry).spec.name == "mine"


def test_a_plugin_file_of_the_base_is_found_beside_the_base(extend, tmp_path, spec_text):
    base = "plugins: [mine.py]\n" + spec_text
    (tmp_path / "shared" / "mine.py").write_text("")
    assert extend("name: mine\n", base=base).spec.plugins == [str(tmp_path / "shared" / "mine.py")]


def test_blocks_under_names_of_the_user_merge_by_name(extend, spec_text):
    base = spec_text + "teachers:\n  strong: {use: wise, key: a}\n  other: {use: wise, key: b}\n"
    teachers = extend("teachers: {strong: {key: c}}\n", base=base).spec.teachers
    assert {name: teacher.settings.key for name, teacher in teachers.items()} == {"strong": "c", "other": "b"}


@pytest.mark.parametrize("name", ["a\\0b", "x" * 5000], ids=["nul", "too-long"])
def test_a_base_that_no_file_can_be_called_is_not_there(tmp_path, registry, name):
    (tmp_path / "spec.yaml").write_text(f'extends: "{name}"\nversion: 1\n')
    with pytest.raises(SpecError) as error:
        load_spec(tmp_path / "spec.yaml", registry)
    assert error.value.problems[0].problem.endswith(": no such spec")
