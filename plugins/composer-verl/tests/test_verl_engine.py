"""verl's engine with the core's loss, beyond the parity table: how verl lays out its batches, and what is left behind.

One process, without Ray, on the table's rollouts.
"""

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "parity"))
import parity_reference as reference
from join_verl import alone, ready, take_step
from parity_table import CASES, Step
from test_parity_table import assert_same

from composer_core.errors import RunFailed
from composer_verl.rows import FIELD, Sample, decode, encode

TABLE = {case.id: case for case in CASES}
TOP_K = TABLE["top-k-of-the-teacher"]
BY_LENGTH = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20}
"""The table's rollouts have 2 to 17 tokens, 68 in all."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    reference.save_models(folder)
    return folder


@pytest.fixture(autouse=True)
def group():
    with alone():
        yield


def jagged(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["plain", "dapo-without-truncated", "top-k-of-the-teacher"])
def test_micro_batches_filled_by_length_change_nothing(name, packed, models):
    case = TABLE[name]
    ahead = name == "top-k-of-the-teacher"
    found = take_step(*ready(case, models, packed=packed, ahead=ahead, **BY_LENGTH))
    assert_same([found], reference.expected(case, models), tolerance=case.tolerance)


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "ahead"])
def test_sequences_that_verl_fills_a_batch_up_with_add_nothing(ahead, models):
    engine, data, function = ready(TOP_K, models, ahead=ahead)
    filled = _filled(data, count=2)
    if ahead:
        with engine.eval_mode():
            filled.update(engine.teach(filled))
    assert_same([take_step(engine, filled, function)], reference.expected(TOP_K, models), tolerance=1e-5)


def _filled(data, *, count):
    """As verl does it: prompts of eos and one token of response that no mask counts."""
    more = {
        "input_ids": torch.full((4,), 1),
        "position_ids": torch.arange(4),
        "prompts": torch.full((3,), 1),
        "responses": torch.full((1,), 1),
        "response_mask": torch.zeros(1, dtype=torch.int64),
        "loss_mask": torch.zeros(1, dtype=torch.int64),
    }
    fields = {FIELD: encode([*decode(data[FIELD]), *([Sample()] * count)])}
    told = {}
    for name, values in data.items():
        if not isinstance(values, torch.Tensor):
            told[name] = values
        elif name not in fields and not name.startswith("composer_taught"):
            filler = more.get(name, torch.zeros(1, dtype=values.dtype))
            fields[name] = jagged([*values.unbind(), *([filler] * count)])
    filled = TensorDict(fields, batch_size=len(data) + count)
    tu.assign_non_tensor(filled, **told)
    return filled


def test_logits_of_a_micro_batch_do_not_stand_beside_those_of_the_next(models, monkeypatch):
    engine, data, function = ready(TABLE["two-micro-batches"], models)
    known, alive = [], []
    inputs, outputs = engine.prepare_model_inputs, engine.prepare_model_outputs

    def prepare_model_inputs(*args, **kwargs):
        alive.append([logits() is not None for logits in known])
        return inputs(*args, **kwargs)

    def prepare_model_outputs(output, *args, **kwargs):
        known.append(weakref.ref(output.logits))
        return outputs(output, *args, **kwargs)

    monkeypatch.setattr(engine, "prepare_model_inputs", prepare_model_inputs)
    monkeypatch.setattr(engine, "prepare_model_outputs", prepare_model_outputs)
    taps = []

    def noting(model_output, data, dp_group=None):
        taps.append(weakref.ref(engine._tap))
        return function(model_output=model_output, data=data, dp_group=dp_group)

    take_step(engine, data, noting)
    assert alive == [[], [False]]
    assert [tap() for tap in taps] == [None, None]


@pytest.mark.parametrize("chunk", [None, 2], ids=["whole", "two-tokens-at-a-time"])
def test_teachers_that_read_ahead_know_how_much_each_hint_gains(chunk, models, monkeypatch):
    if chunk is not None:
        for module in ("view", "taught"):
            monkeypatch.setattr(f"composer_verl.{module}.chunk_size", lambda vocab: chunk)
    live, ahead = (take_step(*ready(TOP_K, models, ahead=ahead)).losses for ahead in (False, True))
    assert live["sdpo/hint_gain"] != 0
    for name in ("sdpo/hint_gain", "grad_norm/sdpo", "loss/sdpo"):
        assert ahead[name] == pytest.approx(live[name], rel=1e-5), name


def test_a_divergence_that_changes_behind_the_teachers_back_is_refused(models):
    engine, data, function = ready(TOP_K, models, ahead=True)
    (sdpo,) = (active.channel for active in engine._wanted.loss.active if active.name == "sdpo")
    sdpo.settings = sdpo.settings.model_copy(update={"temperature": 3.0})
    with pytest.raises(RunFailed) as caught:
        take_step(engine, data, function)
    assert caught.value.problem == (
        "a loss asks for topk_teacher of the policy model, which nobody read before the update"
    )


def test_a_live_teacher_that_reads_ahead_is_the_one_of_before_the_batch(models):
    frozen = TABLE["top-k-of-the-frozen-teacher"]
    case = replace(frozen, sdpo={**frozen.sdpo, "teacher": "self-live"})
    engine, data, function = ready(case, models, ahead=True)
    found: list[Step] = [take_step(engine, data, function) for _ in range(case.steps)]
    assert_same(found, reference.expected(frozen, models), tolerance=1e-5)
