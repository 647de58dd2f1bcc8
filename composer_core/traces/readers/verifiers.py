"""Rollouts of PrimeIntellect's verifiers: result lines (`prompt`, `completion`, `reward`) and traces of version 1.

A version-1 trace is a graph of messages with a parent each: every path from a root to a leaf is a trace, the first
one whole and the others as branches that share its beginning. Nodes carry token ids with a mask of those the model
sampled. The formats have no flag for errors; results that begin with "Error" are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from composer_core.plugins.settings import Settings
from composer_core.traces.decode import as_dict, as_list
from composer_core.traces.messages import from_messages
from composer_core.traces.model import Origin, Step, Trace
from composer_core.traces.readers.base import objects, outline
from composer_core.traces.readers.openai_chat import count, read_messages, tools
from composer_core.traces.stats import Tally

_ROW_FACTS = ("task", "answer", "info", "metrics")


class VerifiersReader:
    """`results.jsonl` of an evaluation, and version-1 traces as JSON lines or one document."""

    name: ClassVar[str] = "verifiers"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def recognises(self, path: Path, head: bytes) -> bool:
        """Prompt, completion and reward side by side, or a graph of nodes with a task."""
        return any(
            {"prompt", "completion", "reward"} <= set(keys) or {"nodes", "task"} <= set(keys) for keys in outline(head)
        )

    def read(self, path: Path, tally: Tally) -> Iterator[Trace]:
        """One trace per rollout, and one per further branch."""
        for number, record in objects(path, tally):
            tally.records += 1
            if isinstance(record.get("nodes"), list):
                yield from self._graph(path, number, record, tally)
                continue
            steps = _rollout(record, number, tally)
            if steps:
                reward = record.get("reward")
                extra: dict[str, Any] = {key: record[key] for key in _ROW_FACTS if key in record}
                yield Trace(
                    id=f"{path.stem}#{number}",
                    steps=steps,
                    format=self.name,
                    source=str(path),
                    tools=tools(record.get("tool_defs") or record.get("oai_tools") or record.get("tools")),
                    reward=float(reward) if isinstance(reward, int | float) else None,
                    extra=extra,
                )

    def _graph(self, path: Path, number: int, record: dict[str, Any], tally: Tally) -> Iterator[Trace]:
        nodes = [as_dict(node) for node in record["nodes"]]
        paths = _paths(nodes, number, tally)
        tally.branches += len({node for one in paths for node in one if _children(nodes, node) > 1})
        seen: set[int] = set()
        for at, one in enumerate(paths):
            steps, shared = _node_steps(nodes, one, seen, number, tally)
            seen.update(one)
            if not steps:
                continue
            name = f"{path.stem}#{number}"
            yield Trace(
                id=name if at == 0 else f"{name}.{at + 1}",
                steps=steps,
                format=self.name,
                source=str(path),
                tools=tools(record.get("tools")),
                origin=Origin("branch", name, shared - 1 if shared else None) if at else None,
                reward=_reward(record),
                extra={"task": record.get("task"), "stop_condition": record.get("stop_condition")},
            )


def _rollout(record: dict[str, Any], number: int, tally: Tally) -> list[Step]:
    """Prompt and completion of a result line; what stands in the prompt is context."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        tally.lose(number, "rollout without prompt and completion")
        return []
    given = [replace(step, copied=step.source == "agent") for step in read_messages(prompt, number, Tally())]
    return given + read_messages(completion, number, tally)


def _reward(record: dict[str, Any]) -> float | None:
    """Weighted sum of the rewards that were given."""
    given = [as_dict(reward) for reward in as_dict(record.get("rewards")).values() if isinstance(reward, dict)]
    scores = [(reward.get("score"), reward.get("weight", 1.0)) for reward in given]
    values = [float(s) * float(w) for s, w in scores if isinstance(s, int | float) and isinstance(w, int | float)]
    return sum(values) if values else None


def _children(nodes: list[dict[str, Any]], node: int) -> int:
    return sum(other.get("parent") == node for other in nodes)


def _paths(nodes: list[dict[str, Any]], number: int, tally: Tally) -> list[list[int]]:
    """Paths from a root to each leaf, as node numbers; a parent must stand before its child."""
    parents = [node.get("parent") for node in nodes]
    inner = {parent for parent in parents if isinstance(parent, int)}
    paths = []
    for leaf in (at for at in range(len(nodes)) if at not in inner):
        path, at = [leaf], parents[leaf]
        while isinstance(at, int) and 0 <= at < path[-1]:
            path.append(at)
            at = parents[at]
        if at is not None:
            tally.lose(number, "node with a parent that is not before it", f"node {path[-1]}")
        paths.append(path[::-1])
    return paths


def _node_steps(
    nodes: list[dict[str, Any]], path: list[int], seen: set[int], number: int, tally: Tally
) -> tuple[list[Step], int]:
    """Steps of one path, and how many of them an earlier path has."""
    steps: list[Step] = []
    for node in path:
        try:
            made = from_messages([as_dict(nodes[node].get("message"))])
        except ValueError as error:
            tally.lose(number, "node without a message that can be read", f"node {node}: {error}")
            continue
        given = made[0].source == "agent" and nodes[node].get("sampled") is False
        step = replace(made[0], copied=node in seen or given, **_tokens(nodes[node], number, tally))
        if node not in seen:
            count([step], tally)
        if steps and step.observations and steps[-1].source == "agent":
            steps[-1] = replace(steps[-1], observations=(*steps[-1].observations, *step.observations))
        else:
            steps.append(step)
    shared = sum(step.copied for step in steps) if seen else 0
    return steps, shared


def _tokens(node: dict[str, Any], number: int, tally: Tally) -> dict[str, Any]:
    """Ids the model sampled, with their log-probs, where both fit the mask."""
    ids, mask, logprobs = (as_list(node.get(key)) for key in ("token_ids", "mask", "logprobs"))
    if not ids or not mask:
        return {}
    sampled = [token for token, chosen in zip(ids, mask, strict=False) if chosen is True]
    whole = len(ids) == len(mask) and all(isinstance(token, int) for token in ids)
    if not whole or (logprobs and len(logprobs) != len(sampled)):
        tally.lose(number, "token ids and log-probs differ in number", f"{len(sampled)} and {len(logprobs)}")
        return {}
    if not sampled:
        return {}
    numbers = all(isinstance(value, int | float) for value in logprobs)
    return {
        "token_ids": tuple(sampled),
        "logprobs": tuple(float(value) for value in logprobs) if logprobs and numbers else None,
    }
