"""Whole replays: order, interruption, several processes, kills."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from composer_core.errors import Stopped, UsageError
from composer_core.plugins.teacher_settings import OpenAiTeacherSettings, ScriptedSettings
from composer_core.teachers.asking import Asker
from composer_core.teachers.budget import Budget
from composer_core.teachers.client import OpenAiTeacher
from composer_core.teachers.database import Database
from composer_core.teachers.errors import BudgetSpent, TeacherRefused
from composer_core.teachers.replay import Replay, replay_and_normalize, replay_trace
from composer_core.teachers.scripted import ScriptedTeacher
from composer_core.testing.chat_server import ChatServer, Reply, answer
from composer_core.traces.model import TraceState

PRICE = {"input": 0.0, "output": 1000.0}  # five tokens cost half a cent


def states(n):
    return [
        TraceState(f"s::{i:04d}", [{"role": "user", "content": f"q{i}"}], {"role": "assistant", "content": "agent"}, i)
        for i in range(n)
    ]


def openai(url, **settings):
    return OpenAiTeacher(OpenAiTeacherSettings(base_url=url, model="m", **settings))


def echo(body):
    return Reply(answer(body["messages"][-1]["content"] + "!"))


def test_answers_come_in_the_order_of_the_questions(tmp_path):
    with ChatServer(lambda body: Reply(answer("x"), delay_s=0.02 if "q0" in str(body) else 0)) as server:
        teachers = {"a": openai(server.url), "b": ScriptedTeacher(ScriptedSettings(rules={"q": "y"}))}
        got = asyncio.run(replay_trace(states(3), teachers, database=tmp_path / "db"))
    assert [(g.state_id, g.teacher) for g in got] == [(f"s::{i:04d}", t) for i in range(3) for t in "ab"]


def test_tools_of_the_trace_reach_the_teacher(tmp_path):
    tool = {"type": "function", "function": {"name": "ls", "parameters": {}}}
    with ChatServer(echo) as server:
        database = Database(tmp_path / "db")
        asker = Asker("t", openai(server.url), database, Budget(database, "x"))
        asyncio.run(Replay(states(2), [asker], tools={"s::0001": [tool]}).run())
        by_text = {body["messages"][0]["content"]: body.get("tools") for body in server.requests}
        database.close()
    assert by_text == {"q0": None, "q1": [tool]}


def test_pairs_come_out_normalised(tmp_path):
    teachers = {name: ScriptedTeacher(ScriptedSettings(rules={"q": "mail me@example.org"})) for name in "ab"}
    pairs, report = asyncio.run(replay_and_normalize(states(2), teachers, database=tmp_path / "db"))
    assert [pair.chosen["content"] for pair in pairs] == ["mail <redacted: e-mail>"] * 2
    assert report.kept == 2


@pytest.mark.parametrize(("n", "teachers", "said"), [(0, {"a": None}, "no states"), (1, {}, "no teachers")])
def test_nothing_to_ask_is_refused(n, teachers, said):
    with pytest.raises(UsageError, match=said):
        asyncio.run(replay_trace(states(n), teachers))


def test_a_refused_teacher_ends_the_replay_and_keeps_what_others_answered(tmp_path):
    with ChatServer(echo) as good, ChatServer(lambda body: Reply(status=402)) as bad:
        teachers = {"good": openai(good.url, concurrency=1), "bad": openai(bad.url, concurrency=1)}
        with pytest.raises(TeacherRefused, match="out of credits"):
            asyncio.run(replay_trace(states(30), teachers, database=tmp_path / "db"))
        paid = len(good.requests)
        again = asyncio.run(replay_trace(states(30), {"good": openai(good.url)}, database=tmp_path / "db"))
        assert sum(a.cached for a in again) == paid
        assert len(good.requests) == 30


def test_an_empty_budget_ends_the_replay_and_a_higher_one_goes_on(tmp_path):
    with ChatServer(echo) as server:
        teachers = {"t": openai(server.url, price=PRICE, max_tokens=5)}
        with pytest.raises(BudgetSpent):
            asyncio.run(replay_trace(states(10), teachers, max_total_usd=0.02, database=tmp_path / "db"))
        assert len(server.requests) == 4  # half a cent each, and their worst case is what they cost
        teachers = {"t": openai(server.url, price=PRICE, max_tokens=5)}
        got = asyncio.run(replay_trace(states(10), teachers, max_total_usd=0.05, database=tmp_path / "db"))
        assert len(server.requests) == 10
    assert all(g.reply is not None for g in got)


def test_the_first_interruption_waits_for_what_is_paid_for(tmp_path):
    with ChatServer(lambda body: Reply(answer("x"), delay_s=0.05)) as server:
        database = Database(tmp_path / "db")
        asker = Asker("t", openai(server.url, concurrency=4), database, Budget(database, "x"))
        replay = Replay(states(50), [asker])

        def interrupt(answer, progress):
            if progress.done == 5:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Stopped, match=r"interrupted after \d+ of 50 answers"):
            asyncio.run(replay.run(on_answer=interrupt))
        stored = database.read("SELECT COUNT(*) FROM replies")[0][0]
        assert stored == len(server.requests)  # none that was sent is lost
        assert stored < 20
        assert Budget(database, "x").spent().doubt_usd == 0
        database.close()


def test_after_an_interruption_nothing_is_sent_again(tmp_path):
    def busy(body):
        os.kill(os.getpid(), signal.SIGINT)
        return Reply(status=503)

    with ChatServer(busy) as server:
        with pytest.raises(Stopped, match="interrupted after"):
            asyncio.run(replay_trace(states(9), {"t": openai(server.url, concurrency=1)}, database=tmp_path / "db"))
        assert len(server.requests) == 1


def test_the_second_interruption_waits_no_longer_and_what_it_may_cost_is_in_doubt(tmp_path):
    def hang(body):
        for wait in (0.2, 0.4):
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Reply(answer("x"), delay_s=60)

    with ChatServer(hang) as server:
        database, started = Database(tmp_path / "db"), time.monotonic()
        budget = Budget(database, "x", usd=2)
        replay = Replay(states(3), [Asker("t", openai(server.url, concurrency=1, price=PRICE), database, budget)])
        with pytest.raises(Stopped, match="interrupted after 0 of 3 answers"):
            asyncio.run(replay.run())
        assert time.monotonic() - started < 30
        assert (budget.spent().reserved_usd, len(server.requests)) == (0, 1)
        assert budget.spent().doubt_usd == pytest.approx(1024 * 1000e-6, rel=0.01)
        database.close()


def test_an_interruption_during_the_last_answer_changes_nothing(tmp_path):
    def last(body):
        os.kill(os.getpid(), signal.SIGINT)
        return Reply(answer("x"), delay_s=0.1)

    with ChatServer(last) as server:
        (got,) = asyncio.run(replay_trace(states(1), {"t": openai(server.url)}, database=tmp_path / "db"))
    assert got.reply.message["content"] == "x"


PROGRAM = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_replay import openai, states, PRICE
from composer_core.teachers.replay import replay_trace
from composer_core.errors import ComposerError
first, count, usd = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
teacher = openai(sys.argv[1], price=PRICE, max_tokens=5, concurrency=16)
try:
    asked = states(200)[first:first + count]
    asyncio.run(replay_trace(asked, {{"t": teacher}}, max_total_usd=usd, database=Path(sys.argv[5])))
except ComposerError as error:
    sys.exit(error.exit_code)
"""


