"""Composer's core: hook specs, loss maths, run spec and command line. Backends and executors are plugins."""

__version__ = "0.1.0"
