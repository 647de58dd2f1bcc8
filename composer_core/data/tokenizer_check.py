"""Looks at the tokenizer of a spec before a run: special tokens, the chat template, and what prompts become.

For `composer-run plan --data`; imports transformers, loads no weights and writes nothing. Findings are told, not
judged: what must not be is refused where a tokenizer or the data is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_core.errors import UsageError
from composer_core.hf.source import first_line, json_object, local_folder
from composer_core.spec.model import ModelSpec, RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES = 3
MEASURED = 2000
"""Prompts whose length is taken; of more, evenly spread ones."""
_SPECIAL = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class TokenizerReport:
    """What was found; empty parts could not be looked at, and `unknown` says why where that is all of them."""

    unknown: str = ""
    kind: str = ""
    vocabulary: int = 0
    special: Mapping[str, str] = field(default_factory=dict)
    """bos, eos, pad, unk -> `<|end|> (1)`, or `none`."""
    ends: tuple[str, ...] = ()
    """The tokens that end a completion: the tokenizer's and those of generation_config.json."""
    pad_is_end: bool = False
    template: str = ""
    """Whether longer chats begin with the text of shorter ones."""
    prefix: tuple[str, ...] = ()
    """One sentence per sample whose prompt's ids do not begin the ids of prompt and answer."""
    samples: int = 0
    lengths: Mapping[str, float] = field(default_factory=dict)
    """Tokens of the prompts: min, median, max, and how many were measured."""
    too_long: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `plan --json`."""
        return {"unknown": self.unknown} if self.unknown else asdict(self)

    def lines(self) -> dict[str, str]:
        """What it is -> what was found, for people."""
        if self.unknown:
            return {"tokenizer": self.unknown}
        shown = {
            "tokenizer": f"{self.kind}, {self.vocabulary:,} tokens",
            "special tokens": ", ".join(f"{name} {token}" for name, token in self.special.items()),
            "a completion ends at": ", ".join(self.ends),
        }
        if self.pad_is_end:
            shown["padding"] = "the end token pads: only positions tell padding from an end, never ids"
        if self.template:
            shown["chat template"] = self.template
        if self.samples:
            good = f"the prompt's ids begin those of prompt and answer in {self.samples} samples"
            shown["prompt and answer"] = "; ".join(self.prefix) or good
        if self.lengths:
            low, middle, high = (f"{self.lengths[name]:g}" for name in ("min", "median", "max"))
            shown["prompt tokens"] = f"min {low}, median {middle}, max {high} ({self.lengths['measured']:g} prompts)"
        return {**shown, **({"length": self.too_long} if self.too_long else {})}


def check_tokenizer(spec: RunSpec, rows: Sequence[Mapping[str, Any]]) -> TokenizerReport:
    """Look at the tokenizer of a spec, with its prompts.

    Args:
        spec: its environment filled in.
        rows: what `load_prompts` gave; empty where they are read later.

    Raises:
        UsageError: the tokenizer does not load.
        MissingError: transformers is not installed.
    """
    folder = None if spec.model.builtin is not None else local_folder(spec.model)
    tokenizer = _load(spec.model, folder)
    if tokenizer is None:
        return TokenizerReport(unknown=f"{spec.model.path} is not on this machine: looked at when the run starts")
    chat = spec.data.prompts is None or spec.data.prompts.chat  # recorded sessions and pairs are chats
    ends = _ends(tokenizer, folder)
    samples = rows[:: max(len(rows) // SAMPLES, 1)][:SAMPLES]
    lengths = _lengths(tokenizer, rows)
    return TokenizerReport(
        kind=type(tokenizer).__name__,
        vocabulary=len(tokenizer),
        special={name: _shown(tokenizer, getattr(tokenizer, f"{name}_token_id")) for name in _SPECIAL},
        ends=tuple(_shown(tokenizer, token) for token in ends),
        pad_is_end=tokenizer.pad_token_id in ends,
        template=_template(tokenizer) if chat else "",
        prefix=tuple(found for row in samples if (found := _not_a_prefix(tokenizer, row))),
        samples=len(samples),
        lengths=lengths,
        too_long=_too_long(folder, lengths, spec.train.max_completion_tokens),
    )


def _load(model: ModelSpec, folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None for a model that is not on this machine."""
    from composer_core.hf.models import load_tokenizer, require_transformers

    require_transformers()
    if model.builtin is not None:
        from composer_core.hf.tiny import tiny_tokenizer

        return tiny_tokenizer()
    if folder is None:
        return _from_cache(model)
    if model.gguf_file is None:
        return load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    from composer_core.hf.gguf import gguf_tokenizer

    try:
        return gguf_tokenizer(folder, model.gguf_file)
    except Exception as error:  # transformers' reader raises whatever its parsing hits
        problem = f"the tokenizer in this GGUF file does not load: {type(error).__name__}: {first_line(error)}"
        raise UsageError(problem, at=str(folder / model.gguf_file)) from error


