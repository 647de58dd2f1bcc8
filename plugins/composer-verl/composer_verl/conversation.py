"""One rollout between the policy and its tools: which tokens it has, who wrote them, and what tools do.

A turn's tokens stay as they were sampled; what tools returned is put behind them by the chat template. A rollout is
over when a turn calls nothing, when `max_turns` are there, or when what tools returned does not fit any more: then it
is not shown. All as TRL does it, so a spec means the same on both. Nothing of verl here: `agent_loop.py` asks verl's
servers for the turns, `records.py` reads in the driver what `record` wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from composer_core.data.environments import environment_tools, state_of
from composer_core.data.tool_checks import Tool, tool_schemas
from composer_core.data.tools import RolloutTools, load_tools
from composer_core.errors import RunFailed, UsageError
from composer_core.plugins.registry import Registry
from composer_core.spec.plan import restore
from composer_core.traces.chat_template import Message
from composer_core.traces.conversation_sites import rollout_columns
from composer_core.traces.tool_format import read_turn, result_ids

Row = Mapping[str, Any]


@dataclass
class Program:
    """What a process needs for the rollouts of a run."""

    seed: int
    max_turns: int
    tools: RolloutTools | None
    schemas: list[dict[str, Any]]
    spare: list[Any] = field(default_factory=list)
    """Environments that no rollout uses now."""

    @contextmanager
    def environment(self) -> Iterator[Any]:
        """An environment for one rollout; None where the spec has none."""
        if self.tools is None or self.tools.environments is None:
            yield None
            return
        environment = self.spare.pop() if self.spare else self.tools.environments()
        try:
            yield environment
        finally:
            self.spare.append(environment)

    def callable_in(self, environment: Any) -> dict[str, Tool]:
        """The tools of a rollout with this environment, by name."""
        if self.tools is None:
            return {}
        own = () if environment is None else environment_tools(environment)
        return {tool.__name__: tool for tool in (*self.tools.functions, *own)}


@cache  # verl makes an agent loop for each rollout, and a process runs the user's files once
def program_of(plan: str) -> Program:
    """The program of a plan, the text of its plan.json.

    Raises:
        UsageError: the user's tools or environment are not as rollouts need them.
        MissingError: a plugin of the plan is not installed here in the same version.
    """
    spec, _ = restore(json.loads(plan), Registry.discover())
    if spec.rollout is None:
        return Program(spec.seed, 1, None, [])
    tools = load_tools(spec.rollout)
    return Program(spec.seed, spec.rollout.max_turns, tools, tool_schemas(tools.all))


def seed_of(seed: int, *, step: int, prompt: int, session: int, turn: int) -> int:
    """What a turn is sampled with, 63 bits: the same in a resumed run, another one for each turn of each rollout."""
    place = json.dumps([seed, step, prompt, session, turn])
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8]) >> 1


@dataclass
class Conversation:
    """A rollout as far as it is."""

    row: Row
    prompt: str | list[Message]
    """The row's, with what the environment said."""
    prompt_ids: list[int]
    room: int
    """Tokens that turns and results may have together."""
    tokenizer: Any = field(repr=False)
    options: Row = field(default_factory=dict)
    """Of the chat template."""
    ids: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    """1 for each token that the policy sampled."""
    logps: list[float] = field(default_factory=list)
    """The sampler's; 0 for what tools returned. Empty where it tells none."""
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    truncated: bool = False
    """Whether the last turn was cut off."""

    @property
    def left(self) -> int:
        """Tokens that the next turn may have."""
        return self.room - len(self.ids)

    def say(self, ids: Sequence[int], logps: Sequence[float] | None, *, with_tools: bool) -> list[dict[str, Any]]:
        """Take a turn of the policy; the calls in it.

        Raises:
            RunFailed: it has no token, or not as many log-probs.
        """
        if not ids or (logps is not None and len(logps) != len(ids)):
            told = "none" if logps is None else len(logps)
            raise RunFailed(f"the rollout server returned a turn with {len(ids)} tokens and log-probs of {told}")
        left, ids = self.left, list(ids)[: self.left]
        self.ids += ids
        self.action += [1] * len(ids)
        self.logps += list(logps or ())[: len(ids)]
        ends = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        self.truncated = len(ids) == left and ids[-1] not in ends
        self.turns += 1
        if with_tools:
            message = read_turn(ids, self.tokenizer)
        else:
            message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        self.messages.append(message)
        return list(message.get("tool_calls", ()))

    def hear(self, results: Sequence[Message]) -> bool:
        """Take what tools returned, or nothing of it where it does not fit; whether the policy goes on."""
        ids = result_ids(results, self.tokenizer, **self.options)
        if len(ids) > self.left:
            return False
        if self.logps:
            self.logps += [0.0] * len(ids)
        self.ids += ids
        self.action += [0] * len(ids)
        self.messages += results
        self.truncated = self.left == 0
        return self.left > 0

    def completion(self) -> str | list[Message]:
        """As rewards get it: the messages, or the text where the prompt is one."""
        return str(self.messages[-1]["content"]) if isinstance(self.prompt, str) else self.messages

    def record(self, program: Program, environment: Any) -> str:
        """What the driver must know of a finished rollout beside its tokens, JSON.

        Raises:
            RunFailed: the environment's state cannot travel.
        """
        columns = rollout_columns({**self.row, "prompt": self.prompt}, self.completion(), program.schemas)
        said: dict[str, Any] = {
            "columns": {name: value for name, value in columns.items() if self.row.get(name) != value},
            "completion": self.completion(),
            "truncated": self.truncated,
            "turns": self.turns,
            "calls": self.calls,
            "failed_calls": self.failed_calls,
        }
        if environment is not None:
            said["environment"] = state_of(environment)
        return json.dumps(said)