def start(url, first, count, usd, database):
    here = os.path.dirname(__file__)
    arguments = [url, str(first), str(count), str(usd), str(database)]
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(here=here), *arguments])


def test_four_processes_together_keep_one_budget(tmp_path):
    with ChatServer(lambda body: Reply(answer("x"), delay_s=0.01)) as server:
        # 4 x 50 questions at half a cent would be a dollar; 0.30 is allowed: exactly 60 calls, worst case = real cost
        processes = [start(server.url, 50 * i, 50, 0.30, tmp_path / "db") for i in range(4)]
        codes = [process.wait(timeout=120) for process in processes]
        assert set(codes) == {5}
        assert len(server.requests) == 60
    database = Database(tmp_path / "db")
    spent = Budget(database, "replay_trace").spent()
    database.close()
    assert (spent.usd, spent.reserved_usd, spent.doubt_usd) == (pytest.approx(0.30), 0, 0)


def test_processes_with_the_same_questions_share_their_answers(tmp_path):
    with ChatServer(echo) as server:
        assert start(server.url, 0, 30, 10, tmp_path / "db").wait(timeout=60) == 0
        assert start(server.url, 0, 30, 10, tmp_path / "db").wait(timeout=60) == 0
        assert len(server.requests) == 30


def test_a_killed_replay_goes_on_without_paying_twice(tmp_path):
    with ChatServer(lambda body: Reply(answer("x"), delay_s=0.05)) as server:
        process = start(server.url, 0, 100, 10, tmp_path / "db")
        while len(server.requests) < 40:
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.wait()
        database = Database(tmp_path / "db")
        stored = database.read("SELECT COUNT(*) FROM replies")[0][0]
        in_flight = len(server.requests) - stored
        assert stored > 0
        assert 0 <= in_flight <= 16  # what was on its way when it died; everything that had come is kept
        before = len(server.requests)
        assert start(server.url, 0, 100, 10, tmp_path / "db").wait(timeout=60) == 0
        assert len(server.requests) - before == 100 - stored
        spent = Budget(database, "replay_trace").spent()
        database.close()
    assert spent.usd == pytest.approx(0.5 + spent.doubt_usd)
    assert spent.doubt_usd <= 16 * 0.005
