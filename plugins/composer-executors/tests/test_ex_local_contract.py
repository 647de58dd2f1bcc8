"""What every executor must do, with processes of this machine."""

import pytest

from composer_core.testing.executor_contract import ExecutorContract


class TestLocal(ExecutorContract):
    @pytest.fixture
    def block(self):
        return {"use": "local", "poll_seconds": 0.2, "stop_seconds": 2, "unknown_minutes": 0.03}
