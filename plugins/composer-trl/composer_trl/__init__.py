"""Composer on TRL: a subclass of GRPOTrainer that runs a Composer spec, or your own script."""

__version__ = "0.1.0"
