"""Rows of rollouts and of recorded traces: the taught tokens are the same on both sides, and the teacher's text is the
chat template's own for a conversation with the hint in it."""

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_core.errors import UsageError
from composer_core.protocols import RolloutText
from composer_core.traces.chat_template import for_template
from composer_core.traces.hints import HintBook
from composer_core.traces.messages import to_messages
from composer_core.traces.model import Observation, Step, ToolCall, Trace
from composer_core.traces.recorded import TraceRows, rows_for
from composer_core.traces.rows import Hint, HintRows, action_runs

_spec = importlib.util.spec_from_file_location("chat_tokenizers", Path(__file__).with_name("chat_tokenizers.py"))
chats = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chats)

HINT = "Hint: read the file first."
AT = ("turn", "prompt-end", "system")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: chats.make(name) for name in chats.TEMPLATES}


def render(tokenizer, messages, *, header=False):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)


def rollout(tokenizer, messages, *, columns=None):
    """A rollout as a trainer makes it: each turn tokenised by itself, what stands between as context."""
    end = tokenizer.eos_token
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = render(tokenizer, messages[: turns[0]], header=True)
    completion, action, done = [], [], len(prompt)
    for turn in turns:
        before, after = render(tokenizer, messages[:turn], header=True), render(tokenizer, messages[: turn + 1])
        written = after[len(before) : after.rindex(end) + len(end)]
        for text, flag in ((before[done:], False), (written, True)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            completion += ids
            action += [flag] * len(ids)
        done = len(before) + len(messages[turn]["content"] + end)  # later text has the turn without its thought
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    columns = {"prompt": messages[: turns[0]]} if columns is None else columns
    return RolloutText("r", prompt_ids, completion, action, 0.0, columns)


def own_ids(of):
    return [*of.prompt_ids, *of.completion_ids]


def taught_ids(row):
    return [row["teacher_ids"][index] for index in row["teacher"]]


def as_written(messages, name):
    """The messages as a rollout of this family keeps them: Qwen3 opens every turn of its own with a thought."""
    if name != "qwen3":
        return messages
    return [*messages[:1], assistant("<think>\n\n</think>\n\n" + messages[1]["content"]), *messages[2:]]


TWO_TURNS = [user("open a.py"), assistant("cat a.py"), user("No such file"), assistant("ls")]

# -- rollouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", chats.FIVE)
def test_before_a_turn_the_teacher_reads_the_templates_text_with_the_hint_there(tokenizers, name):
    tokenizer = tokenizers[name]
    of = rollout(tokenizer, TWO_TURNS)
    row = HintRows(tokenizer).row(of, [Hint(HINT, turn=1, kind="runtime_error")])
    before, turn = as_written(TWO_TURNS[:2], name), TWO_TURNS[3]
    own = [*before, user("No such file"), user(HINT), turn]
    joined = [*before, user("No such file\n\n" + HINT), turn]
    hinted = joined if name in ("gemma", "mistral") else own
    assert tokenizer.decode(row["teacher_ids"]) == render(tokenizer, hinted).rstrip("\n")
    start, end = action_runs(of)[1]
    assert row["student"] == list(range(start, end))
    assert taught_ids(row) == own_ids(of)[start:end]
    assert (row["kind"], row["site"], set(row["weight"])) == ("runtime_error", [1], {1.0})


@pytest.mark.parametrize("name", chats.FIVE)
def test_at_the_end_of_the_prompt_the_hint_joins_the_users_message(tokenizers, name):
    tokenizer = tokenizers[name]
    row = HintRows(tokenizer, at="prompt-end").row(rollout(tokenizer, TWO_TURNS), [Hint(HINT, turn=1)])
    hinted = as_written([user("open a.py\n\n" + HINT), *TWO_TURNS[1:]], name)
    assert tokenizer.decode(row["teacher_ids"]) == render(tokenizer, hinted).rstrip("\n")


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["made", "there"])
def test_in_the_system_message_the_hint_stands_at_its_end(tokenizers, name, system):
    tokenizer = tokenizers[name]
    row = HintRows(tokenizer, at="system").row(rollout(tokenizer, [*system, *TWO_TURNS]), [Hint(HINT, turn=0)])
    text = "Be brief.\n\n" + HINT if system else HINT
    hinted = [{"role": "system", "content": text}, *TWO_TURNS[:2]]
    assert tokenizer.decode(row["teacher_ids"]) == render(tokenizer, hinted).rstrip("\n")


