"""`${env:NAME}`: kept in every file, filled in by the worker, never shown."""

from __future__ import annotations

import json

import pytest

from composer_core.errors import MissingError, UsageError
from composer_core.spec.environment import fill, fill_spec, required_env
from composer_core.spec.plan import make_plan, restore
from composer_core.spec.resolved import values

MARKER = "tok-9f8e7d"


@pytest.fixture
def secret_text(spec_text):
    return spec_text + 'executor: {use: rented, token: "Bearer ${env:TOKEN}"}\n'


def test_the_loaded_spec_and_the_plan_keep_the_placeholder(load, registry, monkeypatch, secret_text):
    monkeypatch.setenv("TOKEN", MARKER)
    loaded = load(secret_text)
    plan = make_plan(loaded, registry)
    assert values(loaded.spec)["executor.token"] == "Bearer ${env:TOKEN}"
    assert plan.required_env == ("TOKEN",)
    written = json.dumps([plan.to_json(), values(loaded.spec)])
    assert MARKER not in written
    assert "${env:TOKEN}" in written


def test_nothing_has_to_be_set_for_a_plan(load, registry, monkeypatch, secret_text):
    monkeypatch.delenv("TOKEN", raising=False)
    assert make_plan(load(secret_text), registry).required_env == ("TOKEN",)


def test_the_worker_fills_it_in_from_its_own_environment(load, registry, monkeypatch, secret_text, make_registry):
    plan = make_plan(load(secret_text), registry).to_json()
    monkeypatch.setenv("TOKEN", MARKER)
    spec, restored = restore(plan, make_registry())
    assert spec.executor.settings.token == f"Bearer {MARKER}"
    assert restored.required_env == ("TOKEN",)
    assert MARKER not in json.dumps(restored.to_json())


def test_a_worker_without_the_variable_says_which_and_what_for(load, registry, monkeypatch, secret_text, make_registry):
    plan = make_plan(load(secret_text), registry).to_json()
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(MissingError) as error:
        restore(plan, make_registry())
    assert str(error.value) == ("executor.token: the environment variable TOKEN is not set\n  fix: export TOKEN=...")
    assert error.value.exit_code == 3


def test_a_training_run_neither_needs_nor_gets_the_secrets_of_teachers(
    load, registry, monkeypatch, spec_text, make_registry
):
    monkeypatch.setenv("KEY", MARKER)
    loaded = load(spec_text + 'teachers: {strong: {use: wise, key: "${env:KEY}"}}\n')
    plan = make_plan(loaded, registry)
    assert plan.required_env == ()
    spec, _ = restore(plan.to_json(), make_registry())
    assert spec.teachers["strong"].settings.key == "${env:KEY}"
    # composer-run replay fills them in itself
    assert fill(loaded.spec.teachers, {"KEY": MARKER})["strong"].settings.key == MARKER


def test_fixed_sections_are_filled_in_too_and_the_rest_stays_the_same_object(load, spec_text):
    spec = load(
        spec_text.replace("{builtin: digits}", '{path: "${env:DATA}/t.jsonl", system: "${env:A}${env:A}"}')
    ).spec
    filled = fill_spec(spec, {"DATA": "/data", "A": "x"})
    assert (filled.data.prompts.path, filled.data.prompts.system) == ("/data/t.jsonl", "xx")
    assert filled.train is spec.train
    assert spec.data.prompts.path == "${env:DATA}/t.jsonl"


def test_a_value_that_does_not_fit_is_never_shown(load, spec_text):
    spec = load(spec_text.replace('"[0-9]"', '"${env:PATTERN}"')).spec
    with pytest.raises(UsageError) as error:
        fill_spec(spec, {"PATTERN": f"({MARKER}"})
    assert str(error.value) == (
        "data.rewards[0].pattern: does not fit once the environment is filled in (its value is not shown)\n"
        "  fix: check PATTERN"
    )
    assert error.value.__cause__ is None  # a traceback must not show it either


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("${env:A}", "1"),
        ("x${env:A}y${env:B_2}", "x1y${env:A}"),  # what a variable holds is text, not another placeholder
        ("$A ${A} ${env}", "$A ${A} ${env}"),
    ],
    ids=["whole", "parts", "other-dollars"],
)
def test_whole_texts_and_parts(text, filled):
    assert fill(text, {"A": "1", "B_2": "${env:A}"}) == filled


def test_names_come_sorted_and_once():
    assert required_env({"b": ["${env:Z}", "${env:A}${env:Z}"], "c": 3, "d": None}) == ("A", "Z")


def test_the_address_of_a_teacher_may_come_from_the_environment(load, spec_text):
    teachers = "teachers:\n  strong: {use: openai, model: m, base_url: '${env:SERVER}'}\n"
    strong = load(spec_text + teachers).spec.teachers["strong"].settings
    assert fill(strong, {"SERVER": "http://127.0.0.1:8000/v1"}).base_url == "http://127.0.0.1:8000/v1"
    with pytest.raises(UsageError, match=r"does not fit once the environment is filled in"):
        fill(strong, {"SERVER": "127.0.0.1:8000"})
