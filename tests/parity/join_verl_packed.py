"""verl joins the table once more, with its packed form: no padding between sequences."""

from __future__ import annotations

from join_verl import Verl
from parity_table import Case


class Packed(Verl):
    """See the module."""

    def refuses(self, case: Case) -> str | None:
        """A model that numbers positions by itself reads packed sequences as one."""
        return "no packed sequences" if case.model == "opt" else super().refuses(case)


joiner = Packed(packed=True)