def test_the_systems_place_is_found_though_the_prompt_was_made_with_tools_too(tokenizers):
    # What a trainer adds behind the system message (tool schemas) is not in the messages that it hands on.
    tokenizer = tokenizers["chatml"]
    messages = [{"role": "system", "content": "Be brief."}, *TWO_TURNS[:2]]
    of = rollout(tokenizer, [*messages[:1], user("tools: read"), *messages[1:]], columns={"prompt": messages[:2]})
    row = HintRows(tokenizer, at="system").row(of, [Hint(HINT)])
    assert tokenizer.decode(row["teacher_ids"]).startswith("<|im_start|>system\nBe brief.\n\n" + HINT + "<|im_end|>")


def test_span_rest_teaches_all_later_turns_and_none_of_the_tool_output(tokenizers):
    tokenizer = tokenizers["chatml"]
    of = rollout(tokenizer, [*TWO_TURNS, user("a.md"), assistant("cat a.md")])
    runs = action_runs(of)
    row = HintRows(tokenizer, span="rest").row(of, [Hint(HINT, turn=1)])
    assert row["student"] == [*range(*runs[1]), *range(*runs[2])]
    assert taught_ids(row) == [own_ids(of)[index] for index in row["student"]]


def test_a_hint_about_the_whole_answer_goes_before_the_first_turn_and_teaches_every_turn(tokenizers):
    tokenizer = tokenizers["chatml"]
    of = rollout(tokenizer, TWO_TURNS)
    runs = action_runs(of)
    row = HintRows(tokenizer).row(of, [Hint(HINT)])
    assert row["student"] == [*range(*runs[0]), *range(*runs[1])]
    assert row["site"] == [-1]
    hinted = [user("open a.py"), user(HINT), *TWO_TURNS[1:]]
    assert tokenizer.decode(row["teacher_ids"]) == render(tokenizer, hinted).rstrip("\n")


def test_two_sites_are_two_teacher_sequences_one_behind_the_other(tokenizers):
    tokenizer = tokenizers["chatml"]
    of = rollout(tokenizer, TWO_TURNS)
    row = HintRows(tokenizer).row(of, [Hint(HINT, turn=0, kind="a"), Hint("Other.", turn=1, kind="b")])
    first, second = row["teacher_lengths"]
    assert (row["kind"], row["site"], first + second) == ("a,b", [0, 1], len(row["teacher_ids"]))
    texts = [tokenizer.decode(row["teacher_ids"][:first]), tokenizer.decode(row["teacher_ids"][first:])]
    assert [HINT in text for text in texts] == [True, False]
    assert taught_ids(row) == [own_ids(of)[index] for index in row["student"]]


def test_generated_ids_are_kept_though_their_text_would_be_tokenised_otherwise(tokenizers):
    tokenizer = tokenizers["chatml"]
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the tests"]
    assert letters != tokenizer.encode("the tests", add_special_tokens=False)
    prompt = tokenizer.encode(render(tokenizer, TWO_TURNS[:1], header=True), add_special_tokens=False)
    of = RolloutText("r", prompt, letters, [True] * len(letters), 0.0)
    row = HintRows(tokenizer).row(of, [Hint(HINT)])
    assert row["teacher_ids"][-len(letters) :] == letters


