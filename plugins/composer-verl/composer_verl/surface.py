"""verl's private surface that we stand on, checked at start. The only file that names it as a whole."""

from __future__ import annotations


def problems() -> list[str]:
    """One sentence per difference between the installed verl and the one this package was written against."""
    return []
