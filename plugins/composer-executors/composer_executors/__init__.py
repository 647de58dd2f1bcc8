"""Composer on machines: executors that start a plan and stay in touch with it, and sandboxes."""

__version__ = "0.1.0"
