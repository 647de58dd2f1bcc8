import asyncio
import json

import pytest

from composer_core.errors import UsageError
from composer_core.plugins.teacher_settings import ScriptedSettings
from composer_core.protocols import TeacherRequest
from composer_core.teachers.errors import StateRefused
from composer_core.teachers.scripted import ScriptedTeacher


def ask(teacher, content, state_id=""):
    request = TeacherRequest([{"role": "user", "content": content}], state_id=state_id)
    return asyncio.run(teacher.complete(request)).message


def test_a_file_answers_by_state(tmp_path):
    file = tmp_path / "script.jsonl"
    file.write_text(json.dumps({"state_id": "s::0000", "message": {"role": "assistant", "content": "yes"}}) + "\n")
    teacher = ScriptedTeacher(ScriptedSettings(path=str(file)))
    assert ask(teacher, "anything", "s::0000") == {"role": "assistant", "content": "yes"}
    with pytest.raises(StateRefused, match="the script has no answer"):
        ask(teacher, "anything", "s::0001")


def test_rules_answer_by_the_last_message_and_the_first_that_fits_wins():
    teacher = ScriptedTeacher(ScriptedSettings(rules={"two": "2", "t": "T"}))
    assert ask(teacher, "one or two")["content"] == "2"
    assert ask(teacher, "three")["content"] == "T"


@pytest.mark.parametrize("line", ["{", '{"state_id": 1, "message": {"role": "assistant"}}', '{"message": {}}'])
def test_a_bad_line_is_named(line, tmp_path):
    file = tmp_path / "script.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError) as caught:
        ScriptedTeacher(ScriptedSettings(path=str(file)))
    assert str(caught.value).startswith(f"{file}:1: not an answer: ")


def test_a_bad_rule_is_named():
    with pytest.raises(UsageError, match="rules: not a regular expression"):
        ScriptedTeacher(ScriptedSettings(rules={"(": "x"}))
