import pytest
from pydantic import ValidationError

from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs, sdpo_teachers
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
        # a teacher elsewhere: nothing but the student's own log-probs
        ({"divergence": "kl_student_teacher", "teacher": "strong"}, [{LOGPS}]),
        ({"divergence": "kl_student_teacher", "teacher": "strong", "support": "sampled"}, [{LOGPS}]),
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"divergence": "kl_teacher_student"},
        {"divergence": "kl_student_teacher", "support": "topk"},
        {"divergence": "kl_student_teacher", "support": "full"},
        {"divergence": "kl_student_teacher", "target": {"use": "taid"}},
        {"divergence": "kl_student_teacher", "gate": {"use": "soft"}},
        {"divergence": "kl_student_teacher", "token_clip": 1.0},
        {"divergence": "kl_student_teacher", "temperature": 2.0},
    ],
)
def test_a_named_teacher_allows_the_one_formula_that_log_probs_of_tokens_give(settings):
    with pytest.raises(ValidationError) as caught:
        SdpoSettings(teacher="strong", **settings)
    (fault,) = caught.value.errors()
    assert fault["msg"] == (
        "Value error, teacher 'strong' is none of self-frozen, self-ema, self-live, so it is one of yours, and a "
        "server gives log-probs of tokens, not distributions: set divergence: kl_student_teacher, and leave out "
        "target, gate, token_clip, temperature and any support but sampled"
    )


def test_only_a_named_teacher_is_asked_to_score():
    assert sdpo_teachers(SdpoSettings(teacher="strong", divergence="kl_student_teacher")) == ("strong",)
    for own in ("self", "self-frozen", "self-ema", "self-live"):
        assert sdpo_teachers(SdpoSettings(teacher=own)) == ()
