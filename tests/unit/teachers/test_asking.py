"""One question with everything around it, against a real HTTP server on loopback."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.protocols import Cost
from composer_core.teachers.budget import Budget, process_mark
from composer_core.teachers.errors import BudgetSpent, TeacherRefused
from composer_core.testing.chat_server import ChatServer, Reply, answer

PRICE = {"input": 1000.0, "output": 2000.0}  # dollars per million: 10 + 5 tokens cost 0.010 + 0.010


def replies(*script):
    """Each request gets the next reply, the last one for ever."""
    left = list(script)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


OK = Reply(answer("yes"))


def test_an_answer_is_asked_once_and_then_found(asker, ask):
    with ChatServer(replies(OK)) as server:
        first = ask(asker(server.url, price=PRICE), "q")
        again = ask(asker(server.url, price=PRICE), "q")
    assert first.reply.message == {"role": "assistant", "content": "yes"}
    assert (first.cached, again.cached) == (False, True)
    assert again.reply == first.reply
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"temperature": 0.5}, {"max_tokens": 9}], ids=["model", "temperature", "length"]
)
def test_what_decides_the_answer_decides_the_cache(change, asker, ask):
    with ChatServer(lambda body: Reply(answer("yes", model=body["model"]))) as server:
        ask(asker(server.url), "q")
        assert not ask(asker(server.url, **change), "q").cached


def test_the_key_goes_into_the_header_and_nowhere_else(asker, ask, database):
    with ChatServer(replies(OK)) as server:
        ask(asker(server.url, key="sk-secret-value"), "q")
    assert server.headers[0]["authorization"] == "Bearer sk-secret-value"
    assert "sk-secret-value" not in json.dumps(server.requests)
    database.read("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"sk-secret-value" not in database.path.read_bytes()


@pytest.mark.parametrize(
    "first",
    [
        Reply(status=429, headers={"retry-after": "0"}),
        Reply(status=500),
        Reply(status=503, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}),  # a date in the past: at once
        Reply(status=408),
        Reply(b'{"choices": [{"mess', headers={"content-type": "application/json"}),
        Reply(hang_up=True),
        Reply({"error": {"message": "overloaded"}}),
    ],
    ids=["429", "500", "503", "408", "truncated-json", "hang-up", "error-in-200"],
)
def test_what_may_pass_is_tried_again(first, asker, ask):
    with ChatServer(replies(first, OK)) as server:
        got = ask(asker(server.url), "q")
    assert got.reply.message["content"] == "yes"
    assert got.attempts == 2


def test_an_attempt_that_is_too_slow_is_tried_again(asker, ask):
    with ChatServer(replies(Reply(answer("late"), delay_s=5), OK)) as server:
        got = ask(asker(server.url, timeout_s=0.3), "q")
    assert got.reply.message["content"] == "yes"


def test_a_state_is_given_up_after_the_last_attempt_with_the_last_reason(asker, ask):
    with ChatServer(replies(Reply({"error": "busy"}, status=503))) as server:
        got = ask(asker(server.url, attempts=3), "q")
    assert got.reply is None
    assert got.error == 'given up after 3 attempts: HTTP 503: {"error": "busy"}'
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "the key is not accepted"),
        (402, "the account is out of credits"),
        (403, "the key may not use this model"),
        (404, "there is no such model or address"),
    ],
)
def test_what_no_request_could_change_ends_the_teacher_without_a_second_try(status, said, asker, ask):
    with ChatServer(replies(Reply({"error": "no"}, status=status))) as server:
        with pytest.raises(TeacherRefused) as caught:
            ask(asker(server.url), "q")
        assert str(caught.value) == f'{server.url} m: {said} (HTTP {status}: {{"error": "no"}})'
        assert len(server.requests) == 1


def test_a_refused_request_costs_its_state_only(asker, ask):
    with ChatServer(replies(Reply({"error": "too long"}, status=400))) as server:
        got = ask(asker(server.url), "q")
    assert (got.reply, got.error) == (None, 'HTTP 400: {"error": "too long"}')
    assert len(server.requests) == 1


def test_a_server_that_streams_unasked_is_refused(asker, ask):
    with (
        ChatServer(replies(Reply(b"data: {}\n\n", headers={"content-type": "text/event-stream"}))) as server,
        pytest.raises(TeacherRefused, match="streams although it was not asked to"),
    ):
        ask(asker(server.url), "q")


# -- money -------------------------------------------------------------------------------------------------------------


def test_a_reply_that_names_its_cost_wins_over_the_price_list(asker, ask, database):
    with ChatServer(lambda body: Reply(answer("yes", cost=0.0123))) as server:
        ask(asker(server.url, price=PRICE, usd=100), "q")
    assert Budget(database, "test").spent().usd == pytest.approx(0.0123)


def test_without_a_reported_cost_tokens_are_priced(asker, ask, database):
    with ChatServer(replies(OK)) as server:
        ask(asker(server.url, price=PRICE, usd=100), "q")
    spent = Budget(database, "test").spent()
    assert spent.usd == pytest.approx(10 * 1000e-6 + 5 * 2000e-6)
    assert spent.tokens == 15


def test_many_calls_in_flight_never_cost_more_than_the_budget(asker, ask, database):
    # each answer costs 1 cent, each reservation at worst about 31 (a prompt of ~150 bytes, an answer of 100 tokens):
    # 64 at once would fit by their worst case 3 times only, by their price 100 times
    price = {"input": 1000.0, "output": 1600.0}
    with ChatServer(lambda body: Reply(answer("yes", prompt_tokens=2, completion_tokens=5), delay_s=0.002)) as server:
        teacher = asker(server.url, price=price, usd=1.0, max_tokens=100, concurrency=64)
        got = ask(teacher, *(f"q{i}" for i in range(160)))
    answered = [a for a in got if not isinstance(a, BaseException)]
    refused = [a for a in got if isinstance(a, BudgetSpent)]
    spent = Budget(database, "test").spent()
    assert len(answered) + len(refused) == 160
    assert spent.usd == pytest.approx(0.01 * len(answered))
    assert spent.usd <= 1.0
    # the last call is sent only while its worst case fits: 1.00 - 0.31 leaves room for at least 60 calls
    assert len(answered) >= 60
    assert len(server.requests) == len(answered)


def test_a_budget_of_tokens_is_kept_too(asker, ask, database):
    with ChatServer(replies(OK)) as server:
        teacher = asker(server.url, tokens=400, max_tokens=10)
        got = ask(teacher, *(f"q{i}" for i in range(50)))
    assert Budget(database, "test").spent().tokens <= 400
    assert any(isinstance(a, BudgetSpent) for a in got)


def test_a_budget_that_one_call_could_exceed_sends_nothing(asker, ask):
    with ChatServer(replies(OK)) as server:
        with pytest.raises(BudgetSpent, match=r"the next call of teacher 't' may cost \$"):
            ask(asker(server.url, price=PRICE, usd=0.0001), "q")
        assert server.requests == []


def test_a_lost_connection_leaves_its_worst_case_in_doubt(asker, ask, database):
    with ChatServer(replies(Reply(hang_up=True), OK)) as server:
        teacher = asker(server.url, price=PRICE, usd=100)
        ask(teacher, "q")
        worst = 100 * 0  # nothing reserved any more; what is in doubt is what the first attempt could have cost
        spent = Budget(database, "test").spent()
    assert spent.reserved_usd == worst
    assert spent.doubt_usd > 0
    assert spent.usd == pytest.approx(spent.doubt_usd + 0.02)


def test_a_refusal_gives_its_reservation_back(asker, ask, database):
    with ChatServer(replies(Reply(status=400))) as server:
        ask(asker(server.url, price=PRICE, usd=100), "q")
    spent = Budget(database, "test").spent()
    assert (spent.usd, spent.reserved_usd) == (0, 0)


def test_reservations_of_a_process_that_died_stay_as_doubt(database):
    budget = Budget(database, "test", usd=1.0)
    with database.write() as connection:
        connection.execute(
            "INSERT INTO money (scope, nanousd, tokens, state, process) "
            "VALUES ('test', 400000000, 7, 'reserved', '1@0')"
        )
    assert not budget.others_under_way()
    spent = budget.spent()
    assert (spent.usd, spent.doubt_usd, spent.reserved_usd, spent.tokens) == (0.4, 0.4, 0.0, 7)
    assert budget.reserve(Cost(0.7, 0)) is None
    assert budget.reserve(Cost(0.6, 0)) is not None


def test_a_killed_process_that_nobody_reaped_holds_no_money(database):
    budget = Budget(database, "test", usd=1.0)
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    mark = process_mark(process.pid)
    with database.write() as connection:
        connection.execute(
            "INSERT INTO money (scope, nanousd, tokens, state, process) VALUES ('test', 1, 1, 'reserved', ?)", (mark,)
        )
    assert budget.others_under_way()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # over, and left in the process table
    assert not budget.others_under_way()
    process.stdin.close()
    process.wait()


def test_sums_of_money_are_exact():
    # a thousand times a tenth of a cent is a dollar, not 0.9999999999999 of one
    from composer_core.teachers.budget import _nano

    assert sum(_nano(0.001) for _ in range(1000)) == 10**9


def test_requests_of_a_minute_are_spread(database):
    import asyncio

    from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
    from composer_core.protocols import TeacherRequest
    from composer_core.teachers.asking import Asker
    from composer_core.teachers.client import OpenAiTeacher

    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    with ChatServer(replies(OK)) as server:
        settings = OpenAiTeacherSettings(base_url=server.url, model="m", requests_per_minute=60)
        teacher = Asker("t", OpenAiTeacher(settings), database, Budget(database, "test"), sleep=sleep)

        async def three():
            requests = [TeacherRequest([{"role": "user", "content": str(i)}]) for i in range(3)]
            await asyncio.gather(*(teacher.ask(r) for r in requests))
            await teacher.teacher.aclose()

        asyncio.run(three())
    # one a second: the second waits about 1 s, the third about 2
    assert [round(s) for s in slept] == [1, 2]


def test_a_server_that_scores_gives_log_probs_of_what_follows_the_start():
    import asyncio

    from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
    from composer_core.protocols import ScoreRequest
    from composer_core.teachers.client import OpenAiTeacher

    def score(body):
        listed = [None] + [{str(t): {"logprob": -t / 10}} for t in body["prompt"][1:]]
        return Reply({"choices": [{"prompt_logprobs": listed}]})

    async def run(url):
        teacher = OpenAiTeacher(OpenAiTeacherSettings(base_url=url, model="m", scores=True))
        try:
            return await teacher.score(ScoreRequest([5, 6, 7, 8], 2))
        finally:
            await teacher.aclose()

    with ChatServer(score) as server:
        assert asyncio.run(run(server.url)).message == {"logps": [-0.7, -0.8], "tokens": [None, None]}
        assert server.requests[0]["prompt"] == [5, 6, 7, 8]
    with ChatServer(replies(OK)) as server, pytest.raises(TeacherRefused, match="gives no log-probs"):
        asyncio.run(run(server.url))