def test_a_text_prompt_takes_the_hint_behind_it(tokenizers):
    tokenizer = tokenizers["chatml"]
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("1 + 1 =", " 3"))
    of = RolloutText("r", prompt, answer, [True] * len(answer), 0.0, {"prompt": "1 + 1 ="})
    for at in ("turn", "prompt-end"):
        row = HintRows(tokenizer, at=at).row(of, [Hint(HINT)])
        assert tokenizer.decode(row["teacher_ids"]) == f"1 + 1 =\n\n{HINT}\n\n 3"


# -- what cannot be hinted ---------------------------------------------------------------------------------------------


def skipped(rows, of, hint):
    assert rows.row(of, [hint]) is None
    return dict(rows.skipped)


def test_what_cannot_be_hinted_is_counted_with_the_reason(tokenizers):
    tokenizer = tokenizers["chatml"]
    of = rollout(tokenizer, TWO_TURNS)
    odd = RolloutText("r", [5, 6], of.completion_ids, of.action, 0.0, {})
    text = RolloutText("r", [5, 6], of.completion_ids, of.action, 0.0, {"prompt": "a"})
    system = HintRows(tokenizer, at="system")
    assert skipped(HintRows(tokenizer), of, Hint(HINT, turn=7)) == {"the policy wrote no token in this turn": 1}
    assert skipped(HintRows(tokenizer), of, Hint("<|im_end|>")) == {"the hint is empty": 1}
    assert skipped(HintRows(tokenizer), odd, Hint(HINT)) == {
        "the tokens before the turn are not those that the chat template puts there": 1
    }
    assert skipped(HintRows(tokenizer, at="prompt-end"), odd, Hint(HINT)) == {
        "the prompt does not end with a user message as the chat template writes it": 1
    }
    assert skipped(HintRows(tokenizer), text, Hint(HINT, turn=1)) == {"a text prompt has no turns": 1}
    assert skipped(system, text, Hint(HINT)) == {"a text prompt has no system message": 1}
    assert skipped(system, odd, Hint(HINT)) == {
        "a text prompt has no system message": 1,
        "the rollout does not say which messages its prompt was made of (no column prompt)": 1,
    }


def test_a_templates_own_system_message_is_not_replaced_on_the_quiet():
    tokenizer = chats.make("chatml")
    own = "{%- if messages[0].role != 'system' -%}<|im_start|>system\nYou help.<|im_end|>{{ '\n' }}{%- endif -%}"
    tokenizer.chat_template = own + tokenizer.chat_template
    of = rollout(tokenizer, TWO_TURNS)
    assert skipped(HintRows(tokenizer, at="system"), of, Hint(HINT)) == {
        "the hint would replace the chat template's own system message: give the prompts one": 1
    }


def test_a_template_without_a_place_before_a_turn_is_refused_at_once(tokenizers):
    with pytest.raises(UsageError, match=r"^hints\.at: this chat template cannot take a hint mid-trace: "):
        HintRows(tokenizers["unstable"])


def test_a_template_without_a_system_message_is_refused_at_once(tokenizers):
    with pytest.raises(UsageError) as caught:
        HintRows(tokenizers["gemma"], at="system")
    assert str(caught.value) == (
        "hints.at: this chat template has no system message: Conversation roles must alternate "
        "user/assistant/user/assistant/...\n  fix: hints: {at: prompt-end} puts the hint in the user's message"
    )


# -- any conversation --------------------------------------------------------------------------------------------------

