"""The sandbox `bubblewrap`: Linux namespaces of one program each, made by bwrap.

Inside are /usr, this Python with its packages, what the settings make `readable`, an empty /tmp and the candidate's
files; nothing of the machine's other files, processes or network. All ends with the program: it is in a process
namespace whose first process the kernel ends, and everybody with it, when bwrap or this process goes.

Started by root, the program runs under a user id that nobody has, a new one for each: its processes can be counted,
and none of the machine's files is its own. Started by a user, it runs in a user namespace of that user.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from composer_core.data.unconfined import as_result
from composer_core.errors import MissingError, RunFailed, UsageError
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.run.bounded import Start, in_parallel, run_bounded
from composer_core.sandbox import WORK, Candidate, Limits, Result
from composer_executors.sandbox.memory import MemoryGroups
from composer_executors.sandbox.namespaces import Namespaces

_XCPU = 128 + signal.SIGXCPU
"""Exit code of a program that used up its processor time."""
_FIRST_UID = 2_000_000_000
_UIDS = 1 << 20
_NOBODY = 65534
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/localtime")
_NO_MEMORY = (b"std::bad_alloc", b"Cannot allocate memory", b"memory exhausted")
_FIX = "apt-get install bubblewrap; a user who is not root also needs user namespaces: sysctl user.max_user_namespaces"
_TMP = "/tmp"


class BubblewrapSandbox:
    """Implements `sandbox.Sandbox`. Memory is limited by a group of the kernel where one can be made, else for each
    process by itself (`memory_by` says which).
    """

    def __init__(self, settings: SandboxSettings) -> None:
        if settings.image is not None:
            raise UsageError("bubblewrap starts from no image", at="sandbox.image", fix="leave it out, or use: docker")
        self.python = sys.executable
        self._readable = [*interpreter_folders(), *map(Path, settings.readable)]
        for path in self._readable:
            if not path.exists():
                raise UsageError(f"no such file or folder: {path}", at="sandbox.readable")
        self._groups = MemoryGroups.found()
        self._uids = _Uids() if os.getuid() == 0 else None
        found = shutil.which("bwrap")
        if found is None:
            raise MissingError("the sandbox bubblewrap needs the program bwrap, which is not installed", fix=_FIX)
        self._bwrap = found
        self._prove(settings.limits)

    @property
    def memory_by(self) -> str:
        """`group` or `process`: what the memory limit is for."""
        return "process" if self._groups is None else "group"

    def run_batch(self, candidates: Sequence[Candidate], limits: Limits, *, workers: int | None = None) -> list[Result]:
        """Run each in namespaces of its own.

        Raises:
            RunFailed: bwrap cannot make them, in its words.
        """
        return in_parallel(lambda candidate: self._run(candidate, limits), candidates, workers=workers)

    def _prove(self, limits: Limits) -> None:
        """Run something that starts a process: what is wrong with this machine is said before anybody waits for it."""
        try:
            (result,) = self.run_batch([Candidate(("/bin/sh", "-c", "/bin/true && echo here"))], limits)
        except RunFailed as error:
            raise MissingError(f"the sandbox bubblewrap does not work here: {error.problem}", fix=_FIX) from error
        if result.stdout != "here\n":
            said = result.stderr.strip() or result.why
            raise MissingError(f"the sandbox bubblewrap cannot start a program: {said}", fix=_FIX)

    def _run(self, candidate: Candidate, limits: Limits) -> Result:
        with ExitStack() as stack:
            group = None
            if self._groups is not None:
                group = self._groups.make(limits.memory_mb << 20)
                stack.callback(group.remove)
            spaces = stack.enter_context(Namespaces(group))
            arguments = [*self._walls(limits), *spaces.arguments(candidate.files), "--remount-ro", "/"]
            ended = run_bounded(
                Start(
                    [self._bwrap, *arguments, *self._inside(limits), *candidate.argv],
                    candidate.stdin,
                    env={},
                    fds=spaces.inherited,
                ),
                seconds=limits.seconds,
                output_bytes=limits.output_kb * 1024,
                started=spaces.release,
            )
            finished = spaces.finish()
            oom = ended.code != 0 and _speaks_of_memory(ended.stderr) if group is None else group.oom()
        result = as_result(ended, oom=oom, timed_out=ended.code == _XCPU)
        if not (finished or result.oom or result.timed_out or result.truncated):
            raise RunFailed(f"bwrap: {result.stderr.strip().removeprefix('bwrap: ') or result.why}")
        return result

    def _walls(self, limits: Limits) -> Iterator[str]:
        yield from ("--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net")
        yield from ("--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox")
        if self._uids is None:
            yield "--unshare-user"
        yield from ("--ro-bind", "/usr", "/usr")
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                yield from ("--symlink", os.readlink(path), str(path))
            elif path.is_dir():
                yield from ("--ro-bind", str(path), str(path))
        size = str(limits.disk_mb << 20)
        yield from ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm")
        yield from ("--remount-ro", "/dev", "--perms", "1777", "--size", size, "--tmpfs", _TMP)
        for path in (*map(Path, _ETC), *self._readable):  # behind /tmp, which they may lie in
            if path.exists():
                for parent in reversed(path.parents[:-1]):  # else bwrap gives them the rights of the machine's own
                    if str(parent) != _TMP:
                        yield from ("--perms", "0755", "--dir", str(parent))
                yield from ("--ro-bind", str(path), str(path))
        yield from ("--perms", "0755", "--dir", WORK, "--chdir", WORK)
        programs = os.pathsep.join([str(Path(self.python).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        for name, value in {
            "PATH": programs,
            "HOME": _TMP,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }.items():
            yield from ("--setenv", name, value)
        yield from ("--cap-drop", "ALL")
        if self._uids is not None:  # given up by setpriv, before the candidate starts
            yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")

    def _inside(self, limits: Limits) -> Iterator[str]:
        """What starts the candidate inside: a change of user, and limits of the process."""
        yield "--"
        if self._uids is not None:
            uid = str(self._uids.new())
            yield from ("/usr/bin/setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs")
        seconds = math.ceil(limits.seconds)
        # in a user namespace, bwrap's own first process counts among the user's
        processes = limits.processes if self._uids is not None else limits.processes + 1
        yield from ("/usr/bin/prlimit", f"--nproc={processes}", f"--cpu={seconds}:{seconds + 1}", "--core=0")
        yield f"--fsize={limits.disk_mb << 20}"
        if self._groups is None:
            yield f"--as={limits.memory_mb << 20}"
        yield "--"


def interpreter_folders() -> list[Path]:
    """What this Python needs to run: its environment, and the installation behind that."""
    return list(dict.fromkeys(Path(folder) for folder in (sys.base_prefix, sys.prefix)))


def _speaks_of_memory(stderr: bytes) -> bool:
    """Whether the last words of Python, a C++ program or a shell are that there is no more."""
    last = stderr.rstrip().rpartition(b"\n")[2]
    return last.startswith(b"MemoryError") or any(words in last for words in _NO_MEMORY)


class _Uids:
    """User ids that nobody has, another one each time; `nobody` where so high ones are not to be had."""

    def __init__(self) -> None:
        highest = max(int(line.split()[0]) + int(line.split()[2]) for line in _uid_map())
        self._enough = highest > _FIRST_UID + _UIDS
        self._next = itertools.count(os.getpid() * 16)

    def new(self) -> int:
        """The next one."""
        return _FIRST_UID + next(self._next) % _UIDS if self._enough else _NOBODY


def _uid_map() -> list[str]:
    return Path("/proc/self/uid_map").read_text().splitlines()
