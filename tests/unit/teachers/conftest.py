import asyncio

import pytest

from composer_core.plugins.teacher_settings import OpenAiTeacherSettings
from composer_core.protocols import TeacherRequest
from composer_core.teachers.asking import Asker
from composer_core.teachers.budget import Budget
from composer_core.teachers.client import OpenAiTeacher
from composer_core.teachers.database import Database


@pytest.fixture
def database(tmp_path):
    file = Database(tmp_path / "teachers.sqlite")
    yield file
    file.close()


@pytest.fixture
def asker(database):
    """Makes an asker of a server; waits between attempts are left out."""

    def make(url, *, name="t", usd=None, tokens=None, **settings):
        async def at_once(seconds):
            await asyncio.sleep(min(seconds, 0.001))

        teacher = OpenAiTeacher(OpenAiTeacherSettings(base_url=url, model=settings.pop("model", "m"), **settings))
        return Asker(name, teacher, database, Budget(database, "test", usd=usd, tokens=tokens), sleep=at_once)

    return make


@pytest.fixture
def ask():
    """Asks one question, or several at once, in a loop of their own."""

    def run(asker, *texts):
        async def all_of_them():
            requests = [TeacherRequest([{"role": "user", "content": text}]) for text in texts]
            try:
                return await asyncio.gather(*(asker.ask(request) for request in requests), return_exceptions=True)
            finally:
                await asker.teacher.aclose()

        answers = asyncio.run(all_of_them())
        for answer in answers:
            if isinstance(answer, BaseException) and len(answers) == 1:
                raise answer
        return answers[0] if len(answers) == 1 else answers

    return run
