"""Composer on verl: a run spec on released verl, by registrations and subclasses alone."""

__version__ = "0.1.0"
