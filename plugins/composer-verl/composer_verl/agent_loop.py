"""verl's agent loop `composer`: one rollout, its turns asked of verl's servers.

What a rollout is stands in `conversation.py`, what the driver makes of it in `records.py`. An error does not end a
rollout as verl would have it, in the log of one process while training goes on with fewer rollouts: it travels to the
driver in the rollout's place, and is raised there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from composer_core.errors import ComposerError, RunFailed
from composer_verl.conversation import Conversation, Program, begin, call_tools, program_of, seed_of
from composer_verl.records import EXTRA, ROW, failed
from composer_verl.rows import unpacked

NAME = "composer"
"""What `actor_rollout_ref.rollout.agent.default_agent_loop` is set to."""

_SEEDED = frozenset({"composer_hf", "vllm"})
"""Servers that take a seed for each request; sglang refuses a parameter of that name."""
_log = logging.getLogger(__name__)


def register() -> None:
    """Let verl's workers in this process know the loop."""
    agent_loop.register(NAME)(ComposerAgentLoop)


class ComposerAgentLoop(AgentLoopBase):
    """One rollout of the spec that travels under `actor_rollout_ref.composer.plan`; verl makes one for each."""

    tokenizer: Any

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        """See `AgentLoopBase`; `sample` holds the data row as JSON (`records.ROW`) and its place in the run."""
        try:
            return await self._roll_out(sampling_params, sample)
        except ComposerError as error:
            return self._failed(error)
        except Exception as error:
            _log.exception("a rollout failed")
            return self._failed(RunFailed(f"a rollout failed: {type(error).__name__}: {error}"))

    async def _roll_out(self, sampling_params: Mapping[str, Any], sample: Mapping[str, Any]) -> AgentLoopOutput:
        program = program_of(unpacked(self.config.actor_rollout_ref.composer.plan))
        with program.environment() as environment:
            talk = begin(
                json.loads(sample[ROW]),
                environment,
                program,
                tokenizer=self.tokenizer,
                limits=(self.rollout_config.prompt_length, self.rollout_config.response_length),
                options=dict(self.apply_chat_template_kwargs),
            )
            turns = _Turns(self, program, sampling_params, sample)
            while calls := await turns.next(talk):
                began = time.perf_counter()
                results, wrong = await call_tools(calls, program.callable_in(environment))
                turns.calling += time.perf_counter() - began
                talk.calls, talk.failed_calls = talk.calls + len(calls), talk.failed_calls + wrong
                if not talk.hear(results):
                    break
            said = talk.record(program, environment)
        return AgentLoopOutput(
            prompt_ids=talk.prompt_ids,
            response_ids=talk.ids,
            response_mask=talk.action,
            response_logprobs=talk.logps if self.rollout_config.calculate_log_probs else None,
            num_turns=1 + len(talk.messages),
            metrics=AgentLoopMetrics(generate_sequences=turns.sampling, tool_calls=turns.calling),
            extra_fields={**turns.extra, EXTRA: said},
        )

    def _failed(self, error: ComposerError) -> AgentLoopOutput:
        """A rollout of one token that nobody trains on: the driver raises what it holds."""
        return AgentLoopOutput(
            prompt_ids=[self.tokenizer.eos_token_id],
            response_ids=[self.tokenizer.eos_token_id],
            response_mask=[0],
            response_logprobs=[0.0] if self.rollout_config.calculate_log_probs else None,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            extra_fields={EXTRA: failed(error)},
        )


class _Turns:
    """Asks verl's servers for one turn after the other, and keeps what they say beside the tokens."""

    def __init__(
        self, loop: ComposerAgentLoop, program: Program, params: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> None:
        self._loop, self._program, self._params, self._sample = loop, program, params, sample
        self._request = uuid4().hex  # one for all turns: they go to the server that has the rollout's cache
        self.extra: dict[str, Any] = {}
        self.sampling = self.calling = 0.0

    async def next(self, talk: Conversation) -> list[dict[str, Any]]:
        """The calls of the next turn that are to be carried out; none of a rollout's last one."""
        began = time.perf_counter()
        output = await self._loop.server_manager.generate(
            request_id=self._request,
            prompt_ids=talk.prompt_ids + talk.ids,
            sampling_params={**self._params, **self._seed(talk.turns), "max_tokens": talk.left},
        )
        self.sampling += time.perf_counter() - began
        self._keep(output.extra_fields)
        with_tools = self._program.tools is not None
        asked = self._loop.rollout_config.calculate_log_probs
        calls = talk.say(output.token_ids, output.log_probs if asked else None, with_tools=with_tools)
        return calls if talk.turns < self._program.max_turns else []

    def _seed(self, turn: int) -> dict[str, int]:
        if self._loop.rollout_config.name not in _SEEDED:
            return {}
        step, prompt, session = (int(self._sample[name]) for name in ("global_steps", "index", "session_id"))
        return {"seed": seed_of(self._program.seed, step=step, prompt=prompt, session=session, turn=turn)}

    def _keep(self, extra: Mapping[str, Any]) -> None:
        """The first turn's, but for the newest weights that any turn was sampled with."""
        newest = extra.get("max_global_steps")
        self.extra = self.extra or dict(extra)
        if newest is not None:
            self.extra["max_global_steps"] = newest