def _from_cache(model: ModelSpec) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.path, revision=model.revision, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError):  # not in the cache, or only a part of it: the worker downloads it, and judges then
        return None
    return found


def _ends(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> list[int]:
    ends = [tokenizer.eos_token_id]
    file = folder / "generation_config.json" if folder is not None else None
    if file is not None and file.is_file():
        more = json_object(file).get("eos_token_id", [])
        ends += more if isinstance(more, list) else [more]
    return [token for token in dict.fromkeys(ends) if isinstance(token, int)]


def _shown(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    return "none" if token is None else f"{tokenizer.convert_ids_to_tokens(token)} ({token})"


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Whether the chat template renders what has been said the same when a conversation goes on.

    A hint before a turn, and every row made of a part of a recorded session, relies on it.
    """
    plain = [_turn("qzfirstzq", ""), _turn("qzsecondzq", ""), _turn("qzthirdzq", "")]
    thinking = [_turn(text, "qzthinkzq") for text in ("qzfirstzq", "qzsecondzq", "qzthirdzq")]
    try:
        if not _prefix_stable(tokenizer, plain):
            return "earlier turns are rendered differently once a chat goes on"
        if not _prefix_stable(tokenizer, thinking):
            return "stable, but thinking in earlier turns is left out once a chat goes on"
    except Exception as error:  # a template is a program that came with a model: it may raise anything
        return f"it does not render a plain conversation: {first_line(error)}"
    return "a chat's text begins the text of every chat that goes on from it"


def _turn(text: str, thinking: str) -> list[dict[str, str]]:
    answer = f"<think>\n{thinking}\n</think>\n\n{text}" if thinking else text
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _prefix_stable(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Sequence[Mapping[str, str]]]) -> bool:
    chats = [[message for turn in turns[: count + 1] for message in turn] for count in range(len(turns))]
    texts = [_text(tokenizer, chat) for chat in chats]
    return all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = _text(tokenizer, prompt, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Mapping[str, Any]], **options: bool) -> str:
    return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **options))  # type: ignore[arg-type]


def _not_a_prefix(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> str:
    """What is wrong when the ids of a prompt do not begin those of prompt and answer; "" when they do."""
    prompt, answer = row["prompt"], str(row.get("answer") or "1")
    if isinstance(prompt, str):
        both = list(tokenizer(prompt + answer)["input_ids"])
    else:
        chat = [*prompt, {"role": "assistant", "content": answer}]
        both = list(
            tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        )
    ids = _prompt_ids(tokenizer, prompt)
    if both[: len(ids)] == ids:
        return ""
    at = next((i for i, pair in enumerate(zip(ids, both, strict=False)) if pair[0] != pair[1]), len(both))
    apart = f"{tokenizer.decode(ids[at : at + 4])!r} became {tokenizer.decode(both[at : at + 4])!r}"
    return f"with an answer the prompt's own tokens change from token {at} of {len(ids)} on: {apart}"


def _lengths(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    measured = rows[:: -(-len(rows) // MEASURED)] if rows else []
    if not measured:
        return {}
    lengths = [len(_prompt_ids(tokenizer, row["prompt"])) for row in measured]
    middle = statistics.median(lengths)
    return {"min": min(lengths), "median": middle, "max": max(lengths), "measured": len(measured), "of": len(rows)}


def _too_long(folder: Path | None, lengths: Mapping[str, float], completion: int) -> str:
    config = folder / "config.json" if folder is not None else None
    if config is None or not config.is_file() or not lengths:
        return ""
    whole = json_object(config)
    positions = whole.get("max_position_embeddings") or whole.get("text_config", {}).get("max_position_embeddings")
    longest = int(lengths["max"]) + completion
    if not isinstance(positions, int) or longest <= positions:
        return ""
    return f"the longest prompt and max_completion_tokens are {longest} tokens, the model has {positions} positions"
