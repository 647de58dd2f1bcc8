"""Rows stay with their rollouts: through TRL's shuffle and split, over several steps per generation and iterations."""

import sys
from pathlib import Path

import pytest
import torch
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

sys.path.insert(0, str(Path(__file__).parent))
from fixed_generation import fixed_trainer

from composer_core.loss.channel import ChannelDefaults
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.reduce import masked_sum
from composer_core.protocols import Term
from composer_trl.metrics import OWN

PROMPTS = [[10, 11, 12], [13], [14, 15, 16, 17], [18, 19]]
COMPLETIONS = [[30 + i] * n + [1] for i, n in enumerate([4, 1, 7, 2, 3, 6, 1, 5])]
REWARDS = [0.0, 1.0, 0.25, 0.5, 0.75, 1.0, 0.5, None]
"""The last one was not rewarded."""
MASK = [[int(not (i in (2, 5) and j == 1)) for j in range(len(c))] for i, c in enumerate(COMPLETIONS)]
"""One token of two completions came from a tool."""


class Witness(ChannelDefaults):
    """Writes into its row whose it is, and compares when it sees the row again."""

    def __init__(self):
        self.prepared = []
        self.micro_batches = []
        """(step, uids in order)"""
        self.counts = []

    def prepare(self, rollout):
        self.prepared.append(rollout)
        return {
            "uid": rollout.uid,
            "ids": [*rollout.prompt_ids, *rollout.completion_ids],
            "actions": [float(flag) for flag in rollout.action],
            "reward": "none" if rollout.reward is None else rollout.reward,
        }

    def count(self, row):
        return {"length": float(len(row["ids"]) if row else 0)}

    def collate(self, rows, rollouts):
        own = rollouts.seqs.ids.split(rollouts.seqs.lengths.tolist())
        actions = rollouts.action.split(rollouts.seqs.lengths.tolist())
        assert [row["uid"] for row in rows] == list(rollouts.uid)
        for row, ids, action, reward, group in zip(
            rows, own, actions, rollouts.rewards.tolist(), rollouts.group.tolist(), strict=True
        ):
            assert row["ids"] == ids.tolist()
            assert row["actions"] == action[-len(row["actions"]) :].tolist()
            assert not action[: -len(row["actions"])].any()
            assert row["reward"] == pytest.approx(reward) if row["reward"] != "none" else reward != reward
            assert group == int(row["uid"].split("-")[1])
            assert row["ids"][: len(PROMPTS[group])] == PROMPTS[group]
        return {"witness.lengths": rollouts.seqs.lengths}

    def loss(self, view, batch):
        self.micro_batches.append((batch.step, batch.rollouts.uid))
        self.counts.append(batch.counts)
        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=batch.temperature)
        return Term(masked_sum(logps, batch.rollouts.action), "tokens")


@pytest.mark.parametrize("native", [True, False], ids=["TRL's objective", "an objective of the core"])
def test_every_row_meets_its_own_rollout_once_in_each_pass(native, tiny_model_folder, tmp_path):
    from composer_core.loss.policy import grpo
    from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS

    witness = Witness()
    trainer = fixed_trainer(
        tiny_model_folder,
        tmp_path,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=REWARDS,
        columns={"env_mask": MASK},
        loss=CompositeLoss([ActiveChannel("witness", 0.1, witness)], grpo(OBJECTIVE_SETTINGS["grpo"]())),
        native=native,
        # 8 rollouts in micro-batches of 2: a generation is 2 optimiser steps of 2 micro-batches, gone through twice
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
    )
    trainer.train()

    assert [(r.uid, r.reward) for r in witness.prepared[:8]] == [
        (f"1-{i // 2}-{i % 2}", reward) for i, reward in enumerate(REWARDS)
    ]
    assert [(r.prompt_ids, r.completion_ids) for r in witness.prepared] == 2 * [
        (PROMPTS[i // 2], COMPLETIONS[i]) for i in range(8)
    ]
    assert [list(map(int, r.action)) for r in witness.prepared[:8]] == MASK
    assert [step for step, _ in witness.micro_batches] == [s for s in range(1, 9) for _ in range(2)]
    passes = [witness.micro_batches[first : first + 4] for first in range(0, 16, 4)]
    for number, micro_batches in enumerate(passes):
        generation = 1 + 4 * (number // 2)  # the step at which it was sampled
        seen = [uid for _, uids in micro_batches for uid in uids]
        assert sorted(seen) == [f"{generation}-{i // 2}-{i % 2}" for i in range(8)]
        assert seen != sorted(seen)  # TRL did shuffle
    assert [uids for _, uids in passes[0]] == [uids for _, uids in passes[1]]


def test_counts_are_those_of_the_optimiser_step(tiny_model_folder, tmp_path):
    witness = Witness()
    trainer = fixed_trainer(
        tiny_model_folder,
        tmp_path,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=REWARDS,
        columns={"env_mask": MASK},
        loss=CompositeLoss([ActiveChannel("witness", 0.1, witness)], None),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
    )
    trainer.train()
    for step in (1, 2):
        (uids, counts), (more, same) = [
            (uids, counts)
            for (at, uids), counts in zip(witness.micro_batches, witness.counts, strict=True)
            if at == step
        ]
        numbers = [2 * int(uid.split("-")[1]) + int(uid.split("-")[2]) for uid in (*uids, *more)]
        assert (
            counts
            == same
            == {
                "tokens": sum(sum(MASK[i]) for i in numbers),
                "sequences": 4.0,
                "max_tokens": 4.0 * 8,  # the longest completion
                "micro_batches": 2.0,
                "witness.rows": 4.0,
                "witness.active": 4.0,
                "witness.length": sum(len(PROMPTS[i // 2]) + len(COMPLETIONS[i]) for i in numbers),
            }
        )


def test_the_logged_loss_is_the_sum_that_was_trained_on(tiny_model_folder, tmp_path):
    trainer = fixed_trainer(
        tiny_model_folder,
        tmp_path,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        rewards=REWARDS,
        loss=CompositeLoss([ActiveChannel("witness", 0.1, Witness())], None),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    parts = logged[f"{OWN}loss/policy"] + 0.1 * logged[f"{OWN}loss/witness"]
    assert logged[f"{OWN}loss/witness"] < -1  # the mean log-prob of a token
    assert logged[f"{OWN}loss/total"] == pytest.approx(parts, rel=1e-6)
    assert logged["loss"] == pytest.approx(parts, rel=1e-4)  # transformers' own, rounded
    assert {name: logged[f"{OWN}{name}"] for name in ("weight/witness", "active/witness", "tokens/witness")} == {
        "weight/witness": 0.1,
        "active/witness": 1.0,
        "tokens/witness": sum(map(len, COMPLETIONS)),
    }


def test_only_what_has_one_entry_per_row_survives_upstream():
    # why rows are lists of B entries: a tensor over all hint tokens, say, does not get through
    batch = {"prompt_ids": torch.arange(4), "rows": [{"n": i} for i in range(4)]}
    (first, second) = split_tensor_dict(shuffle_sequence_dict(batch), 2)
    for part in (first, second):
        assert [row["n"] for row in part["rows"]] == part["prompt_ids"].tolist()
    with pytest.raises(IndexError):
        shuffle_sequence_dict({**batch, "few": torch.arange(2)})
    many = split_tensor_dict(shuffle_sequence_dict({**batch, "many": torch.arange(6)}), 2)
    assert sorted(n for part in many for n in part["many"].tolist()) == [0, 1, 2, 3]  # two are gone, and nobody says so
