"""Wrong specs and the whole message each gets."""

from __future__ import annotations

import pytest

from composer_core.errors import SpecError

WHOLE = None

CASES = {
    # -- keys
    "misspelt-key": (
        "  steps: 5",
        "  steps: 5\n  learning_rat: 1e-5",
        "spec.yaml:14:3: train.learning_rat: unknown key\n  fix: did you mean train.learning_rate?",
    ),
    "misspelt-section": (
        "train:\n  steps: 5",
        "trian:\n  steps: 5",
        "spec.yaml:1:1: train: this key is required and is not there\n  fix: add train\n"
        "spec.yaml:12:1: trian: unknown key\n  fix: did you mean train?",
    ),
    "key-of-another-section": (
        "builtin: tiny}",
        "builtin: tiny, learning_rate: 1e-5}",
        "spec.yaml:3:24: model.learning_rate: unknown key\n  fix: it belongs in train.learning_rate",
    ),
    "key-of-a-block": (
        "  steps: 5",
        "  steps: 5\n  strength: 2",
        "spec.yaml:14:3: train.strength: unknown key\n  fix: it belongs in loss.channels[0].strength",
    ),
    "misspelt-key-of-another-section": (
        "builtin: tiny}",
        "builtin: tiny, learning_rat: 1e-5}",
        "spec.yaml:3:24: model.learning_rat: unknown key\n  fix: did you mean train.learning_rate?",
    ),
    "key-like-nothing": (
        "strength: 2",
        "zzz: 2",
        "spec.yaml:11:32: loss.channels[0].zzz: unknown key\n  fix: known keys here: strength, span, use, weight",
    ),
    "nested-misspelt-key": (
        "builtin: tiny}",
        "builtin: tiny, lora: {rnk: 4}}",
        "spec.yaml:3:31: model.lora.rnk: unknown key\n  fix: did you mean model.lora.rank?",
    ),
    "missing-key": (
        "  steps: 5",
        "  group_size: 4",
        "spec.yaml:12:1: train.steps: this key is required and is not there\n  fix: steps: Optimiser steps.",
    ),
    "missing-setting-of-a-block": (
        '{use: regex, pattern: "[0-9]"}',
        "{use: regex}",
        "spec.yaml:7:7: data.rewards[0].pattern: this key is required and is not there\n  fix: add pattern",
    ),
    "missing-backend": (
        "backend: {use: toy}",
        "",
        "spec.yaml:1:1: backend: this key is required and is not there\n  fix: add backend",
    ),
    # -- values
    "word-for-a-whole-number": (
        "steps: 5",
        "steps: ten",
        "spec.yaml:13:3: train.steps: must be a whole number, got 'ten'",
    ),
    "quoted-number": (
        "steps: 5",
        'steps: "5"',
        "spec.yaml:13:3: train.steps: must be a whole number, got '5'\n  fix: write it without quotes: 5",
    ),
    "true-for-a-number": (
        "steps: 5",
        "steps: true",
        "spec.yaml:13:3: train.steps: must be a whole number, got true",
    ),
    "fraction-for-a-whole-number": (
        "steps: 5",
        "steps: 5.5",
        "spec.yaml:13:3: train.steps: must be a whole number, got 5.5",
    ),
    # YAML 1.1 would read `no` as false
    "no-for-false": (
        "builtin: digits",
        "builtin: digits, chat: no",
        "spec.yaml:5:30: data.prompts.chat: must be true or false, got 'no'",
    ),
    "number-for-text": (
        "name: test",
        "name: 7",
        'spec.yaml:2:1: name: must be text, got 7\n  fix: put it in quotes: "7"',
    ),
    "too-small": ("steps: 5", "steps: 0", "spec.yaml:13:3: train.steps: must be >= 1, got 0"),
    "bad-name": (
        "name: test",
        "name: my run",
        "spec.yaml:2:1: name: must be text like ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$, got 'my run'\n"
        "  fix: name: Names the run directory: letters, digits, dot, underscore, hyphen.",
    ),
    "other-version": ("version: 1", "version: 2", "spec.yaml:1:1: version: must be 1, got 2"),
    "unknown-choice": (
        "builtin: tiny}",
        "builtin: tiny, dtype: float16}",
        "spec.yaml:3:24: model.dtype: must be 'float32' or 'bfloat16', got 'float16'\n  fix: did you mean 'bfloat16'?",
    ),
    "union-of-a-list-and-a-word": (
        "builtin: tiny}",
        "builtin: tiny, lora: {targets: 3}}",
        "spec.yaml:3:31: model.lora.targets: must be a list or 'all-linear', got 3",
    ),
    "wrong-item-in-a-union": (
        "builtin: tiny}",
        "builtin: tiny, lora: {targets: [q_proj, 3]}}",
        'spec.yaml:3:49: model.lora.targets[1]: must be text, got 3\n  fix: put it in quotes: "3"',
    ),
    "section-is-a-number": (
        "train:\n  steps: 5",
        "train: 3",
        "spec.yaml:12:1: train: must be a section (key: value), got 3",
    ),
    "list-is-a-section": (
        '\n    - {use: regex, pattern: "[0-9]"}',
        " {use: regex}",
        "spec.yaml:6:3: data.rewards: must be a list, got a section",
    ),
    "no-rewards": (
        '\n    - {use: regex, pattern: "[0-9]"}',
        " []",
        "spec.yaml:6:3: data.rewards: must have at least 1 of them, got 0",
    ),
    "rule-over-several-keys": (
        "builtin: tiny}",
        "builtin: tiny, path: gpt2}",
        "spec.yaml:3:1: model: give either path or builtin",
    ),
    "validator-of-a-setting": (
        '"[0-9]"',
        '"[0-9"',
        "spec.yaml:7:20: data.rewards[0].pattern: not a regular expression: unterminated character set at position 0, "
        "got '[0-9'",
    ),
    # -- blocks
    "backend-is-a-word": (
        "{use: toy}",
        "toy",
        "spec.yaml:14:1: backend: must be a block that names its backend with use, got 'toy'\n"
        "  fix: backend: {use: toy}",
    ),
    "channel-is-a-word": (
        "- {use: lean, weight: 0.5, strength: 2}",
        "- lean",
        "spec.yaml:11:7: loss.channels[0]: must be a block that names its channel with use, got 'lean'\n"
        "  fix: - {use: lean}",
    ),
    "block-without-use": (
        "{use: lean, weight: 0.5, strength: 2}",
        "{weight: 0.5}",
        "spec.yaml:11:7: loss.channels[0]: this block does not say which channel to use\n"
        "  fix: add use: one of grumpy, lean",
    ),
    "block-is-null": (
        "{use: toy}",
        "",
        "spec.yaml:14:1: backend: must be a block that names its backend with use, got null",
    ),
    "use-is-a-number": (
        "{use: toy}",
        "{use: 3}",
        "spec.yaml:14:11: backend.use: must be the name of a backend, got 3\n  fix: one of small, toy",
    ),
    "misspelt-channel": (
        "{use: lean,",
        "{use: laen,",
        "spec.yaml:11:8: loss.channels[0].use: no channel is called 'laen'\n  fix: did you mean 'lean'?",
    ),
    "unknown-backend": (
        "{use: toy}",
        "{use: hopper}",
        "spec.yaml:14:11: backend.use: no backend is called 'hopper'; installed: small, toy\n"
        "  fix: pip install composer-hopper, if that is the package which brings it",
    ),
    "same-channel-twice": (
        "strength: 2}",
        "strength: 2}\n    - {use: fake/lean}",
        "spec.yaml:12:8: loss.channels[1].use: channel 'lean' stands twice (first at loss.channels[0])\n"
        "  fix: remove one",
    ),
    "negative-weight": (
        "weight: 0.5",
        "weight: -0.5",
        "spec.yaml:11:19: loss.channels[0].weight: must be >= 0, got -0.5",
    ),
    "weight-of-an-objective": (
        "{use: grpo}",
        "{use: grpo, weight: 2}",
        "spec.yaml:9:26: loss.objective.weight: unknown key\n"
        "  fix: it belongs in data.rewards[0].weight or loss.channels[0].weight",
    ),
    "out-of-bounds-setting": (
        "strength: 2",
        "strength: 0",
        "spec.yaml:11:32: loss.channels[0].strength: must be > 0, got 0",
    ),
    "plugin-validator-breaks": (
        "{use: lean, weight: 0.5, strength: 2}",
        "{use: grumpy}",
        "spec.yaml:11:7: loss.channels[0]: the settings of channel 'grumpy' (fake 1.2) cannot check this block: "
        "RuntimeError: not today",
    ),
    # -- files and paths
    "plugin-file-missing": (
        "version: 1",
        "plugins: [./my.py]\nversion: 1",
        "spec.yaml:1:11: plugins[0]: ./my.py: no such plugin file\n  fix: paths in `plugins:` are relative to the spec",
    ),
    "model-folder-missing": (
        "{builtin: tiny}",
        "{path: ./model}",
        "spec.yaml:3:9: model.path: no such folder: ./model\n  fix: paths are relative to the spec",
    ),
    # -- the file itself
    "duplicate-key": (
        "name: test",
        "name: test\nname: other",
        "spec.yaml:3:1: name: this key stands twice (first at line 2)\n  fix: remove one of them",
    ),
    "empty": (WHOLE, "", "spec.yaml:1:1: the file is empty\n  fix: start with version: 1"),
    "a-list": (
        WHOLE,
        "- version: 1",
        "spec.yaml:1:1: a spec is keys and values, this is a list\n  fix: start with version: 1",
    ),
    "tab": (
        "  steps: 5",
        "\tsteps: 5",
        "spec.yaml:13:1: a tab stands here, YAML is indented with spaces\n  fix: replace the tab by spaces",
    ),
    "unclosed-bracket": (
        "{use: toy}",
        "{use: toy",
        "spec.yaml:15:1: not readable as YAML: did not find expected ',' or '}' while parsing a flow mapping",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), CASES.values(), ids=CASES)
def test_a_wrong_spec_gets_exactly_this_message(load, spec_text, old, new, message):
    old = spec_text if old is WHOLE else old
    assert spec_text.count(old) == 1
    with pytest.raises(SpecError) as error:
        load(spec_text.replace(old, new))
    assert str(error.value) == message


def test_all_mistakes_come_at_once_in_the_order_of_their_lines(load, spec_text):
    text = spec_text.replace("steps: 5", "steps: 0").replace("use: toy", "use: hopper").replace("tiny}", "tiny, x: 1}")
    with pytest.raises(SpecError) as error:
        load(text)
    assert [(problem.key, problem.line) for problem in error.value.problems] == [
        ("model.x", 3),
        ("train.steps", 13),
        ("backend.use", 14),
    ]


def test_only_missing_packages_end_with_code_3(load, spec_text):
    with pytest.raises(SpecError) as error:
        load(spec_text.replace("use: toy", "use: hopper"))
    assert error.value.exit_code == 3
    with pytest.raises(SpecError) as error:
        load(spec_text.replace("use: toy", "use: hopper").replace("steps: 5", "steps: 0"))
    assert error.value.exit_code == 2
