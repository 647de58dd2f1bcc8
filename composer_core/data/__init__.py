"""Prompts in, scores out: data rows, answers, rewards, and the checks before a run. Nothing here needs torch."""
