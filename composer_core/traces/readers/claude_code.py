"""Claude Code session files: JSON lines that form a tree, read into linear traces without holding their bodies.

One pass sorts the records into chains: the session itself, a further chain from each compaction (the model then saw
the summary, not what came before) and from each prompt that goes back to an earlier point, and one per sub-agent.
Records of one `message.id` are one turn, results go to the turn that called. `claude_steps.py` builds the bodies.

Left out: records that are no conversation (progress, snapshots, titles; the messages of sub-agents inside progress
records too). Parents are looked up among the last 65,536 records at most, so that memory does not grow with a
file; a prompt that goes back further continues its chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_str
from composer_core.traces.index import LazySteps
from composer_core.traces.model import Origin, Trace
from composer_core.traces.readers.base import lines, outline
from composer_core.traces.readers.claude_chains import Block, Chain, Parts, Recent, parts, runs
from composer_core.traces.readers.claude_steps import build_step, user_text
from composer_core.traces.stats import Tally

HOUSEKEEPING = ("agent-acompact", "agent-aprompt_suggestion")
"""Files of sub-agents that do no work on the task: they summarise, or guess the next prompt."""
_NO_TURN = frozenset(
    {
        "summary", "system", "progress", "file-history-snapshot", "queue-operation", "attachment",
        "ai-title", "custom-title", "tag", "last-prompt", "agent-name", "agent-setting", "agent-color",
        "mode", "permission-mode", "pr-link", "worktree-state", "content-replacement",
    }
)  # fmt: skip
"""Types of record that hold no turn of the conversation."""
_STARTS_AGENT = ("Task", "Agent")
_Start = tuple[str, int | None, str]
"""Trace, step and call that started a sub-agent."""


class ClaudeCodeReader:
    """`~/.claude/projects/<folder>/<session>.jsonl`, and the sub-agents' files beside it. Versions 1.0 to 2.1."""

    name: ClassVar[str] = "claude-code"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """Records that are linked by uuids, or belong to a session; what stands behind a long message is not seen."""
        return any(
            ("parentUuid" in keys and ("uuid" in keys or "isSidechain" in keys))
            or (keys.get("type") in ("summary", "queue-operation") and ("leafUuid" in keys or "sessionId" in keys))
            or (keys.get("type") == "file-history-snapshot" and "messageId" in keys)
            for keys in outline(head)
        )

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """The session's chains in the order in which they begin."""
        indexer = _Indexer(path, tally)
        indexer.run()
        for chain in indexer.chains:
            if len(chain.index):
                yield indexer.trace(chain)


