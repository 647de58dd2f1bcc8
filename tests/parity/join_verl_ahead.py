"""verl joins the table once more, with teachers that read the hints before the first optimiser step on a batch."""

from __future__ import annotations

from join_verl import Verl
from parity_table import Case


class Ahead(Verl):
    """See the module."""

    def refuses(self, case: Case) -> str | None:
        """What is not known by then."""
        sdpo = case.sdpo or {}
        if (sdpo.get("support"), sdpo.get("side")) != ("topk", "teacher"):
            return "not over the teacher's top k"
        if case.steps > 1 and sdpo.get("teacher", "self-frozen") != "self-frozen":
            return "its teacher moves between the steps"
        return super().refuses(case)


joiner = Ahead(ahead=True)