def begin(
    row: Row, environment: Any, program: Program, *, tokenizer: Any, limits: tuple[int, int], options: Row
) -> Conversation:
    """A rollout's beginning: its environment reset, its prompt as tokens.

    Args:
        row: of the data; its `prompt` is a text, taken as it is, or chat messages.
        environment: of this rollout, or None.
        program: of the run.
        tokenizer: with the chat template.
        limits: tokens that a prompt, and the rest of a rollout, may have.
        options: of the chat template.

    Raises:
        UsageError: the prompt is too long.
        RunFailed: the environment's `reset` failed.
    """
    prompt = row["prompt"]
    if environment is not None and (said := environment.reset(**row)) is not None:
        prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said}]
    ids = prompt_ids(prompt, program.schemas, tokenizer=tokenizer, options=options)
    longest, room = limits
    if len(ids) > longest:
        raise UsageError(
            f"a prompt has {len(ids)} tokens with its tools and what the environment said, and {longest} fit",
            at="data.prompts",
            fix="shorter prompts, or a higher data.max_tokens",
        )
    return Conversation(row, prompt, ids, room, tokenizer, options)


def prompt_ids(
    prompt: str | list[Message], schemas: Sequence[Mapping[str, Any]], *, tokenizer: Any, options: Row
) -> list[int]:
    """What the policy reads first: a text as it is, chat messages through the template, with the tools' definitions."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    ids = tokenizer.apply_chat_template(
        prompt,
        tools=list(schemas) or None,  # None, not []: some templates write a heading for an empty list
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return list(ids)


async def call_tools(calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Tool]) -> tuple[list[Message], int]:
    """What tools return, as messages, and how many calls failed; results of async tools come last.

    What a tool raises is a result too: `{"error": ...}`, for the policy to read. Plain functions run one after the
    other, never two at a time in one process; while async ones wait, other rollouts go on.
    """
    results: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any]] = []
    failed = 0
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            said = tools[name](**arguments)
            (waiting if inspect.iscoroutinefunction(tools[name]) else results).append((name, said))
        except Exception as error:
            failed += 1
            results.append((name, {"error": str(error)}))
    for (name, _), said in zip(
        waiting, await asyncio.gather(*(said for _, said in waiting), return_exceptions=True), strict=True
    ):
        failed += isinstance(said, Exception)
        results.append((name, {"error": str(said)} if isinstance(said, Exception) else said))
    return [{"role": "tool", "name": name, "content": str(said)} for name, said in results], failed
