"""Tool calls as Qwen and Hermes models write them, for backends that run tools themselves.

    <think>what the policy thought</think>
    its answer
    <tool_call>
    {"name": "look", "arguments": {"key": "a"}}
    </tool_call>

`read_turn` makes a chat message of a turn's tokens, and `result_ids` the tokens of what tools said, without touching
those of the turn. A turn that is not in this form is plain text; what was wrong with its call is found out in
`conversation_sites.py`. `require_tool_format` says whether a model's chat template writes calls so. Another form of
calls would be a module like this one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from composer_core.errors import RunFailed, UsageError
from composer_core.traces.chat_template import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_FIX = "a model that does, such as Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B, or leave rollout out"


def read_turn(ids: Sequence[int], tokenizer: Any) -> Message:
    """A turn of the policy as a chat message: `content`, and `reasoning_content` and `tool_calls` where it has them.

    Args:
        ids: the turn's tokens, the one that ends it included; it may be cut off.
        tokenizer: what made them.
    """
    text = tokenizer.decode(ids).removesuffix(tokenizer.eos_token)
    reasoning, answer = _split_reasoning(text)
    content, called, body = answer.partition(OPEN)
    calls = _read_calls(called + body)
    if calls is None:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    message: Message = {"role": "assistant", "content": content.removesuffix("\n") if calls else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _split_reasoning(text: str) -> tuple[str, str]:
    if not text.startswith(_THINK) or _THOUGHT not in text:
        return "", text
    thought, _, answer = text.removeprefix(_THINK).partition(_THOUGHT)
    return (thought.removeprefix("\n").removesuffix("\n") if thought.strip() else ""), answer.lstrip()


def _read_calls(text: str) -> list[dict[str, Any]] | None:
    """Calls that follow each other to the end of the text; none of an empty one, None where it is something else."""
    calls = []
    while text:
        body, closed, rest = text.removeprefix(OPEN).partition(CLOSE)
        call = _read_call(body) if text.startswith(OPEN) and closed else None
        if call is None:
            return None
        calls.append({"type": "function", "function": call})
        text = rest.lstrip()
    return calls


def _read_call(body: str) -> dict[str, Any] | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = {} if call.get("arguments") is None else call["arguments"]
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else None


def result_ids(results: Sequence[Message], tokenizer: Any, **options: Any) -> list[int]:
    """The tokens between the end of a turn that called tools and the policy's next one.

    They are what the chat template puts behind such a turn in a conversation of its own: so the tokens of the real one
    stay as they were sampled. Where that turn ends is found by rendering two results that differ: it is at the last
    end-of-turn token before they do. Rendering the turn without results would not tell: templates write a last turn in
    another way.

    Args:
        results: messages with role `tool`, a `name` and a `content`; at least one.
        tokenizer: its `eos_token` ends a turn.
        options: of the chat template.

    Raises:
        RunFailed: the template puts no such token there, or writes the turn in another way for these results.
    """
    name = results[0]["name"]

    def render(*messages: Message) -> list[int]:
        call = {"type": "function", "function": {"name": name, "arguments": {}}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        ids = tokenizer.apply_chat_template(
            [*turns, *messages], add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
        return list(ids)

    one, other = (render({"role": "tool", "name": name, "content": content}) for content in ("0", "1"))
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = next((i + 1 for i in reversed(range(common)) if one[i] == tokenizer.eos_token_id), 0)
    whole = render(*results)
    if not start or whole[:start] != one[:start]:
        raise RunFailed("this model's chat template does not let results of tools stand behind a turn as it was")
    return whole[start:]


# -- whether a model has this form -------------------------------------------------------------------------------------

_PROBE: dict[str, Any] = {"name": "qzlook", "arguments": {"qzkey": "qzvalue"}}
_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "qzlook",
        "description": "qzdescription",
        "parameters": {"type": "object", "properties": {"qzkey": {"type": "string", "description": "qz"}}},
    },
}
_RESULT: Message = {"role": "tool", "name": "qzlook", "content": "qzresult"}


def require_tool_format(tokenizer: Any, *, at: str) -> None:
    """Refuse a model whose chat template has another form of calls, or none.

    Args:
        tokenizer: with the chat template.
        at: what messages call the model.

    Raises:
        UsageError: with what it does not do.
    """
    problem = _format_problem(tokenizer)
    if problem:
        raise UsageError(f"this model's chat template {problem}", at=at, fix=_FIX)


def _format_problem(tokenizer: Any) -> str:
    call = {"type": "function", "function": dict(_PROBE)}
    chat: list[Message] = [
        {"role": "user", "content": "qzquestion"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        _RESULT,
    ]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        defined = tokenizer.apply_chat_template(chat[:1], tokenize=False, tools=[_SCHEMA])
        after = tokenizer.decode(result_ids([_RESULT], tokenizer))
    except Exception as error:  # a template is a program that came with a model: it may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"cannot render tool calls and their results: {reason}"
    turn = text.partition("qzquestion")[2].partition("qzresult")[0]
    written = turn[turn.find(OPEN) : turn.rfind(CLOSE) + len(CLOSE)] if OPEN in turn else ""
    read = _read_calls(written) or []
    if [dict(call["function"]) for call in read] != [_PROBE]:
        return f'does not write tool calls as {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'
    if "qzdescription" not in defined:
        return "does not show the policy which tools there are"
    return "" if "qzresult" in after else "does not show the policy what tools return"
