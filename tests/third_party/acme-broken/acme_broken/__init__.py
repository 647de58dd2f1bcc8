"""Breaks on import."""
