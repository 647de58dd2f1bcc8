"""How a teacher's answer can fail, told apart by what to do next."""

from __future__ import annotations

from composer_core.errors import MissingError, Stopped


class Again(Exception):
    """The same request may be sent again."""

    def __init__(self, reason: str, *, billed: bool, after: float | None = None) -> None:
        super().__init__(reason)
        self.billed = billed
        """It may have been billed although there is no answer."""
        self.after = after
        """Seconds that the server asks to wait."""


class StateRefused(Exception):
    """The teacher will not answer this state; others it will."""


class TeacherRefused(MissingError):
    """Nothing this teacher is asked will be answered: a wrong key, no credits, no such model."""


class BudgetSpent(Stopped):
    """The next call might cost more than is left."""