class _Indexer:
    """Goes through a file once: counts, and sorts records into chains."""

    def __init__(self, path: Path, tally: Tally) -> None:
        self.path, self.tally, self.stem = path, tally, path.stem
        self.main = Chain(self.stem)
        self.chains = [self.main]
        self._session = self._version = ""
        self._agents: dict[str, Chain] = {}
        self._agent_calls: dict[str, _Start] = {}
        """Sub-agent's id -> what started it."""
        self._prompts: dict[int, _Start] = {}
        """Hash of a sub-agent's prompt -> what started it."""
        self._recent = Recent()
        # hashes in arrays, not strings in sets: 8 bytes a record, whatever the file's size
        self._turns, self._parents = array("q"), array("q")

    def run(self) -> None:
        """Read the file."""
        for number, offset, record in lines(self.path, self.tally):
            self._record(number, offset, record)
        self.tally.assistant_turns = sum(1 for _ in runs(self._turns))
        self.tally.branches = sum(length > 1 for length in runs(self._parents))
        filled = [chain for chain in self.chains if len(chain.index)]
        if len(filled) == 1:  # a sub-agent's own file holds one chain, which is called like the file
            filled[0].trace_id = self.stem

    def trace(self, chain: Chain) -> Trace:
        """A chain that is complete."""
        extra: dict[str, Any] = {"session": self._session, "version": self._version}
        if chain.agent:
            extra["agent_id"] = chain.agent
        if self._agent_calls and not chain.sidechain:
            extra["agent_calls"] = self._agent_calls
        if self.path.name.startswith(HOUSEKEEPING):
            extra["housekeeping"] = True
        return Trace(
            id=chain.trace_id,
            steps=LazySteps(self.path, chain.index, build_step, copied=chain.copied),
            format=ClaudeCodeReader.name,
            source=str(self.path),
            origin=chain.origin,
            extra=extra,
        )

    def _record(self, number: int, offset: int, record: dict[str, Any]) -> None:
        tally = self.tally
        tally.records += 1
        kind, parent = as_str(record.get("type")), record.get("parentUuid")
        if record.get("isSidechain") is True:
            tally.sidechain_records += 1
        if isinstance(parent, str):
            self._parents.append(hash(parent))
        else:
            parent = ""
        if not self._session:
            self._session, self._version = as_str(record.get("sessionId")), as_str(record.get("version"))
        if kind in ("assistant", "user"):
            self._conversation(number, offset, record, kind, parent)
        elif kind in _NO_TURN:
            self._no_turn(record, kind, parent)
        else:
            tally.unknown(kind or "(no type)")

    def _no_turn(self, record: dict[str, Any], kind: str, parent: str) -> None:
        """Conversation records may hang below it, so it stands where its parent does."""
        self.tally.no_turn[kind] += 1
        uuid = as_str(record.get("uuid")) or as_str(record.get("messageId"))
        if record.get("subtype") == "compact_boundary" and record.get("isSidechain") is not True and self.main.index:
            before = self.main
            self.main = self._new(Origin(kind="continuation", trace=before.trace_id, step=before.last))
            place = (self.main, -1)
        else:
            place = self._recent.get(parent) or (self.main, self.main.last)
        if uuid:
            self._recent.put(uuid, place)

    def _conversation(self, number: int, offset: int, record: dict[str, Any], kind: str, parent: str) -> None:
        message = as_dict(record.get("message"))
        content = message.get("content")
        if kind == "assistant":  # one without content still was a turn
            turn = as_str(message.get("id")) or f"record {number}"
            self._turns.append(hash(turn))
        if not isinstance(content, str | list):
            self.tally.lose(number, f"{kind} record without a message")
            return
        found = parts(content)
        chain = self._chain(record, kind, parent, found, content)
        if kind == "assistant":
            self.tally.tool_calls += len(found.uses)
            step = chain.add_turn(turn, found.uses, offset)
            if found.uses:
                self._note_prompts(chain, step, found.uses)
        else:
            caller = chain.add_user(found, offset)
            if found.results:
                self._count_results(chain, caller, record, found.results)
        for name in found.odd:
            self.tally.unknown(f"block/{name}")
        uuid = record.get("uuid")
        if isinstance(uuid, str):
            self._recent.put(uuid, (chain, chain.last))

    def _count_results(
        self, chain: Chain, caller: int | None, record: dict[str, Any], results: Sequence[Block]
    ) -> None:
        self.tally.tool_results += len(results)
        for block in results:
            if block.get("is_error") is True:
                self.tally.error()
        agent = as_dict(record.get("toolUseResult")).get("agentId")
        if isinstance(agent, str):
            self._agent_calls[agent] = (chain.trace_id, caller, as_str(results[0].get("tool_use_id")))

    def _note_prompts(self, chain: Chain, step: int, uses: Sequence[Block]) -> None:
        for block in uses:
            if block.get("name") in _STARTS_AGENT:
                prompt = as_dict(block.get("input")).get("prompt")
                if isinstance(prompt, str):
                    self._prompts[hash(prompt)] = (chain.trace_id, step, as_str(block.get("id")))

    # -- chains ----------------------------------------------------------------------------------------------------

    def _chain(self, record: dict[str, Any], kind: str, parent: str, found: Parts, content: Any) -> Chain:
        place = self._recent.get(parent)
        if record.get("isSidechain") is True:
            return self._sidechain(record, place, content)
        if place is None or place[0].sidechain:
            return self.main
        chain, step = place
        if step == chain.last:  # its end, whether or not another process wrote in between
            self.main = chain
        elif kind == "user" and not found.results and record.get("isMeta") is not True:
            # something a person wrote, behind a point from which the session had already gone on
            self.main = chain.branch(step + 1, self._next_id())
            self.chains.append(self.main)
        return self.main

    def _sidechain(self, record: dict[str, Any], place: tuple[Chain, int] | None, content: Any) -> Chain:
        agent = as_str(record.get("agentId"))
        if agent:
            if agent not in self._agents:
                origin = Origin("subagent", self._session)
                self._agents[agent] = self._new(origin, agent=agent)
            return self._agents[agent]
        if place is not None and place[0].sidechain:
            return place[0]
        prompt = user_text({"content": content})
        start = self._prompts.get(hash(prompt)) if isinstance(prompt, str) else None
        origin = Origin("subagent", *start) if start else Origin("subagent", self.stem)
        return self._new(origin, agent=f"sidechain-{1 + sum(chain.sidechain for chain in self.chains)}")

    def _new(self, origin: Origin, *, agent: str = "") -> Chain:
        trace = f"{self.stem}/{agent}" if agent else self._next_id()
        self.chains.append(Chain(trace, agent=agent, sidechain=bool(agent), origin=origin))
        return self.chains[-1]

    def _next_id(self) -> str:
        return f"{self.stem}#{1 + sum(not chain.sidechain for chain in self.chains)}"
