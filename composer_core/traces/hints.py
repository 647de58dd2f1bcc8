"""From an error site to the text of its hint: a book of templates, one for each kind of error.

A run makes its own book from the installed plugins and the spec (`HintBook.of`), and hands it on; nothing here is
shared between runs. `dispatch` and `register` work on one book more, `default_book()`: it belongs to scripts that
train without a spec, starts with the core's own templates, and no run ever reads it. It lives in a cache of one entry
rather than in a module variable, so that the book is a value with an owner, and `default_book.cache_clear()` ends it.

To add a kind, contribute a `HintPlugin` whose name is the kind with hyphens (`wrong-unit` for `wrong_unit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypedDict

from composer_core.errors import UsageError
from composer_core.plugins.contributions import Kind
from composer_core.plugins.registry import Registry
from composer_core.traces import templates
from composer_core.traces.error_sites import RECORDED, ErrorSite
from composer_core.traces.templates import UserTemplate

HintFunction = Callable[[Mapping[str, Any]], str | None]

BUILTIN: Mapping[str, Callable[[], HintFunction]] = {
    "tool_not_found": templates.ToolNotFound,
    "json_decode": templates.JsonDecode,
    "type_error": templates.TypeErrorHint,
    "runtime_error": templates.RuntimeErrorHint,
    "repeated_failure": templates.RepeatedFailure,
    "failed_test": templates.FailedTest,
    "timeout": templates.Timeout,
    "low_reward": templates.LowReward,
}
"""The core's own templates, which `plugins/builtin.py` contributes."""


class HintContext(TypedDict, total=False):
    """What a template may use; any of it may be missing. A rollout's context also has its data row's columns."""

    error_kind: str
    error_message: str
    """What the tool answered, shortened."""
    tool_name: str
    arguments: str | Mapping[str, Any]
    """Of the call, as the agent wrote them."""
    available_tools: list[str]
    tool_schema: Mapping[str, Any]
    """JSON schema of the arguments."""
    exit_code: int
    first_kind: str
    """For `repeated_failure`: what kind of error is repeated."""
    first_turn: int
    """For `repeated_failure`: the turn at which it first came."""
    expected_output: str
    """What a right answer or a passing test gives."""
    feedback: str
    """What the environment said to the answer."""
    intent: str
    """What the agent was after, where somebody knows."""
    reward: float


class HintBook:
    """Templates by kind of error."""

    def __init__(self, functions: Mapping[str, HintFunction] | None = None) -> None:
        """Default: the core's own templates."""
        core = {kind: make() for kind, make in BUILTIN.items()} if functions is None else {}
        self._functions: dict[str, HintFunction] = {**core, **(functions or {})}

    @classmethod
    def of(cls, registry: Registry, written: Mapping[str, str] | None = None) -> HintBook:
        """The templates of all plugins in a registry, and those written in a spec, which come before them.

        Raises:
            UsageError: a written template is wrong, or two plugins claim a kind that none is written for.
            MissingError: a plugin's template does not load.
        """
        book = cls({kind: user_template(kind, text) for kind, text in (written or {}).items()})
        for name in registry.names(Kind.HINT):
            kind = name.replace("-", "_")
            if kind not in book:
                _, contribution = registry.get(Kind.HINT, name)
                book.register(kind, contribution.load()(contribution.settings()))
        return book

    def register(self, kind: str, function: HintFunction) -> None:
        """Add the template of a kind, in place of the one there is."""
        self._functions[kind] = function

    def dispatch(self, kind: str, context: Mapping[str, Any] | None = None) -> str | None:
        """The hint for a kind of error; None where nobody knows the kind, or the context gives nothing to say."""
        function = self._functions.get(kind)
        return None if function is None else function(context or {})

    def hint(self, site: ErrorSite) -> str | None:
        """The hint for a site; None also for the kinds that are only recorded."""
        return None if site.kind in RECORDED else self.dispatch(site.kind, site.context)

    def __contains__(self, kind: str) -> bool:
        return kind in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)


def user_template(kind: str, text: str) -> UserTemplate:
    """A template written in a spec.

    Raises:
        UsageError: it is not written as one, or is for a kind that is never hinted.
    """
    if kind in RECORDED:
        raise UsageError(
            f"errors of kind {kind!r} are not the agent's fault and get no hint", at=f"hints.templates.{kind}"
        )
    try:
        return UserTemplate(text)
    except ValueError as error:
        raise UsageError(str(error), at=f"hints.templates.{kind}") from error


@lru_cache(maxsize=1)
def default_book() -> HintBook:
    """The book of `dispatch` and `register`: for scripts, never for a run of a spec."""
    return HintBook()


def dispatch(error_kind: str, ctx: Mapping[str, Any] | None = None) -> str | None:
    """The hint for a kind of error, from `default_book()`."""
    return default_book().dispatch(error_kind, ctx)


def register(error_kind: str, fn: HintFunction) -> None:
    """Add a template to `default_book()`, in place of the one there is."""
    default_book().register(error_kind, fn)
