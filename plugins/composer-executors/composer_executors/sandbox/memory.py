"""A memory limit for several processes together: a control group of the kernel, version 1 or 2.

Making one takes rights that root and some users of systemd have. Where it cannot be made, the sandbox limits each
process by itself, which several of them can get round together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_REMOVE_SECONDS = 2.0
_numbers = itertools.count()  # of groups of this process, so that two threads never make the same one


@dataclass(frozen=True)
class MemoryGroup:
    """One group, which a `MemoryGroups` made."""

    folder: Path
    events: Path

    def add(self, pid: int) -> None:
        """Put a process into it; what that starts is in it too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def oom(self) -> bool:
        """Whether the kernel killed a process of it for its memory."""
        found = _OOM_KILLS.search(self.events.read_text())
        return found is not None and int(found[1]) > 0

    def remove(self) -> None:
        """Remove it; its processes are gone or about to be.

        Raises:
            OSError: something still runs in it.
        """
        deadline = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


@dataclass(frozen=True)
class MemoryGroups:
    """Makes groups below one folder."""

    parent: Path
    limits: tuple[str, ...]
    """The files that take the limit in bytes; all but the first may be missing, where swap is not counted."""
    events: str

    @classmethod
    def found(cls, *, mounts: str | None = None, groups: str | None = None) -> MemoryGroups | None:
        """Where this process can make one; None where it cannot.

        Args:
            mounts: what /proc/self/mountinfo says.
            groups: what /proc/self/cgroup says.
        """
        try:
            mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
            groups = Path("/proc/self/cgroup").read_text() if groups is None else groups
        except OSError:  # no Linux
            return None
        for candidate in _candidates(mounts, groups):
            if candidate.works():
                candidate.sweep()
                return candidate
        return None

    def works(self) -> bool:
        """Whether a group can be made and a process put into it, which are different rights."""
        try:
            group = self.make(1 << 30)
        except OSError:
            return False
        try:
            with subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE) as process:
                group.add(process.pid)
        except OSError:
            return False
        finally:
            group.remove()
        return True

    def sweep(self) -> None:
        """Remove the groups of processes that were killed; one with a process in it stays, as the kernel sees to."""
        for folder in self.parent.glob(f"{_prefix()}*"):
            pid = int(folder.name.removeprefix(_prefix()).partition("-")[0])
            if not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def make(self, size: int) -> MemoryGroup:
        """A group that may hold `size` bytes.

        Raises:
            OSError: no right to, or the kernel counts no memory there.
        """
        folder = self.parent / f"{_prefix()}{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
        group = MemoryGroup(folder, folder / self.events)
        try:
            (folder / self.limits[0]).write_text(str(size))
            for name in self.limits[1:]:
                if (folder / name).exists():
                    (folder / name).write_text("0" if name == _SWAP else str(size))
            group.oom()
        except OSError:
            group.remove()
            raise
        return group


_SWAP = "memory.swap.max"


def _prefix() -> str:
    """Of our groups' names; with the process namespace, in which alone a process id says who it is."""
    return f"composer-sandbox-{os.stat('/proc/self/ns/pid').st_ino}-"


def _candidates(mounts: str, groups: str) -> Iterator[MemoryGroups]:
    """Where one could be made: below this process's own group, or beside it (version 2 wants groups with processes to
    be leaves).
    """
    own = {kind: path for _, kind, path in (line.split(":", 2) for line in groups.splitlines())}
    for root, mount, kind, options in _mounted(mounts):
        if kind == "cgroup" and "memory" in options and "memory" in own:
            folder = _below(own["memory"], root, mount)
            limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            yield MemoryGroups(folder, limits, "memory.oom_control")
        if kind == "cgroup2" and "" in own:
            folder = _below(own[""], root, mount)
            for parent in (folder, folder.parent) if folder != mount else (folder,):
                yield MemoryGroups(parent, ("memory.max", _SWAP), "memory.events")


def _mounted(mounts: str) -> Iterator[tuple[str, Path, str, list[str]]]:
    """(root, mount point, type, options) of each file system of /proc/self/mountinfo."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        yield fields[3], Path(fields[4]), kind, options.split(",")


def _below(group: str, root: str, mount: Path) -> Path:
    """A group's folder: paths count from the hierarchy's top, of which a container may see a part (`root`)."""
    inside = group.removeprefix(root) if root != "/" else group
    return mount / inside.lstrip("/")
