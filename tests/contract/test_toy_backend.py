"""The toy trainer passes the backend suite with both fakes, brought by a local plugin file."""

import pytest

from composer_core.batch import Batch
from composer_core.hf.models import load_policy
from composer_core.testing.accumulate import accumulate_gradients
from composer_core.testing.contracts import BackendContract

SPEC = """\
version: 1
name: contract
plugins: [{plugin}]
model: {{builtin: tiny}}
data:
  prompts: {{builtin: digits}}
  rewards: [{{use: regex, pattern: "[0-9]"}}]
loss:
  objective: {{use: grpo}}
  channels:
    - {{use: brevity, weight: 0.01}}
    - {{use: hint-fake, weight: 0.1}}
train: {{steps: 3, prompts_per_step: 2, group_size: 4, max_completion_tokens: 8, learning_rate: 1.0e-3}}
backend: {{use: toy}}
"""
PLUGIN = """\
from composer_core.testing.fakes import plugin

composer_loss_channels = plugin.composer_loss_channels
"""


class TestToy(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def spec_text(cls, tmp_path_factory):
        plugin = tmp_path_factory.mktemp("plugin") / "fakes_plugin.py"
        plugin.write_text(PLUGIN)
        return SPEC.format(plugin=plugin)

    @pytest.fixture(scope="class")
    @classmethod
    def channels(cls):
        return ("brevity", "hint-fake")

    def gradients(self, folder, loss, window):
        policy = load_policy(folder, dtype="float32").train()
        accumulate_gradients(policy, loss, window, base=Batch())
        return {name: parameter.grad for name, parameter in policy.named_parameters()}
