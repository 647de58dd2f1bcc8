"""Sandboxes for code that nobody vouches for: `bubblewrap.py`, `docker.py`; `memory.py` limits memory for the first.

Each implements `composer_core.sandbox.Sandbox`. To add one: its class here, and its line in `offer.py`.
"""
