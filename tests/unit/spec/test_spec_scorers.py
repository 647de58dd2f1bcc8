"""A teacher that scores for a channel: what the plan refuses, needs and says."""

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.contributions import LossChannelPlugin, TeacherPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner
from composer_core.spec.plan import make_plan

SDPO = "use: sdpo, weight: 0.1, teacher: strong, divergence: kl_student_teacher"
VLLM = "{use: openai, model: m, base_url: http://127.0.0.1:8000/v1, scores: true}"


@pytest.fixture
def scoring_text(spec_text):
    """A spec whose channel learns from the teacher `strong`; `teachers` is what stands below."""

    def text(teachers, channel=SDPO):
        return spec_text.replace("use: lean, weight: 0.5, strength: 2", channel) + teachers

    return text


def _problems(load, registry, text, *overrides):
    with pytest.raises(SpecError) as error:
        make_plan(load(text, *overrides), registry)
    return str(error.value)


def test_a_channel_with_a_teacher_elsewhere_needs_log_probs_only(load, registry, scoring_text):
    plan = make_plan(load(scoring_text(f"teachers: {{strong: {VLLM}}}\n")), registry)
    (channel,) = plan.channels
    assert channel.needs == ("logps",)
    assert plan.notes == ()
    assert plan.required_env == ()


def test_a_name_that_is_not_under_teachers_is_refused(load, registry, scoring_text):
    assert _problems(load, registry, scoring_text("")) == (
        "spec.yaml:11:32: loss.channels[0].teacher: no teacher is called 'strong'; under teachers: there are: none"
    )
    assert _problems(load, registry, scoring_text(f"teachers: {{other: {VLLM}, more: {VLLM}}}\n")) == (
        "spec.yaml:11:32: loss.channels[0].teacher: no teacher is called 'strong'; under teachers: there are: other, "
        "more"
    )


def test_a_teacher_that_does_not_score_is_refused(load, registry, scoring_text):
    for teacher in ("{use: scripted, rules: {a: b}}", "{use: openai, preset: gpt}", "{use: wise}"):
        assert _problems(load, registry, scoring_text(f"teachers: {{strong: {teacher}}}\n")) == (
            "spec.yaml:11:32: loss.channels[0].teacher: teacher 'strong' gives no log-probs of a text it is handed, "
            "and a channel learns from those\n"
            "  fix: a teacher {use: openai, scores: true, ...} whose server is vLLM's, or one of the policy's own: "
            "self-frozen"
        )


def test_a_service_for_chats_only_cannot_be_said_to_score(load, registry, scoring_text):
    text = scoring_text("teachers: {strong: {use: openai, preset: gpt, scores: true}}\n")
    assert _problems(load, registry, text) == (
        "spec.yaml:15:12: teachers.strong: scores: openrouter.ai gives no log-probs of a text it is handed; a vLLM "
        "server does"
    )


def test_money_cannot_be_limited_for_a_scoring_teacher_without_a_price(load, registry, scoring_text):
    text = scoring_text(f"teachers: {{strong: {VLLM}}}\n")
    assert _problems(load, registry, text, "limits.teacher_usd=5") == (
        "spec.yaml:15:12: teachers.strong.price: limits.teacher_usd cannot be kept without this teacher's price\n"
        "  fix: price: {input: 1.25, output: 10.0} in dollars per million tokens; {input: 0, output: 0} if free"
    )
    free = "teachers.strong.price={input: 0, output: 0}"
    assert make_plan(load(text, "limits.teacher_usd=5", free), registry).notes == ()


def test_the_worker_needs_the_secrets_of_the_teachers_that_score_and_of_no_others(load, registry, scoring_text):
    teachers = (
        f"teachers: {{strong: {VLLM[:-1]}, key: '${{env:STRONG_KEY}}'}}, "
        "one: {use: wise, key: '${env:ONE_KEY}'}, two: {use: wise}}\n"
    )
    text = scoring_text(teachers)
    plan = make_plan(load(text), registry)
    assert plan.required_env == ("STRONG_KEY",)
    assert plan.notes == ("teachers one, two, and replay, are read by composer-run replay, not by a training run",)
    # at weight 0 a channel is not there, and neither is its teacher
    idle = make_plan(load(text, "loss.channels.sdpo.weight=0"), registry)
    assert idle.required_env == ()
    assert idle.notes[0] == "teachers and replay are read by composer-run replay, not by a training run"


def test_a_plugin_that_breaks_while_it_is_asked_for_teachers_is_blamed(load, registry, scoring_text):
    class Broken:
        @hookimpl
        def composer_loss_channels(self):
            yield LossChannelPlugin(name="broken", summary="", target="x:Y", teachers=lambda settings: 1 // 0)

        @hookimpl
        def composer_teachers(self):
            yield TeacherPlugin(name="odd", summary="", target="x:Y", scores=lambda settings: 1 // 0)

    registry.add(Broken(), Owner("broken", "1", "broken"))
    assert _problems(load, registry, scoring_text("", channel="use: broken")) == (
        "spec.yaml:11:7: loss.channels[0]: channel 'broken': teachers (broken 1) failed: ZeroDivisionError: integer "
        "division or modulo by zero"
    )
    assert _problems(load, registry, scoring_text("teachers: {strong: {use: odd}}\n")) == (
        "spec.yaml:11:7: loss.channels[0]: teacher 'strong': scores failed: ZeroDivisionError: integer division or "
        "modulo by zero"
    )
