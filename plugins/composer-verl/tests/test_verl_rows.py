"""What a rollout carries through verl's batches, and what is read back."""

import math

import pytest
import torch
from tensordict import TensorDict

from composer_core.errors import RunFailed
from composer_verl.rows import FIELD, Sample, channel_rows, decode, encode, packed, rollouts_of, unpacked

FULL = Sample("1-0-0", 0, 0.5, {"sdpo": {"student": [3, 4], "note": "naïve ☃"}, "brevity": None}, {})
BARE = Sample("1-0-1", 0, None, {"sdpo": None, "brevity": {}}, {"3": {"replay": [{"chosen": [1]}]}})


def jagged(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_samples_come_back_as_they_were_in_any_order_a_batch_is_put():
    batch = TensorDict({FIELD: encode([FULL, BARE, Sample()])}, batch_size=3)
    assert decode(batch[FIELD]) == [FULL, BARE, Sample()]
    from verl.utils import tensordict_utils as tu

    turned = tu.index_select_tensor_dict(batch, torch.tensor([2, 0]))
    assert decode(turned[FIELD]) == [Sample(), FULL]
    assert [decode(part[FIELD]) for part in tu.chunk_tensordict(batch, 3)] == [[FULL], [BARE], [Sample()]]


def test_only_a_filler_is_no_rollout():
    assert (FULL.filler, BARE.filler, Sample().filler) == (False, False, True)


def test_rows_are_the_rollouts_or_those_drawn_for_the_step():
    samples = [FULL, BARE, Sample()]
    assert channel_rows(samples, ["brevity", "replay"], step=3) == {
        "brevity": [None, {}, None],
        "replay": [{"chosen": [1]}],
    }
    assert channel_rows([Sample(drawn={"1": {"replay": []}})], ["replay"], step=1) == {"replay": []}


def test_a_channel_that_nobody_prepared_rows_for_is_named():
    with pytest.raises(RunFailed, match=r"^verl's batch holds no rows for channel 'replay' at optimiser step 4$"):
        channel_rows([FULL, BARE], ["replay"], step=4)


def test_a_batch_becomes_rollouts_token_by_token():
    data = TensorDict(
        {
            "input_ids": jagged([5, 6, 7, 8], [9, 10]),
            "responses": jagged([7, 8], [10]),
            "response_mask": jagged([0, 1], [1]),
            "advantages": jagged([0.5, 0.25], [-1.0]),
            "old_log_probs": jagged([-1.0, -2.0], [-3.0]),
        },
        batch_size=2,
    )
    found = rollouts_of(data, [FULL, BARE])
    assert found.seqs.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert found.seqs.cu.tolist() == [0, 4, 6]
    assert found.action.tolist() == [False, False, False, True, False, True]
    assert found.advantages.tolist() == [0, 0, 0.5, 0.25, 0, -1.0]
    assert found.old_logps.tolist() == [0, 0, -1.0, -2.0, 0, -3.0]
    assert (found.sampler_logps, found.ref_logps) == (None, None)
    assert found.rewards[0] == 0.5
    assert math.isnan(found.rewards[1])
    assert (found.group.tolist(), found.uid) == ([0, 0], ("1-0-0", "1-0-1"))


def test_a_plan_with_a_secrets_name_is_nothing_that_omegaconf_would_fill_in():
    from omegaconf import OmegaConf

    plan = '{"key": "${env:TOKEN}", "snow": "☃"}'
    held = OmegaConf.create({"plan": packed(plan.encode())})
    assert unpacked(held.plan) == plan
