"""A named teacher over real HTTP: answers in their order, retries, refusals, budget, cache."""

import asyncio
import threading

import pytest

from composer_core.errors import UsageError
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings, ScriptedSettings
from composer_core.protocols import ScoreRequest
from composer_core.teachers.client import OpenAiTeacher
from composer_core.teachers.errors import TeacherRefused
from composer_core.teachers.scoring import TeacherScorer
from composer_core.teachers.scripted import ScriptedTeacher
from composer_core.testing.chat_server import ChatServer, Reply, scored

TEXTS = [ScoreRequest([1, 20, 30], 1, "a"), ScoreRequest([1, 20, 30, 40], 3, "b")]


def tenth(token):
    return -token / 10


@pytest.fixture
def scorer(tmp_path):
    """Makes a scorer of a server; waits between attempts are left out."""
    made, told = [], []

    async def at_once(seconds):
        await asyncio.sleep(0)

    def make(url, *, usd=None, tokens=None, **settings):
        settings = {"base_url": url, "model": "m", "scores": True} | settings
        made.append(
            TeacherScorer(
                "strong",
                lambda: OpenAiTeacher(OpenAiTeacherSettings(**settings)),
                scope="test",
                usd=usd,
                tokens=tokens,
                database=tmp_path / "teachers.sqlite",
                sleep=at_once,
                warn=told.append,
            )
        )
        return made[-1]

    make.told = told
    yield make
    for one in made:
        one.close()


def test_texts_are_sent_as_ids_and_come_back_in_their_order(scorer):
    with ChatServer(lambda body: Reply(scored(body, tenth), delay_s=0.05 if len(body["prompt"]) == 3 else 0)) as server:
        assert scorer(server.url).score(TEXTS) == [[-2.0, -3.0], [-4.0]]
    assert sorted(server.requests, key=lambda body: len(body["prompt"])) == [
        {"model": "m", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        for ids in ([1, 20, 30], [1, 20, 30, 40])
    ]


def test_texts_are_under_way_together_as_far_as_the_teacher_allows(scorer):
    connections = 0

    class Counting(ChatServer):
        async def _serve(self, reader, writer):
            nonlocal connections
            connections += 1
            await super()._serve(reader, writer)

    with Counting(lambda body: Reply(scored(body, tenth), delay_s=0.05)) as server:
        many = [ScoreRequest([1, 2, token], 2, "") for token in range(6)]
        assert scorer(server.url, concurrency=3).score(many) == [[-token / 10] for token in range(6)]
    assert connections == 3  # and they are kept


def test_a_busy_server_is_asked_again(scorer):
    replies = iter([Reply(status=503), Reply(status=429), Reply(hang_up=True)])
    with ChatServer(lambda body: next(replies, None) or Reply(scored(body, tenth))) as server:
        teacher = scorer(server.url)
        assert teacher.score(TEXTS[:1]) == [[-2.0, -3.0]]
    assert len(server.requests) == 4
    assert scorer.told == []


def test_what_is_not_scored_is_none_and_counted_and_said_once(scorer):
    def refuse(body):
        return Reply(b"too long", status=400) if len(body["prompt"]) == 4 else Reply(scored(body, tenth))

    with ChatServer(refuse) as server:
        teacher = scorer(server.url)
        assert teacher.score([*TEXTS, ScoreRequest([1, 2, 3, 4], 1, "c")]) == [[-2.0, -3.0], None, None]
        facts = teacher.facts()
    assert facts == {
        "teacher": "strong",
        "scored": 1,
        "cached": 0,
        "failed": {"HTTP 400: too long": 2},
        "usd": 0.0,
        "tokens": 4,
    }
    assert scorer.told == [
        "teacher 'strong' did not score rollout b: HTTP 400: too long; such rollouts are left out, the event `teacher` "
        "counts them at the end of the run"
    ]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda body: Reply(status=401), "/v1 m: the key is not accepted (HTTP 401)"),
        (lambda body: Reply(scored({"model": "m", "prompt": [1, 2, 3]}, tenth)), "log-probs of other tokens than were"),
        (lambda body: Reply(scored(body, lambda token: 0.5)), "0.5 is no log-prob"),
        (lambda body: Reply({"model": "m", "choices": [{"text": "x"}]}), "gives no log-probs of a text it is handed"),
        (lambda body: Reply(scored({**body, "model": "other"}, tenth)), "/v1 m: other answered"),
        (lambda body: Reply(status=500), "given up after 2 attempts: HTTP 500"),
    ],
    ids=["key", "tokens", "above-zero", "chat-only", "model", "attempts"],
)
def test_no_failure_of_a_teacher_ends_the_run(scorer, reply, reason):
    with ChatServer(reply) as server:
        teacher = scorer(server.url, attempts=2)
        assert teacher.score(TEXTS[:1]) == [None]
    ((said, times),) = teacher.failed.items()
    assert reason in said
    assert times == 1


def test_what_was_paid_for_is_not_asked_again(scorer):
    with ChatServer(lambda body: Reply(scored(body, tenth))) as server:
        scorer(server.url).score(TEXTS)
        again = scorer(server.url)
        assert again.score(TEXTS) == [[-2.0, -3.0], [-4.0]]
        assert (again.scored, again.cached) == (2, 2)
        assert len(server.requests) == 2
        again.try_out(TEXTS[0])
        assert len(server.requests) == 3


def test_money_is_reserved_before_a_text_is_sent(scorer):
    # one token costs $1: 3 read and 1 written are $4, and the worst of them is 3 + 16 + 1
    price = {"input": 1e6, "output": 1e6}
    with ChatServer(lambda body: Reply(scored(body, tenth))) as server:
        teacher = scorer(server.url, usd=22.0, price=price, concurrency=1)
        assert teacher.score([ScoreRequest([1, 2, token], 2, "") for token in (3, 4)]) == [[-0.3], None]
        assert teacher.facts()["usd"] == 4.0
    assert len(server.requests) == 1
    ((said, _),) = teacher.failed.items()
    assert said.startswith("the next call of teacher 'strong' may cost $20.0000 or 20 tokens, and $4.0000")


def test_a_teacher_that_cannot_score_or_be_made_says_so(tmp_path):
    teacher = TeacherScorer(
        "script",
        lambda: ScriptedTeacher(ScriptedSettings(rules={"a": "b"})),
        scope="test",
        database=tmp_path / "teachers.sqlite",
    )
    with pytest.raises(UsageError, match=r"^teacher 'script' does not score$"):
        teacher.try_out(TEXTS[0])
    teacher.close()

    def broken():
        raise TeacherRefused("no")

    with pytest.raises(TeacherRefused, match=r"^no$"):
        TeacherScorer("broken", broken, scope="test", database=tmp_path / "teachers.sqlite")
    assert not any(thread.name == "teacher-broken" for thread in threading.enumerate())
