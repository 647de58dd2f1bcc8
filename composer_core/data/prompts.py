"""Prompts: rows with a `prompt` (chat messages or text) and every other column, from a file, a dataset or built in.

A row's columns are what rewards and channels see of it, so none is dropped or renamed on the quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from composer_core.data.jsonl import Located, check_json, read_jsonl
from composer_core.errors import MissingError, UsageError
from composer_core.spec.model import PromptsSpec

Message = dict[str, Any]

RESERVED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""What a reward is called with besides the columns; a column of that name would collide with it."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def load_prompts(spec: PromptsSpec, *, columns_needed: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """All prompts of a spec, in order.

    Each row holds `prompt`, a list of chat messages (`chat: true`) or a text, and all its other columns; a prompt
    taken from a column of another name also stays there. Where only some rows have a column, the others get None.

    Args:
        spec: the section data.prompts, its paths absolute.
        columns_needed: column -> who needs it ("reward 'exact-match'"); a row may hold null there, but must have it.

    Raises:
        UsageError: a row or a file is wrong, with its place.
        MissingError: the Hugging Face dataset cannot be reached.
    """
    located = list(islice(_rows(spec), spec.limit))
    if not located:
        raise UsageError("no prompts: there is no row in it", at=_source(spec), fix="give at least one row")
    column = spec.column or _default_column(*located[0])
    make = _text_prompt if not spec.chat else _chat_prompt(spec.system)
    columns: dict[str, None] = dict.fromkeys(name for _, row in located for name in row)
    rows = []
    for place, row in located:
        _check_columns(row, place, column=column, needed=columns_needed or {})
        rows.append(dict.fromkeys(columns) | row | {"prompt": make(row[column], f"{place}: {column}")})
    return rows


# -- where rows come from ----------------------------------------------------------------------------------------------


def _rows(spec: PromptsSpec) -> Iterator[Located]:
    if spec.path is not None:
        return read_jsonl(Path(spec.path).expanduser())
    if spec.dataset is not None:
        return _dataset_rows(spec.dataset, spec.split)
    return (("digits", {"prompt": f"n{i % 10}", "target": str(i % 10)}) for i in range(64))


def _source(spec: PromptsSpec) -> str:
    return spec.path or spec.dataset or f"builtin {spec.builtin}"


def _dataset_rows(name: str, split: str) -> Iterator[Located]:
    for index, row in enumerate(_dataset(name, split)):
        place = f"{name}, row {index + 1} of {split}"
        if not isinstance(row, dict):
            raise UsageError(f"expected columns, this is {type(row).__name__}", at=place)
        check_json(row, place)
        yield place, row


def _dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingError(
            f"a Hugging Face dataset needs the package datasets: {error}", fix="pip install 'composer-core[hf]'"
        ) from error
    folder = Path(name).expanduser()
    try:
        if not _written_by_save_to_disk(folder):
            return datasets.load_dataset(name, split=split)
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets lets through what its readers, pyarrow and the network raise
        raise _dataset_error(name, split, error) from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise UsageError(f"no split {split!r} in this dataset", at=name, fix=f"split: one of {', '.join(saved)}")
    return saved[split]


def _written_by_save_to_disk(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _dataset_error(name: str, split: str, error: Exception) -> UsageError | MissingError:
    from huggingface_hub.errors import OfflineModeIsEnabled

    first_line = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, ConnectionError | TimeoutError | OfflineModeIsEnabled):
        return MissingError(
            f"this dataset is not on this machine and the Hugging Face Hub is not reachable: {first_line}",
            at=name,
            fix="check data.prompts.dataset, or use `path` with a JSONL file",
        )
    return UsageError(f"split {split!r} of this dataset does not load: {type(error).__name__}: {first_line}", at=name)


# -- from a column to a prompt -----------------------------------------------------------------------------------------


def _default_column(place: str, row: Mapping[str, Any]) -> str:
    for name in ("messages", "prompt"):
        if name in row:
            return name
    raise UsageError(
        f"no column `messages` or `prompt`; there are: {', '.join(row) or 'none'}",
        at=place,
        fix="name the one that holds the prompt: data.prompts.column",
    )


def _check_columns(row: Mapping[str, Any], place: str, *, column: str, needed: Mapping[str, str]) -> None:
    present = ", ".join(row) or "none"
    if column not in row:
        raise UsageError(f"no column {column!r}, which holds the prompt; there are: {present}", at=place)
    for name, who in needed.items():
        if name not in row:
            raise UsageError(f"no column {name!r}, which {who} needs; there are: {present}", at=place)
    if column != "prompt" and "prompt" in row:
        raise UsageError(
            f"two columns claim to be the prompt: {column!r}, which is used, and 'prompt', which it would replace",
            at=place,
            fix="rename or drop one of them, or say `column: prompt`",
        )
    clash = sorted(RESERVED.intersection(row))
    if clash:
        raise UsageError(f"a column cannot be called {clash[0]!r}: rewards get something else by that name", at=place)


def _text_prompt(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise UsageError(
            f"with chat: false a prompt is text, this is {_kind(value)}", at=place, fix="leave data.prompts.chat out"
        )
    if not value.strip():
        raise UsageError("the prompt is empty", at=place)
    return value


def _chat_prompt(system: str | None) -> Callable[[Any, str], list[Message]]:
    def make(value: Any, place: str) -> list[Message]:
        messages = _messages(value, place)
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise UsageError(
                "this prompt has a system message already",
                at=place,
                fix="leave data.prompts.system out, or drop it here",
            )
        return [{"role": "system", "content": system}, *messages]

    return make


def _messages(value: Any, place: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": _text_prompt(value, place)}]
    if not isinstance(value, list):
        raise UsageError(f"a prompt is text or a list of chat messages, this is {_kind(value)}", at=place)
    if not value:
        raise UsageError("the prompt is empty", at=place)
    messages = [_message(message, f"{place}[{index}]") for index, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise UsageError(
            "these messages end with the assistant's turn: there is nothing left to answer",
            at=place,
            fix="drop the last message, or move it to a column of its own",
        )
    return messages


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f"a chat message is an object with role and content, this is {_kind(message)}", at=place)
    role = message.get("role")
    if role not in _ROLES:
        raise UsageError(f"no role {role!r}", at=place, fix=f"one of {', '.join(_ROLES)}")
    content = message.get("content")
    only_calls_tools = content is None and role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not only_calls_tools:
        raise UsageError(f"the content of a message must be text, this is {_kind(content)}", at=place)
    # A dataset gives every message every key that any message has; a null key is one it does not have.
    return {key: item for key, item in message.items() if item is not None or key == "content"}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
