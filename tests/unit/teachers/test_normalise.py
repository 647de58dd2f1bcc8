import json
import sys
from collections import Counter

import pytest

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.spec.sections import DataJuicerSpec, NormaliseSpec
from composer_core.teachers.juicer import surviving
from composer_core.teachers.normalise import normalise
from composer_core.teachers.pairs import Pair
from composer_core.teachers.redaction import redact

AWS = "AKIA" + "ABCDEFGHIJKLMNOP"  # put together here, so that no scanner takes the file for a leak


def pair(chosen="a", rejected="b", messages=()):
    def message(content):
        return {"role": "assistant", "content": content}

    return Pair("s", list(messages), message(chosen), message(rejected), 2, ["t"])


@pytest.mark.parametrize(
    ("text", "clean", "kind"),
    [
        (f"export KEY={AWS}", "export KEY=<redacted: api key>", "api key"),
        ("sk-" + "a" * 24, "<redacted: api key>", "api key"),
        ("token ghp_" + "A1" * 15 + " end", "token <redacted: api key> end", "api key"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer <redacted: bearer>", "bearer"),
        ('"password": "hunter2hunter2"', '"password": "<redacted: password>"', "password"),
        ("API_KEY=abcd1234efgh", "API_KEY=<redacted: password>", "password"),
        ("aws_secret_access_key = abcd/1234+efgh", "aws_secret_access_key = <redacted: password>", "password"),
        (r"{\"api_key\": \"abcd1234efgh\"}", r"{\"api_key\": \"<redacted: password>\"}", "password"),
        ("postgres://bob:s3cret@db/x", "postgres://<redacted: url login>@db/x", "url login"),
        ("mail jane.doe+x@example.org now", "mail <redacted: e-mail> now", "e-mail"),
        # 4111 1111 1111 1111 passes the Luhn check: doubled digits 8+2*7=22, others 1*8=8, sum 30
        ("card 4111 1111 1111 1111.", "card <redacted: card>.", "card"),
    ],
)
def test_secrets_are_replaced_by_their_kind(text, clean, kind):
    counts = Counter()
    found = redact(text, counts)
    assert found == clean
    assert counts == {kind: 1}
    assert redact(found, Counter()) == found


@pytest.mark.parametrize(
    "text",
    [
        "the password is checked in auth.py",
        "commit 3101c7d5072418e28b9008a6636bde82a006892c",
        "4111 1111 1111 1112",  # one digit off: no card
        "skip-this-long-hyphenated-identifier",
        "2026-11-29T17:50:10 10.0.0.1:8080",
    ],
)
def test_what_is_no_secret_stays(text):
    counts = Counter()
    assert (redact(text, counts), counts) == (text, {})


def test_secrets_inside_tool_calls_are_found_and_names_stay():
    call = {"id": "1", "type": "function", "function": {"name": "http", "arguments": json.dumps({"key": AWS})}}
    made = pair(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    (clean,), report = normalise([made])
    function = clean.messages[0]["tool_calls"][0]["function"]
    assert function["name"] == "http"
    assert AWS not in function["arguments"]
    assert json.loads(function["arguments"]) == {"key": "<redacted: api key>"}
    assert report.redacted == {"api key": 1}


def test_redaction_can_be_left_out():
    (kept,), _ = normalise([pair(chosen=AWS)], NormaliseSpec(redact=False))
    assert kept.chosen["content"] == AWS


def test_long_tool_results_lose_their_middle_and_nothing_else_does():
    long = "a" * 100 + "b" * 100
    messages = [{"role": "tool", "tool_call_id": "1", "content": long}, {"role": "user", "content": long}]
    (kept,), report = normalise([pair(messages=messages)], NormaliseSpec(max_tool_result_chars=100))
    assert kept.messages[0]["content"] == "a" * 50 + "\n[... 100 characters left out ...]\n" + "b" * 50
    assert kept.messages[0]["tool_call_id"] == "1"
    assert kept.messages[1]["content"] == long
    assert report.shortened_results == 1


def test_what_is_dropped_is_counted_by_reason():
    pairs = [pair(), pair(), pair("same", "same "), pair(chosen="x" * 500)]
    kept, report = normalise(pairs, NormaliseSpec(max_chars=400))
    assert kept == [pair()]
    assert report.as_json() == {
        "read": 4,
        "kept": 1,
        "shortened_results": 0,
        "redacted": {},
        "dropped": {"duplicate": 1, "both answers the same": 1, "too long": 1},
    }


# -- data-juicer -------------------------------------------------------------------------------------------------------


def test_an_interpreter_without_data_juicer_gets_its_install_line():
    with pytest.raises(MissingError) as caught:
        surviving(["a"], DataJuicerSpec(python=sys.executable))
    assert str(caught.value) == (
        f"replay.normalise.data_juicer.python: {sys.executable} has no data-juicer\n"
        f"  fix: {sys.executable} -m pip install py-data-juicer aiohttp"
    )


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"cannot run .*/nothing: No such file or directory"):
        surviving(["a"], DataJuicerSpec(python=str(tmp_path / "nothing")))


@pytest.fixture
def juicer_double(tmp_path, monkeypatch):
    """A stand-in for the data-juicer package: it keeps texts longer than three characters, by our config file."""
    package = tmp_path / "data_juicer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text("import yaml\ndef init_configs(a): return yaml.safe_load(open(a[1]))\n")
    (package / "core.py").write_text(
        "import json, sys\n"
        "class DefaultExecutor:\n"
        "    def __init__(self, cfg): self.cfg = cfg\n"
        "    def run(self):\n"
        "        if self.cfg['process'] == ['fail']: sys.exit('no such operator')\n"
        "        rows = [json.loads(line) for line in open(self.cfg['dataset_path'])]\n"
        "        with open(self.cfg['export_path'], 'w') as out:\n"
        "            [out.write(json.dumps(r) + '\\n') for r in reversed(rows) if len(r['text']) > 3]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_recipes_choice_is_taken_over_in_order(juicer_double):
    assert surviving(["long text", "no", "another"], DataJuicerSpec(python=sys.executable)) == [0, 2]
    kept, report = normalise(
        [pair("aaaa", "bbbb"), pair("cccc", "dddd")], NormaliseSpec(data_juicer=DataJuicerSpec(python=sys.executable))
    )
    assert len(kept) == 2
    assert report.dropped["data-juicer"] == 0


def test_a_failing_recipe_is_reported_with_what_was_said(juicer_double, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("process: [fail]\n")
    with pytest.raises(RunFailed, match=r"data-juicer failed \(exit code 1\): no such operator"):
        surviving(["a"], DataJuicerSpec(python=sys.executable, recipe=str(recipe)))
    recipe.write_text("- text_length_filter\n")
    with pytest.raises(UsageError, match="a recipe needs `process:`, a list of operators"):
        surviving(["a"], DataJuicerSpec(python=sys.executable, recipe=str(recipe)))