WORDS = st.text(alphabet="abc \n<|>é{}\"'", min_size=1, max_size=12).map(lambda text: f"w{text}w")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(chats.FIVE),
    at=st.sampled_from(AT),
    span=st.sampled_from(["turn", "rest"]),
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6),
    data=st.data(),
)
def test_taught_tokens_are_the_same_on_both_sides_of_any_rollout(tokenizers, name, at, span, turns, data):
    if at == "system" and name in ("gemma", "mistral"):  # no system message, or one that moves along
        return
    tokenizer = tokenizers[name]
    of = rollout(tokenizer, [message for text, reply in turns for message in (user(text), assistant(reply))])
    turn = data.draw(st.integers(0, len(turns) - 1))
    rows = HintRows(tokenizer, at=at, span=span)
    row = rows.row(of, [Hint(HINT, turn=turn)])
    assert row is not None, rows.skipped
    ids, runs = own_ids(of), action_runs(of)
    wanted = range(turn, len(turns)) if span == "rest" else [turn]
    assert row["student"] == [index for run in wanted for index in range(*runs[run])]
    assert taught_ids(row) == [ids[index] for index in row["student"]]
    shift = {taught - mine for mine, taught in zip(row["student"], row["teacher"], strict=True)}
    assert shift == {len(row["teacher_ids"]) - row["student"][-1] - 1}  # one insertion, nothing else changed
    assert tokenizer.decode(row["teacher_ids"]).count(HINT) == 1


# -- recorded traces ---------------------------------------------------------------------------------------------------


def failing_step(number, *, reasoning=None):
    call = ToolCall(f"c{number}", "read", {"path": f"f{number}"})
    failed = Observation(f"c{number}", f"Error: no access to drive {'xyzuvw'[number]}", is_error=True)
    return Step("agent", f"look {number}", reasoning, (call,), (failed,))


def good_step(number, *, reasoning=None):
    call = ToolCall(f"g{number}", "read", {"path": f"g{number}"})
    return Step("agent", f"see {number}", reasoning, (call,), (Observation(f"g{number}", "fine", is_error=False),))


