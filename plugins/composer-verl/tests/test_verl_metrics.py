"""verl's metrics under our names, and several steps as one line."""

import pytest

from composer_verl.metrics import summed_up, translate


def test_upstreams_names_become_ours_and_the_others_stay_under_upstream():
    found = translate(
        {"actor/pg_loss": 0.5, "actor/kl": 2, "perf/mfu/actor": 0.1, "perf/total_num_tokens": 30, "odd": {}},
        seconds=6.0,
        steps=2,
    )
    assert found == {
        "step_time": 3.0,
        "loss/policy": 0.5,
        "upstream/actor/kl": 2.0,
        "upstream/perf/total_num_tokens": 30.0,
        "tokens_per_s": 10.0,  # each step reads the 30 tokens, 60 in 6 s
    }


def test_a_generation_without_a_step_has_a_time():
    assert translate({}, seconds=6.0, steps=0) == {"step_time": 6.0}


def test_a_line_of_several_steps_has_means_and_extremes():
    lines = [
        {"reward/mean": 1.0, "upstream/training/rollout_probs_diff_max": 1e-3, "upstream/score/min": 0.25},
        {"reward/mean": 2.0, "upstream/training/rollout_probs_diff_max": 0.0, "upstream/score/min": -1.0, "maximum": 4},
    ]
    assert summed_up(lines) == {
        "reward/mean": pytest.approx(1.5),
        "upstream/training/rollout_probs_diff_max": 1e-3,
        "upstream/score/min": -1.0,
        "maximum": 4,  # of the one step that has it
    }
