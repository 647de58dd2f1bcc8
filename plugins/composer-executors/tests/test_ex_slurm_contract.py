"""What every executor must do, on a real cluster of Slurm."""

import pytest
from slurm_service import slurm, slurm_cluster  # noqa: F401

from composer_core.testing.executor_contract import ExecutorContract


@pytest.mark.usefixtures("slurm")
class TestSlurm(ExecutorContract):
    time_limit_s = 3.0

    @pytest.fixture
    def block(self):
        return {"use": "slurm", "poll_seconds": 0.3, "stop_seconds": 3, "unknown_minutes": 0.05}

    @pytest.fixture
    def readable(self, slurm):  # noqa: F811
        return [slurm.folder / name for name in ("state", "spool", "log")]

    @pytest.fixture(autouse=True)
    def _cluster(self, slurm):  # noqa: F811
        self._slurm = slurm

    def bring_time_limit_closer(self, handle):
        self._slurm.ask("scontrol", "update", f"JobId={handle.id}", "TimeLimit=0")

    @pytest.mark.slow  # Slurm looks at time limits every half minute
    def test_over_its_time_it_is_ended(self, make, job):
        super().test_over_its_time_it_is_ended(make, job)
