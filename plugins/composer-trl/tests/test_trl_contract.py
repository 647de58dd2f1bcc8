"""TRL passes the backend suite."""

import pytest

from composer_core.testing.contracts import BackendContract

SPEC = """\
version: 1
name: contract
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train: {steps: 3, prompts_per_step: 2, group_size: 4, max_completion_tokens: 8, learning_rate: 1.0e-3}
backend: {use: trl}
executor: {use: inline, threads: 1}
"""


@pytest.mark.slow
class TestTrl(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def spec_text(cls):
        return SPEC
