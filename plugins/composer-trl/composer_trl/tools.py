"""A rollout's tools and environment as `GRPOTrainer` takes them, and what its chat template must do for them.

The user's functions are loaded and checked by the core (`data/tools.py`); what a tool's error means to a channel stands
there too (`traces/conversation_sites.py`). What the section `rollout:` means to TRL's numbers: `rollout.py`.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from composer_core.data.tools import load_tools
from composer_core.errors import MissingError, UsageError
from composer_core.spec.model import RunSpec

_READS_CALLS = Version("5.13.0.dev0")
_TEMPLATE_FIX = "take a model whose chat template trl knows, such as Qwen/Qwen3-0.6B, or leave rollout out"


def rollout_arguments(spec: RunSpec) -> dict[str, Any]:
    """The arguments of `GRPOTrainer` that the section `rollout:` decides; none without it.

    Raises:
        UsageError: a file, function or environment is not there, does not load, or is not as TRL needs it.
        MissingError: the installed transformers needs a package to read tool calls.
    """
    if spec.rollout is None:
        return {}
    _require_parser()
    tools = load_tools(spec.rollout)
    arguments: dict[str, Any] = {"tools": list(tools.functions)}
    if tools.environments is not None:
        arguments["environment_factory"] = tools.environments
    return arguments


def require_tool_template(tokenizer: Any, *, at: str) -> None:
    """Refuse a chat template that TRL cannot use for tools; one that it knows gets what reads its tool calls.

    Args:
        tokenizer: as the trainer will have it; its `response_schema` is set, as TRL would do.
        at: what messages call the model.

    Raises:
        UsageError: it does not render calls and results, TRL cannot read its calls, or the text of a conversation does
            not begin like that of the same conversation before its last result.
    """
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    if not supports_tool_calling(tokenizer):
        raise UsageError(
            "this model's chat template does not render tool calls and their results", at=at, fix=_TEMPLATE_FIX
        )
    try:
        if (
            getattr(tokenizer, "response_template", None) is None
            and getattr(tokenizer, "response_schema", None) is None
        ):
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"trl cannot use this model's chat template for tools: {reason}", at=at, fix=_TEMPLATE_FIX
        ) from error


def _require_parser() -> None:
    """TRL refuses tools without jmespath where transformers has no reader of calls of its own, before 5.13."""
    installed = version("transformers")
    if Version(installed) < _READS_CALLS and importlib.util.find_spec("jmespath") is None:
        raise MissingError(
            f"transformers {installed} needs the package jmespath to read tool calls", fix="pip install jmespath"
        )
