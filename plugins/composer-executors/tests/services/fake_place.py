"""A service that starts nothing: it says what it is told to say, and remembers what it was asked."""

from dataclasses import dataclass, field

from composer_core.errors import RunFailed
from composer_core.jobs import JobHandle, JobState, JobStatus

RUNNING = JobStatus(JobState.RUNNING)
DONE = JobStatus(JobState.SUCCEEDED, 0)


@dataclass
class FakePlace:
    """`script` maps (rank, attempt) to the answers of successive polls, the last of which stays."""

    script: dict = field(default_factory=dict)
    fail_at: int | None = None
    """The rank whose submission is refused."""
    lasting: str = ""
    """What remains after a kill."""
    logs: dict = field(default_factory=dict)
    """(rank, attempt) -> the chunks that successive reads give; an exception is raised."""
    submitted: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    asked: int = 0
    name = "fake"

    def render(self, replicas):
        return {f"rank-{one.rank}": f"{dict(one.env)} {dict(one.secrets)}" for one in replicas}

    def submit(self, replicas):
        for replica in replicas:
            if replica.rank == self.fail_at:
                raise RunFailed("no room")
            self.submitted.append(replica)
            facts = {"job": replica.job}
            yield JobHandle(self.name, replica.rank, f"f{len(self.submitted)}", replica.attempt, facts)

    def poll(self, handles):
        self.asked += 1
        return [self._next((handle.rank, handle.attempt)) for handle in handles]

    def _next(self, key):
        answers = self.script.get(key, [DONE])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def log(self, handle, offset):
        chunks = self.logs.get((handle.rank, handle.attempt), [])
        given = chunks.pop(0) if chunks else b""
        if isinstance(given, Exception):
            raise given
        return given

    def terminate(self, handle):
        self.ended.append(("TERM", handle.rank, handle.attempt))

    def kill(self, handle):
        self.ended.append(("KILL", handle.rank, handle.attempt))

    def remains(self, handle):
        return self.lasting

    def leftovers(self, job):
        return []

    def examine(self):
        return []