def long_trace(*, reasoning=None, tools=True):
    """Twelve turns of three user requests; the fifth and the ninth turn fail."""
    steps = []
    for number in range(12):
        if number % 4 == 0:
            steps.append(Step("user", f"request {number}"))
        make = failing_step if number in (4, 8) else good_step
        steps.append(make(number // 2, reasoning=reasoning))
        if number % 4 == 3:
            steps.append(Step("agent", "done"))
    return Trace("long", steps if tools else without_tools(steps), source="long.jsonl", reward=0.5)


def without_tools(steps):
    return [Step(step.source, step.message) for step in steps if step.source == "user" or step.message == "done"]


def student_text(tokenizer, row):
    return tokenizer.decode(row["prompt_ids"] + row["completion_ids"])


def check(row):
    ids, hinted = row["prompt_ids"] + row["completion_ids"], row["sdpo"]
    assert [ids[index] for index in hinted["student"]] == taught_ids(hinted)
    assert all(row["action"][index - len(row["prompt_ids"])] for index in hinted["student"])


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("at", AT)
def test_a_long_trace_is_tokenised_once_and_hinted_in_its_middle(tokenizers, name, at):
    tokenizer = tokenizers[name]
    rows = TraceRows(tokenizer, at=at)
    [row] = rows.rows(long_trace())
    ready = [for_template(message) for message in to_messages(long_trace().steps, flags=False)]
    assert any("tool_calls" in message for message in ready)
    assert student_text(tokenizer, row) == render(tokenizer, ready)
    assert (row["sdpo"]["site"], row["sdpo"]["kind"]) == ([5, 10], "runtime_error,runtime_error")
    assert (row["uid"], row["source"], row["reward"], sum(rows.skipped.values())) == ("long", "long.jsonl", 0.5, 0)
    check(row)


def test_ids_of_another_agents_calls_do_not_keep_a_template_from_rendering(tokenizers):
    rows = TraceRows(tokenizers["mistral"])
    [row] = rows.rows(long_trace())
    assert not rows.skipped
    assert row["sdpo"]["site"] == [5, 10]
    check(row)


def test_what_the_assistant_wrote_is_action_and_nothing_else(tokenizers):
    tokenizer = tokenizers["chatml"]
    trace = Trace("t", [Step("user", "a"), Step("agent", "b"), Step("user", "c"), Step("agent", "d")])
    [row] = TraceRows(tokenizer).rows(trace)
    action = [token for token, flag in zip(row["completion_ids"], row["action"], strict=True) if flag]
    assert tokenizer.decode(action) == "b<|im_end|>d<|im_end|>"
    assert row["sdpo"] is None


def test_a_template_that_does_not_end_turns_takes_rollouts_but_no_recorded_traces():
    tokenizer = chats.make("chatml")
    tokenizer.chat_template = (
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + message.content -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"
    )
    HintRows(tokenizer)
    with pytest.raises(UsageError) as caught:
        TraceRows(tokenizer)
    assert str(caught.value) == (
        "this chat template does not mark where an assistant's turn ends, so nothing recorded can be learnt\n"
        "  fix: take a model whose chat template ends a turn with a token of its own"
    )


def test_a_call_may_end_with_another_token_than_an_answer():
    tokenizer = chats.make("llama3")
    end = "{{- '<|start_header_id|>' if message.tool_calls else '<|eot_id|>' -}}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- '<|eot_id|>' -}}", end)
    [row] = TraceRows(tokenizer).rows(Trace("t", [Step("user", "go"), good_step(0), failing_step(1)]))
    assert row["uid"] == "t::0001"
    assert student_text(tokenizer, row).endswith('{"path": "f1"}}<|start_header_id|>')
    check(row)


def test_copied_and_synthetic_turns_are_context(tokenizers):
    tokenizer = tokenizers["chatml"]
    steps = [
        Step("user", "a"),
        Step("agent", "b", copied=True),
        Step("user", "c"),
        Step("agent", "API error", synthetic=True),
        Step("user", "e"),
        Step("agent", "f"),
    ]
    [row] = TraceRows(tokenizer).rows(Trace("t", steps))
    action = [token for token, flag in zip(row["completion_ids"], row["action"], strict=True) if flag]
    assert tokenizer.decode(action) == "f<|im_end|>"


def test_where_thinking_is_taken_out_each_site_gets_the_text_the_agent_read_there(tokenizers):
    tokenizer = tokenizers["qwen3"]
    rows = list(TraceRows(tokenizer).rows(long_trace(reasoning="let me think")))
    assert [row["uid"] for row in rows] == ["long::0005", "long::0010"]
    for row in rows:
        check(row)
        # thinking of this request stands there, that of earlier ones does not
        text = student_text(tokenizer, row)
        assert text.count("let me think") == 1
        assert text.endswith("</tool_call><|im_end|>")
        assert row["sdpo"]["student"][-1] == len(row["prompt_ids"] + row["completion_ids"]) - 1


def test_thinking_before_the_hint_stays_where_the_hint_joins_a_tools_result(tokenizers):
    tokenizer = tokenizers["qwen3"]
    steps = [
        Step("user", "go"),
        good_step(0, reasoning="first thought"),
        failing_step(1, reasoning="second thought"),
        Step("agent", "done", "third thought"),
    ]
    [row] = TraceRows(tokenizer).rows(Trace("t", steps))
    teacher = tokenizer.decode(row["sdpo"]["teacher_ids"])
    assert "first thought" in teacher
    assert "<tool_response>\nfine\n\nHint: calling read" in teacher


@pytest.mark.parametrize("at", ["prompt-end", "system"])
def test_in_the_prompt_of_a_trace_the_hint_is_found_where_the_template_moves_the_system_message(tokenizers, at):
    tokenizer = tokenizers["mistral"]
    steps = [Step("system", "Be brief."), Step("user", "go"), Step("agent", "ok"), Step("user", "on"), failing_step(0)]
    [row] = TraceRows(tokenizer, at=at).rows(Trace("t", steps))
    assert row["uid"] == "t::0001"
    text = tokenizer.decode(row["sdpo"]["teacher_ids"])
    hint = text[text.index("Hint: ") : text.index("Do what avoids this.") + len("Do what avoids this.")]
    ends, moved = ("\n\n" + hint, "") if at == "prompt-end" else ("", "\n\n" + hint)
    assert text.startswith(f"<s>[INST]go{ends}[/INST]ok</s>[INST]Be brief.{moved}\n\non[/INST][TOOL_CALLS]")
    check(row)


def test_span_rest_is_counted_out_where_the_template_changes_earlier_turns(tokenizers):
    rows = TraceRows(tokenizers["qwen3"], span="rest")
    assert list(rows.rows(long_trace(reasoning="hm"))) == []
    reason = "site: the chat template does not keep earlier turns as they were, so span: rest has no rest here"
    assert dict(rows.skipped) == {reason: 2}


def test_a_trace_that_the_template_refuses_is_counted_with_its_reason(tokenizers):
    rows = TraceRows(tokenizers["gemma"])
    assert list(rows.rows(long_trace())) == []
    assert dict(rows.skipped) == {
        "trace: the chat template refuses it: Conversation roles must alternate user/assistant/user/assistant/...": 1
    }
    [row] = rows.rows(long_trace(tools=False))
    assert row["sdpo"] is None


def test_a_trace_without_an_assistant_turn_is_counted_and_refused_when_asked_for(tokenizers):
    rows = TraceRows(tokenizers["chatml"])
    trace = Trace("t", [Step("user", "hello")], source="t.jsonl")
    assert list(rows.rows(trace)) == []
    assert dict(rows.skipped) == {"trace: there is no assistant turn in it": 1}
    with pytest.raises(UsageError) as caught:
        rows.tokenise(trace)
    assert str(caught.value) == "t.jsonl: there is no assistant turn in it\n  fix: leave it out: nothing is learnt"


def test_a_failing_turn_with_nothing_before_it_is_counted(tokenizers):
    rows = TraceRows(tokenizers["chatml"])
    [row] = rows.rows(Trace("t", [failing_step(0), failing_step(1)]))
    assert row["sdpo"]["site"] == [1]
    assert dict(rows.skipped) == {"site: nothing stands before its turn": 1}


def test_sites_that_are_only_recorded_and_hints_with_nothing_to_say_are_counted(tokenizers):
    refused = Step(
        "agent",
        "w",
        None,
        (ToolCall("c", "Write", {}),),
        (Observation("c", "The user doesn't want to proceed with this tool use.", is_error=True),),
    )
    rows = TraceRows(tokenizers["chatml"], book=HintBook({}))
    [row] = rows.rows(Trace("t", [Step("user", "a"), refused, failing_step(1)]))
    assert row["sdpo"] is None
    assert dict(rows.skipped) == {
        "site of kind rejection: recorded, not hinted": 1,
        "site of kind runtime_error: no hint has anything to say": 1,
    }


def test_rows_for_reads_files_and_says_what_was_left_out(tmp_path, tokenizers):
    folder, file = tmp_path / "model", tmp_path / "chat.jsonl"
    tokenizers["chatml"].save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    call = '{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}'
    file.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": ['
        + call
        + ']}, {"role": "tool", "tool_call_id": "c", "content": "Error: no such key"}, '
        '{"role": "assistant", "content": "b"}]}\n{"messages": [{"role": "user", "content": "only"}]}\n'
    )
    left_out = Counter()
    [row] = rows_for([file], tokenizer_folder=folder, format="openai-chat", skipped=left_out)
    assert (row["sdpo"]["kind"], row["sdpo"]["site"]) == ("runtime_error", [0])
    assert dict(left_out) == {"trace: there is no assistant turn in it": 1}


def test_rows_for_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(UsageError) as caught:
        next(rows_for([tmp_path], tokenizer_folder=tmp_path / "none"))
    assert str(caught.value) == (
        f"{tmp_path / 'none'}: no such model folder\n  fix: a model's folder, with its tokenizer and chat template"
    )


def test_making_rows_imports_no_torch():
    program = (
        "import sys, composer_core.traces.recorded, composer_core.traces.collate; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
