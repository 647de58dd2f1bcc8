"""`composer-run traces`: whole output, exit codes, and that standard output holds nothing but the answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.cli.main import main

DATA = Path(__file__).parents[1] / "data" / "traces"
MINI = DATA / "mini-swe-agent" / "github_issue.traj.json"
CUT = DATA / "claude-code" / "cc-2.1.14-truncated-last-line.jsonl"


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("traces", "stats", path)` -> (exit code, stdout, stderr), in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER_DISABLE_PLUGINS", "*")

    def _run(*argv):
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return _run


def copy(source, name):
    """A recorded file under a short name, relative to the folder that the command runs in."""
    return shutil.copy(source, name)


# -- stats -------------------------------------------------------------------------------------------------------------


def test_stats_as_json_is_a_list_with_one_entry_per_file(composer):
    code, out, err = composer("traces", "stats", copy(CUT, "s.jsonl"), copy(MINI, "m.json"), "--json")
    assert json.loads(out) == [
        {
            "file": "s.jsonl",
            "format": "claude-code",
            "records": 37,
            "assistant_turns": 13,
            "tool_calls": 13,
            "tool_errors": 1,
            "sidechain_records": 0,
            "branches": 2,
            "malformed_lines": 1,
            "unknown_types": {},
        },
        {
            "file": "m.json",
            "format": "mini-swe-agent",
            "records": 22,
            "assistant_turns": 10,
            "tool_calls": 10,
            "tool_errors": 2,
            "sidechain_records": 0,
            "branches": 0,
            "malformed_lines": 0,
            "unknown_types": {},
        },
    ]
    assert (code, err) == (0, "")


def test_stats_as_text_is_a_table_and_says_what_was_lost(composer):
    copy(DATA / "atif" / "login-trace.trajectory.json", "a.json")
    copy(CUT, "s.jsonl")
    assert composer("traces", "stats", "a.json", "s.jsonl") == (
        0,
        "records  turns  calls  errors  sidechain  branches  format          file\n"
        "      7      6      6       -          0         0  atif            a.json\n"
        "     37     13     13       1          0         2  claude-code     s.jsonl\n",
        "s.jsonl:38: the last line is cut off\n",
    )


def test_what_a_folder_holds_besides_sessions_is_said_on_stderr(composer):
    Path("sessions").mkdir()
    copy(MINI, "sessions/m.json")
    Path("sessions/settings.json").write_text("{}")
    code, out, err = composer("traces", "stats", "sessions", "--json")
    assert [entry["file"] for entry in json.loads(out)] == ["sessions/m.json"]
    assert (code, err) == (0, "skipped sessions/settings.json: no format that is known\n")


# -- show --------------------------------------------------------------------------------------------------------------

SESSION = """\
{"type":"user","uuid":"u","parentUuid":null,"message":{"content":"list them"}}
{"type":"assistant","uuid":"a","parentUuid":"u","message":{"id":"m1","content":[{"type":"thinking","thinking":"ls"},\
{"type":"tool_use","id":"t","name":"Bash","input":{"command":"sl"}}]}}
{"type":"user","uuid":"r","parentUuid":"a","message":{"content":[{"type":"tool_result","tool_use_id":"t",\
"content":"sl: command not found","is_error":true}]}}
{"type":"assistant","uuid":"b","parentUuid":"r","message":{"id":"m2","content":[{"type":"text","text":"Sorry."}]}}
"""


def test_show_prints_a_session_with_its_error_sites_marked(composer):
    Path("s.jsonl").write_text(SESSION)
    assert composer("traces", "show", "s.jsonl") == (
        0,
        "== s (claude-code, 3 steps)\n"
        "user\n"
        "  list them\n"
        "[turn 0] agent\n"
        "  (thinks) ls\n"
        '  -> Bash {"command":"sl"}\n'
        "  <- ERROR sl: command not found\n"
        "  !! runtime_error: sl: command not found\n"
        "[turn 1] agent\n"
        "  Sorry.\n"
        "\n",
        "",
    )


def test_show_shortens_long_texts_unless_asked_for_all(composer):
    line = json.dumps({"messages": [{"role": "user", "content": "\n".join(f"line {n}" for n in range(9))}]})
    Path("c.jsonl").write_text(line + "\n")
    _, out, _ = composer("traces", "show", "c.jsonl")
    assert "  line 5\n  ... 3 more lines\n" in out
    assert "  line 8\n" in composer("traces", "show", "c.jsonl", "--full")[1]


def test_show_of_one_trace_names_the_others_when_it_is_not_there(composer):
    Path("s.jsonl").write_text(SESSION)
    assert composer("traces", "show", "s.jsonl", "--trace", "t") == (2, "", "no trace 't' there; there are s\n")


# -- convert -----------------------------------------------------------------------------------------------------------


def test_convert_to_chat_prints_json_lines(composer):
    Path("s.jsonl").write_text(SESSION)
    code, out, err = composer("traces", "convert", "s.jsonl", "--to", "openai-chat")
    [row] = [json.loads(line) for line in out.splitlines()]
    call = {"id": "t", "type": "function", "function": {"name": "Bash", "arguments": '{"command":"sl"}'}}
    assert row == {
        "id": "s",
        "messages": [
            {"role": "user", "content": "list them"},
            {"role": "assistant", "content": None, "reasoning_content": "ls", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t", "content": "sl: command not found", "is_error": True},
            {"role": "assistant", "content": "Sorry."},
        ],
    }
    assert (code, err) == (0, "")


def test_convert_to_a_file_can_be_read_again(composer):
    copy(CUT, "s.jsonl")
    code, out, err = composer("traces", "convert", "s.jsonl", "--to", "atif", "--out", "a.jsonl")
    assert (code, out) == (0, "1 traces written to a.jsonl\n")
    assert err == "s.jsonl:38: the last line is cut off\n"
    [entry] = json.loads(composer("traces", "stats", "a.jsonl", "--json")[1])
    assert (entry["format"], entry["assistant_turns"], entry["tool_calls"]) == ("atif", 13, 13)


def test_a_session_without_a_turn_cannot_be_converted(composer):
    Path("s.jsonl").write_text(SESSION.splitlines()[0])
    code, _, err = composer("traces", "convert", "s.jsonl", "--to", "openai-chat", "--out", "c.jsonl")
    assert code == 2
    assert err == (
        "s.jsonl: there is no assistant turn in it\n  fix: `composer-run traces stats` shows what each file holds\n"
    )
    assert not Path("c.jsonl").exists()


def test_an_output_that_cannot_be_written_is_one_message(composer):
    Path("s.jsonl").write_text(SESSION)
    code, out, err = composer("traces", "convert", "s.jsonl", "--to", "atif", "--out", "no/such/folder.jsonl")
    assert (code, out) == (2, "")
    assert err == "no/such/folder.jsonl: cannot be written: No such file or directory\n"


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_token_ids_with_their_hints(composer, tiny_model_folder):
    Path("s.jsonl").write_text(SESSION)
    code, out, err = composer("traces", "rows", "s.jsonl", "--model", tiny_model_folder)
    [row] = [json.loads(line) for line in out.splitlines()]
    assert (code, row["uid"], row["source"]) == (0, "s", "s.jsonl")
    assert len(row["action"]) == len(row["completion_ids"])
    assert row["sdpo"] is not None
    assert "left out" not in err


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_file_of_no_known_format_is_one_message(composer):
    Path("x.txt").write_text("hello")
    code, out, err = composer("traces", "stats", "x.txt", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("x.txt: no trace reader knows this format; there are atif, claude-code, codex, ")
    assert err.count("\n") == 2


def test_an_empty_folder_is_one_message(composer):
    Path("empty").mkdir()
    code, _, err = composer("traces", "stats", "empty")
    assert code == 2
    assert err.startswith("empty: no session file in it: ")


@pytest.mark.parametrize("line", ["stats s.jsonl", "show s.jsonl", "convert s.jsonl --to atif"])
def test_a_missing_package_is_one_message_with_the_command_that_brings_it(composer, monkeypatch, line):
    for name in [name for name in sys.modules if name.startswith("composer_core.traces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orjson", None)
    Path("s.jsonl").write_text(SESSION)
    assert composer("traces", *line.split()) == (
        3,
        "",
        "orjson is not installed, which reads and writes traces\n  fix: pip install 'composer-core[data]'\n",
    )


def test_counting_imports_no_torch(composer):
    Path("s.jsonl").write_text(SESSION)
    code = (
        "import sys; from composer_core.cli.main import main; main(['traces', 'stats', 's.jsonl', '--json'])\n"
        "heavy = [m for m in ('torch', 'transformers', 'rich') if m in sys.modules]; assert not heavy, heavy"
    )
    wrapped = f"try:\n    {code.splitlines()[0]}\nexcept SystemExit:\n    pass\n{code.splitlines()[1]}"
    subprocess.run([sys.executable, "-c", wrapped], check=True, capture_output=True, text=True)
