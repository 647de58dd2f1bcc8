"""How a replica's state is told."""

import pytest

from composer_core.jobs import JobState, JobStatus


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (JobStatus(JobState.RUNNING), "running"),
        (JobStatus(JobState.FAILED, 137, "oom"), "failed (oom), exit code 137"),
        (JobStatus(JobState.FAILED, 5), "stopped, exit code 5"),
        (JobStatus(JobState.SUCCEEDED, 0), "succeeded, exit code 0"),
    ],
    ids=["running", "oom", "stopped", "done"],
)
def test_a_status_is_a_few_words(status, words):
    assert status.in_words() == words
