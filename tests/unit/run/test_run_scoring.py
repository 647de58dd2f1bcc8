"""A run and its named teachers: tried out before the first step, handed over, accounted for at the end."""

from types import SimpleNamespace

import pytest

from composer_core.channels.sdpo import sdpo
from composer_core.channels.settings import SdpoSettings
from composer_core.errors import MissingError, UsageError
from composer_core.hf.models import load_tokenizer
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
from composer_core.protocols import ScoreRequest
from composer_core.run.scoring import PROBE, scoring_teachers
from composer_core.spec.model import Kind, Plugged
from composer_core.teachers.errors import TeacherRefused
from composer_core.testing.chat_server import ChatServer, Reply, scored

SETTINGS = SdpoSettings(teacher="strong", divergence="kl_student_teacher")


@pytest.fixture
def run(tiny_model_folder, tmp_path, monkeypatch):
    """What a run is to its teachers; they answer at `url`."""
    monkeypatch.setenv("COMPOSER_CACHE", str(tmp_path / "cache"))

    def make(url, **settings):
        teacher = OpenAiTeacherSettings(base_url=url, model="m", scores=True, attempts=1, **settings)
        block = Plugged(Kind.CHANNEL, "sdpo", "composer-core", SETTINGS)
        events = []
        spec = SimpleNamespace(
            loss=SimpleNamespace(channels=[block]),
            teachers={"strong": Plugged(Kind.TEACHER, "openai", "composer-core", teacher)},
            limits=SimpleNamespace(teacher_usd=None, teacher_tokens=100_000),
            model=SimpleNamespace(trust_remote_code=False),
        )
        return SimpleNamespace(
            spec=spec,
            model_folder=lambda: tiny_model_folder,
            event=lambda kind, **facts: events.append((kind, facts)),
            events=events,
        )

    return make


def _enter(run):
    loss = CompositeLoss([ActiveChannel("sdpo", 1.0, sdpo(SETTINGS))], None)
    return loss, scoring_teachers(loss, run, Registry.discover(), scope="run")


def _refusal(run, kind, server):
    with pytest.raises(kind) as caught, _enter(run(server.url))[1]:
        pass
    return str(caught.value)


def test_a_channel_has_its_teacher_inside_and_the_end_says_what_it_did(run, tiny_model_folder):
    tokenizer = load_tokenizer(tiny_model_folder)
    probe = tokenizer.encode(PROBE, add_special_tokens=False)

    def reply(body):
        return Reply(scored(body, lambda token: -0.5, text=lambda token: tokenizer.decode([token])))

    with ChatServer(reply) as server:
        made = run(server.url)
        loss, context = _enter(made)
        with context:
            assert server.requests[0]["prompt"] == probe
            scorer = loss.active[0].channel._scorer
            assert scorer.score([ScoreRequest([1, 2, 3], 2, "a")]) == [[-0.5]]
    facts = {"teacher": "strong", "scored": 1, "cached": 0, "failed": {}, "usd": 0.0, "tokens": len(probe) + 1 + 4}
    assert made.events == [("teacher", facts)]


def test_the_secret_of_a_teacher_comes_from_the_environment_of_the_worker(run, monkeypatch):
    with ChatServer(lambda body: Reply(scored(body, lambda token: -0.5))) as server:
        made = run(server.url, key="${env:STRONG_KEY}")
        with pytest.raises(MissingError) as caught, _enter(made)[1]:
            pass
        monkeypatch.setenv("STRONG_KEY", "sk-strong-secret")
        with _enter(made)[1]:
            assert server.headers[0]["authorization"] == "Bearer sk-strong-secret"
    assert str(caught.value) == (
        "teachers.strong.key: the environment variable STRONG_KEY is not set\n  fix: export STRONG_KEY=..."
    )


def test_a_run_whose_teacher_does_not_answer_does_not_begin(run):
    with ChatServer(lambda body: Reply(b"busy", status=503)) as server:
        assert _refusal(run, MissingError, server) == (
            "teachers.strong: this teacher scored no text: given up after 1 attempts: HTTP 503: busy"
        )


def test_a_server_without_log_probs_of_prompts_is_refused_before_the_first_step(run):
    with ChatServer(lambda body: Reply({"model": "m", "choices": [{"text": "x"}]})) as server:
        assert _refusal(run, TeacherRefused, server) == (
            f"teachers.strong.scores: {server.url} m gives no log-probs of a text it is handed\n  fix: leave scores out"
        )


def test_a_teacher_with_another_tokenizer_is_refused_before_the_first_step(run, tiny_model_folder):
    tokenizer = load_tokenizer(tiny_model_folder)
    second = tokenizer.encode(PROBE, add_special_tokens=False)[1]
    with ChatServer(lambda body: Reply(scored(body, lambda token: -0.5, text=lambda token: f"w{token}"))) as server:
        assert _refusal(run, UsageError, server) == (
            f"teachers.strong.model: this teacher has another tokenizer than the policy: token {second} is "
            f"{tokenizer.decode([second])!r} here and 'w{second}' there\n"
            "  fix: name a model of the policy's own family, or a teacher: self-..."
        )


def test_without_such_a_channel_no_teacher_is_made(run):
    made = run("http://127.0.0.1:9/v1")
    made.spec.loss.channels = []
    with scoring_teachers(CompositeLoss([], None), made, Registry.discover(), scope="run"):
        pass
    assert made.events == []
