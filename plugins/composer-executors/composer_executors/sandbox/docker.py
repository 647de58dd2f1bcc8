"""The sandbox `docker`: a container of your image for each program, by the `docker` command.

The daemon must run on this machine, as candidates' files reach the container from a folder here. Containers carry a
label with the process that made them, so that those of a process which was killed are removed by the next one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from composer_core.data.unconfined import as_result, write_files
from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.run.bounded import Start, in_parallel, run_bounded
from composer_core.sandbox import WORK, Candidate, Limits, Result

LABEL = "composer-sandbox"
_NOBODY = 65534
_NOT_FOUND = (126, 127)
"""Exit codes of a program that is not there, or is none."""
_STATE = "{{.State.OOMKilled}}/{{.State.ExitCode}}/{{.State.Error}}"
_ASK_SECONDS = 60
"""For what the daemon is asked beside running a program."""


class DockerSandbox:
    """Implements `sandbox.Sandbox`."""

    def __init__(self, settings: SandboxSettings) -> None:
        if settings.image is None:
            fix = "sandbox: {use: docker, image: python:3.12-slim}, or another image that is there"
            raise UsageError("docker needs an image to start from", at="sandbox.image", fix=fix)
        self.python = "python3"
        self._image = settings.image
        self._readable = settings.readable
        found = shutil.which("docker")
        if found is None:
            raise MissingError(
                "the sandbox docker needs the program docker, which is not installed", fix="apt-get install docker.io"
            )
        self._docker = found
        self._reach()
        self._owner = _owner()
        self._sweep()

    def run_batch(self, candidates: Sequence[Candidate], limits: Limits, *, workers: int | None = None) -> list[Result]:
        """Run each in a container of its own; its seconds count from the container's start.

        Raises:
            RunFailed: the daemon refuses or is gone, in its words.
        """
        return in_parallel(lambda candidate: self._run(candidate, limits), candidates, workers=workers)

    def _reach(self) -> None:
        asked = self._ask("version", "--format", "{{.Server.Version}}")
        if asked.returncode:
            fix = "start it (systemctl start docker), and let this user use it (group docker) or set DOCKER_HOST"
            raise MissingError(f"the sandbox docker cannot reach its daemon: {_said(asked)}", fix=fix)
        asked = self._ask("image", "inspect", "--format", "{{.Id}}", self._image)
        if asked.returncode:
            fix = f"docker pull {self._image}"
            raise MissingError(f"the sandbox docker has no image {self._image!r}: {_said(asked)}", fix=fix)

    def _run(self, candidate: Candidate, limits: Limits) -> Result:
        name = f"{LABEL}-{uuid.uuid4().hex[:16]}"
        with tempfile.TemporaryDirectory(prefix="composer-") as folder:
            write_files(candidate, Path(folder))
            _open_to_all(Path(folder))
            program, *arguments = candidate.argv
            walls = self._walls(limits, folder)
            self._must("create", "--name", name, *walls, "--entrypoint", program, self._image, *arguments)
            try:
                ended = run_bounded(
                    Start([self._docker, "start", "--attach", "--interactive", name], candidate.stdin),
                    seconds=limits.seconds,
                    output_bytes=limits.output_kb * 1024,
                )
                if ended.timed_out or ended.truncated:  # it still runs, and only an end tells what led to it
                    self._ask("kill", name)
                oom, code, error = self._must("inspect", "--format", _STATE, name).split("/", 2)
            finally:
                self._must("rm", "--force", "--volumes", name)
        if error:  # it never ran: the program is not in the image, or something is wrong with the daemon
            if int(code) not in _NOT_FOUND:
                raise RunFailed(f"docker: {error}")
            return Result(int(code), "", f"{error}\n", False, False, False, ended.seconds)
        return as_result(ended, oom=oom == "true")

    def _walls(self, limits: Limits, folder: str) -> Iterator[str]:
        yield from ("--label", f"{LABEL}={self._owner}", "--interactive", "--pull", "never", "--log-driver", "none")
        yield from ("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
        yield from ("--user", f"{_NOBODY}:{_NOBODY}", "--workdir", WORK, "--volume", f"{folder}:{WORK}:ro")
        for path in self._readable:
            yield from ("--volume", f"{path}:{path}:ro")
        size, memory = limits.disk_mb << 20, f"{limits.memory_mb}m"
        # owned by its user, as the mode that counts is that of the image's own /tmp
        tmp = f"/tmp:rw,exec,nosuid,nodev,mode=1777,uid={_NOBODY},gid={_NOBODY},size={size}"
        yield from ("--tmpfs", tmp, "--shm-size", str(size))
        # one processor, so that its time there is no longer than its time on the clock
        yield from ("--memory", memory, "--memory-swap", memory, "--cpus", "1")
        yield from ("--pids-limit", str(limits.processes), "--ulimit", f"fsize={size}", "--ulimit", "core=0")
        yield from ("--env", "HOME=/tmp", "--env", "LANG=C.UTF-8", "--env", "PYTHONDONTWRITEBYTECODE=1")

    def _sweep(self) -> None:
        """Remove containers that processes of this machine made which are gone."""
        here = self._owner.rpartition("/")[0]
        labelled = self._must(
            "ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
        )
        for line in labelled.splitlines():
            container, owner = line.split(" ", 1)
            where, _, process = owner.rpartition("/")
            if where == here and not _lives(process):
                self._must("rm", "--force", "--volumes", container)

    def _must(self, *arguments: str) -> str:
        """What docker prints.

        Raises:
            RunFailed: it refuses.
        """
        asked = self._ask(*arguments)
        if asked.returncode:
            raise RunFailed(f"docker {arguments[0]}: {_said(asked)}")
        return asked.stdout.strip()

    def _ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self._docker, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ASK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"docker {arguments[0]} gave no answer for {_ASK_SECONDS} s") from error


def _said(asked: subprocess.CompletedProcess[str]) -> str:
    lines = asked.stderr.strip().splitlines()
    return lines[0] if lines else f"exit code {asked.returncode}"


def _open_to_all(folder: Path) -> None:
    """Let the container's user into a folder of ours and those in it."""
    for inside in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        inside.chmod(0o755)


def _owner() -> str:
    """Who we are, so that a process of the same machine and process namespace can tell whether it lives."""
    space = Path("/proc/self/ns/pid")
    inode = os.readlink(space).strip("pid:[]") if space.exists() else ""
    return f"{platform.node()}/{inode}/{os.getpid()}:{psutil.Process().create_time():.2f}"


def _lives(process: str) -> bool:
    pid, _, created = process.partition(":")
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == created
    except (psutil.NoSuchProcess, ValueError):
        return False
