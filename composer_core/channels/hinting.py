"""Which hints a rollout gets, for the channel `sdpo`: from a column of the data, or for its error sites.

Joins what `traces/` knows: sites (`error_sites.py`), the text for each (`hints.py`), its place in the tokens
(`rows.py`). Nothing is decided here but what stands in the spec's `hints:`. Light, like all of `prepare`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from composer_core.channels.settings import HintSettings
from composer_core.errors import RunFailed, UsageError
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText, Row
from composer_core.traces.chat_template import TokenizerLike
from composer_core.traces.error_sites import WHOLE_ANSWER, rollout_sites
from composer_core.traces.hints import HintBook
from composer_core.traces.recorded import TraceRows
from composer_core.traces.rows import Hint, HintRows

COLUMN_KIND = "column"
logger = logging.getLogger(__name__)


class Hinting:
    """Makes a rollout's row. Holds what is worth keeping between rollouts: the probed template, and what was said."""

    def __init__(self, settings: HintSettings, *, success: float, registry: Registry | None = None) -> None:
        """`registry` has the hint templates; default: those of the installed plugins, looked up when first needed."""
        self._settings, self._success = settings, success
        self._registry = registry
        self._book: HintBook | None = None
        self._rows: tuple[Any, HintRows] | None = None
        self._told: set[str] = set()

    def row(self, rollout: RolloutText) -> Row | None:
        """The row of `channels/rows.py`; None where there is nothing to say, or no place to say it.

        Why a hint could not be placed is logged once per reason, and counted in `skipped`.

        Raises:
            UsageError: the data has no such column, a site is no site, or the chat template takes no hints there.
            RunFailed: the trainer gives no tokenizer.
        """
        hints = list(self._hints(rollout))
        if not hints:
            return None
        rows = self._rows_for(rollout)
        made = rows.row(rollout, hints)
        for reason in rows.skipped.keys() - self._told:
            self._told.add(reason)
            logger.warning("sdpo: rollout %s is not hinted, and others like it: %s", rollout.uid, reason)
        return made

    @property
    def skipped(self) -> Mapping[str, int]:
        """Why hints could not be placed in rollouts so far: reason -> how many."""
        return {} if self._rows is None else self._rows[1].skipped

    def trace_rows(self, tokenizer: TokenizerLike, *, skipped: Counter[str]) -> TraceRows:
        """What reads recorded traces with these hints; `skipped` receives why some are left out.

        Raises:
            UsageError: hints come from a column, which traces have not, or the chat template takes none there.
        """
        settings = self._settings
        if settings.column is not None:
            raise UsageError(
                f"recorded traces have no column {settings.column!r}",
                at="sdpo.hints.column",
                fix="leave it out: traces are hinted at the errors in them",
            )
        return TraceRows(tokenizer, at=settings.at, span=settings.span, book=self._hint_book(), skipped=skipped)

    def _hint_book(self) -> HintBook:
        if self._book is None:
            self._book = HintBook.of(self._registry or Registry.discover(), self._settings.templates)
        return self._book

    def _hints(self, rollout: RolloutText) -> Iterator[Hint]:
        if self._settings.column is not None:
            if told := _column(rollout, self._settings.column):
                yield Hint(told, WHOLE_ANSWER, COLUMN_KIND)
            return
        for site in rollout_sites(rollout, below=self._success):
            if text := self._hint_book().hint(site):
                yield Hint(text, site.turn, site.kind)

    def _rows_for(self, rollout: RolloutText) -> HintRows:
        tokenizer = rollout.tokenizer
        if tokenizer is None:
            raise RunFailed("channel 'sdpo' puts hints into prompts and needs a tokenizer: this trainer gives none")
        if self._rows is None or self._rows[0] is not tokenizer:
            self._rows = (tokenizer, HintRows(tokenizer, at=self._settings.at, span=self._settings.span))
        return self._rows[1]


def _column(rollout: RolloutText, name: str) -> str:
    if name not in rollout.columns:
        known = ", ".join(rollout.columns) or "none"
        raise UsageError(f"the data has no column {name!r} with hints; there are: {known}", at="sdpo.hints.column")
    text = rollout.columns[name]
    if text is not None and not isinstance(text, str):
        raise UsageError(f"column {name!r} must hold text or null, got {text!r}", at="sdpo.hints.column")
    return text or ""
