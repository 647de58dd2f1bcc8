import pytest
from pydantic import ValidationError

from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.protocols import Need

LOGPS, FULL, TOPK, REFERENCE = Need.LOGPS, Need.DIVERGENCE_FULL, Need.DIVERGENCE_TOPK, Need.REFERENCE


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, [{FULL, LOGPS, REFERENCE}, {TOPK, LOGPS, REFERENCE}]),
        ({"teacher": "self"}, [{FULL, LOGPS, REFERENCE}, {TOPK, LOGPS, REFERENCE}]),
        ({"teacher": "self-live", "support": "topk"}, [{TOPK, LOGPS}]),
        ({"teacher": "self-ema", "support": "full"}, [{FULL, LOGPS, Need.EMA}]),
        ({"target": {"use": "taid"}, "teacher": "self-live", "support": "full"}, [{FULL, LOGPS, Need.STATE}]),
        # a gate is made of two full divergences
        ({"gate": {"use": "soft"}, "teacher": "self-live"}, [{FULL, LOGPS}]),
        # the sampled estimate has one formula: only where that was asked for may it stand in
        ({"divergence": "kl_student_teacher", "teacher": "self-live"}, [{FULL, LOGPS}, {TOPK, LOGPS}, {LOGPS}]),
        (
            {"divergence": "kl_student_teacher", "teacher": "self-live", "token_clip": 1.0},
            [{FULL, LOGPS}, {TOPK, LOGPS}],
        ),
    ],
)
def test_what_sdpo_asks_of_a_trainer_best_first(settings, needs):
    assert [set(one) for one in sdpo_needs(SdpoSettings(**settings))] == needs


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, {LOGPS, Need.PAIRS}),
        ({"reference": "model"}, {LOGPS, Need.PAIRS, REFERENCE}),
        ({"variant": "simpo", "reference": "model"}, {LOGPS, Need.PAIRS}),
    ],
)
def test_what_replay_asks_of_a_trainer(settings, needs):
    assert replay_needs(ReplaySettings(**settings)) == (frozenset(needs),)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, {"beta": 0.1, "label_smoothing": 0.0}),
        ({"variant": "simpo", "gamma": 0.5}, {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.0}),
        ({"variant": "imitate"}, {}),
        ({"variant": "sigmoid-norm", "beta": 2.0}, {"beta": 2.0}),
    ],
)
def test_a_variant_has_its_papers_numbers_unless_told_otherwise(settings, numbers):
    assert ReplaySettings(**settings).numbers == numbers


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (ReplaySettings, {"gamma": 1.0}, "variant dpo has no gamma: it takes beta, label_smoothing"),
        (ReplaySettings, {"variant": "imitate", "beta": 0.1}, "variant imitate has no beta: it takes no number"),
        (
            SdpoSettings,
            {"support": "sampled"},
            "sampled support has one formula: divergence: kl_student_teacher, without target, gate, token_clip and "
            "temperature",
        ),
        (
            SdpoSettings,
            {"target": {"use": "taid", "start": 0.9, "end": 0.5}},
            "the teacher's share must not fall: start is 0.9, end is 0.5",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(model, settings, said):
    with pytest.raises(ValidationError) as caught:
        model(**settings)
    assert [error["msg"] for error in caught.value.errors()] == [f"Value error, {said}"]
