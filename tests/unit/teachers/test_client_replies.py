"""What servers send that is no good answer: other models, broken calls, costs that are none, keys in texts."""

import asyncio

import pytest

from composer_core.errors import RunFailed, UsageError
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
from composer_core.protocols import ScoreRequest
from composer_core.teachers.budget import Budget
from composer_core.teachers.client import OTHER_MODEL, OpenAiTeacher, same_model
from composer_core.teachers.errors import StateRefused, TeacherRefused
from composer_core.testing.chat_server import ChatServer, Reply, answer

PRICE = {"input": 1000.0, "output": 2000.0}


@pytest.mark.parametrize(
    ("asked", "answered", "same"),
    [
        ("openai/gpt-5", "gpt-5-2025-08-07", True),
        ("anthropic/claude-opus-4.7", "anthropic/claude-4.7-opus-20260416", True),
        ("deepseek/deepseek-v4-pro:free", "deepseek-v4-pro", True),
        ("Qwen/Qwen3-8B", "qwen3-8b", True),
        ("m", "", True),
        ("openai/gpt-5", "openai/gpt-5-mini", False),
        ("openai/gpt-5", "openai/gpt-4o", False),
        ("openai/gpt-5", "meta-llama/llama-3.1-8b", False),
    ],
)
def test_a_reply_may_name_its_model_more_exactly_but_not_another_one(asked, answered, same):
    assert same_model(asked, answered) is same


def test_an_answer_of_another_model_is_paid_for_kept_and_marked(asker, ask, database):
    with ChatServer(lambda body: Reply(answer("yes", model="other-model", cost=0.25))) as server:
        got = ask(asker(server.url, model="gpt-5", price=PRICE), "q")
        again = ask(asker(server.url, model="gpt-5", price=PRICE), "q")
    assert (got.reply.finish, got.reply.model) == (OTHER_MODEL, "other-model")
    assert again.cached
    assert Budget(database, "test").spent().usd == 0.25


def test_a_router_may_answer_with_any_model(asker, ask):
    with ChatServer(lambda body: Reply(answer("yes", model="other-model"))) as server:
        got = ask(asker(server.url, model="auto", any_model=True), "q")
    assert got.reply.finish == "stop"


@pytest.mark.parametrize("calls", ["ls", [1], [{"function": "ls"}], [{"function": {"name": 3}}], {"a": 1}])
def test_tool_calls_that_are_none_leave_no_answer(calls, asker, ask):
    body = answer("text") | {"choices": [{"message": {"content": "text", "tool_calls": calls}}]}
    with ChatServer(lambda _: Reply(body)) as server:
        got = ask(asker(server.url), "q")
    assert got.reply.message == {"role": "assistant", "content": None}


@pytest.mark.parametrize("cost", [-1.0, True, "0.5", float("nan"), float("inf")], ids=str)
def test_a_cost_that_is_none_is_replaced_by_the_price_of_the_tokens(cost, asker, ask, database):
    with ChatServer(lambda _: Reply(answer("yes", cost=cost))) as server:
        ask(asker(server.url, price=PRICE, usd=100), "q")
    assert Budget(database, "test").spent().usd == pytest.approx(0.02)  # 10 tokens in, 5 out


@pytest.mark.parametrize("usage", [None, [], "many"], ids=str)
def test_an_answer_without_a_count_is_booked_at_its_worst(usage, asker, ask, database):
    with ChatServer(lambda _: Reply(answer("yes") | {"usage": usage})) as server:
        ask(asker(server.url, price=PRICE, usd=100, max_tokens=10), "q")
    spent = Budget(database, "test").spent()
    assert spent.usd > 10 * 2000e-6
    assert spent.tokens > 10


@pytest.mark.parametrize("key", ["sk-secret-part\nX: 1", "sk-sécret-part", "sk-secret\x00part"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key):
    with pytest.raises(UsageError, match="the key holds characters that no header can carry") as caught:
        OpenAiTeacher(OpenAiTeacherSettings(model="m", key=key))
    assert "part" not in str(caught.value)


def test_a_line_break_after_a_key_is_no_part_of_it(asker, ask):
    with ChatServer(lambda _: Reply(answer("yes"))) as server:
        ask(asker(server.url, key="sk-secret-value\n"), "q")
    assert server.headers[0]["authorization"] == "Bearer sk-secret-value"


def test_a_key_that_the_server_quotes_is_not_shown(asker, ask):
    quoted = {"error": {"message": "Incorrect API key provided: sk-secret-value"}}
    with ChatServer(lambda _: Reply(quoted, status=401)) as server, pytest.raises(TeacherRefused) as caught:
        ask(asker(server.url, key="sk-secret-value"), "q")
    assert "Incorrect API key provided: <key>" in str(caught.value)


def test_scoring_is_for_servers_that_are_said_to_score(asker):
    with pytest.raises(UsageError, match="is not said to score"):
        asyncio.run(asker("http://127.0.0.1:9/v1").teacher.score(ScoreRequest([1, 2], 1)))
    listed = {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}]}
    with ChatServer(lambda _: Reply(listed)) as server, pytest.raises(StateRefused, match="other tokens"):
        asyncio.run(asker(server.url, scores=True).teacher.score(ScoreRequest([1, 2], 1)))


def test_what_the_budget_counts_on_cannot_be_changed_beside_it():
    for key in ("max_tokens", "n", "stream", "model"):
        with pytest.raises(ValueError, match=f"extra_body cannot hold {key}"):
            OpenAiTeacherSettings(model="m", extra_body={key: 1})


def test_a_preset_brings_model_price_and_key_and_gives_way():
    ready = OpenAiTeacherSettings(preset="gpt")
    assert (ready.model, ready.price.output, ready.key) == ("openai/gpt-5", 10.0, "${env:OPENROUTER_API_KEY}")
    own = OpenAiTeacherSettings(preset="gpt", model="openai/gpt-6", key="k", price={"input": 0, "output": 1})
    assert (own.model, own.key, own.price.output) == ("openai/gpt-6", "k", 1)


def test_the_key_of_a_preset_goes_to_openrouter_only():
    assert OpenAiTeacherSettings(preset="gpt", base_url="http://127.0.0.1:8000/v1").key is None


def test_a_database_that_cannot_be_written_says_so(database):
    database.read("PRAGMA query_only=ON")
    problem = "the teachers' database cannot be written: attempt to write a readonly database"
    with pytest.raises(RunFailed, match=problem), database.write() as connection:
        connection.execute("INSERT INTO replies VALUES ('k', 'r', 0)")
    database.read("PRAGMA query_only=OFF")
    with database.write() as connection:  # nothing is left open
        connection.execute("INSERT INTO replies VALUES ('k', 'r', 0)")
