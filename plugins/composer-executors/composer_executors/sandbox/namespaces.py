"""One run of bwrap: the pipes and files between it and us, and its first process, with which everything inside ends."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping
from types import TracebackType

from composer_core.errors import RunFailed
from composer_core.sandbox import WORK
from composer_executors.sandbox.memory import MemoryGroup

_GONE_SECONDS = 10.0
"""The kernel ends a namespace at once; only a process that waits for a disk makes it wait."""


class Namespaces:
    """Use as a context: `arguments`, then bwrap with `inherited` and `release`, then `finish`."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group
        self._open: set[int] = set()
        self._status, self._status_of_bwrap = self._pipe()
        self._block_of_bwrap, self._unblock = self._pipe()
        self._files: list[int] = []
        self._first: int | None = None

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that bwrap is to get."""
        return (self._status_of_bwrap, self._block_of_bwrap, *self._files)

    def arguments(self, files: Mapping[str, bytes]) -> Iterator[str]:
        """For bwrap: our pipes, and files in `WORK`. They travel through memory, so that no rights on disk matter."""
        yield from ("--json-status-fd", str(self._status_of_bwrap), "--block-fd", str(self._block_of_bwrap))
        for name, content in files.items():
            descriptor = self._keep(os.memfd_create("composer-sandbox"))
            self._files.append(descriptor)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
                file.flush()
                file.seek(0)  # for bwrap too: both descriptors have one position
            yield from ("--perms", "0444", "--file", str(descriptor), f"{WORK}/{name}")

    def release(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first process inside, put it into the memory group, and let it go on."""
        for descriptor in (self._status_of_bwrap, self._block_of_bwrap):
            self._close(descriptor)  # so that the end of bwrap is the end of these pipes
        try:
            first = json.loads(self._line())["child-pid"]
            self._first = self._keep(os.pidfd_open(first))
            if self._group is not None:
                self._group.add(first)
        except (ValueError, ProcessLookupError):  # bwrap gave up: it says why on stderr, and `finish` gives False
            return
        os.write(self._unblock, b"!")

    def finish(self) -> bool:
        """Wait until nothing is left inside; whether the program came to an end of its own there.

        Raises:
            RunFailed: something inside does not end.
        """
        if self._first is None:
            return False
        poll = select.poll()
        poll.register(self._first, select.POLLIN)
        if not poll.poll(_GONE_SECONDS * 1000):
            raise RunFailed("a program in the sandbox does not end, though it was killed: is its disk there?")
        return b'"exit-code"' in self._rest()

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._status, 1)):
            line += byte
        return line

    def _rest(self) -> bytes:
        rest = b""
        while part := os.read(self._status, 4096):
            rest += part
        return rest

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        return self._keep(read), self._keep(write)

    def _keep(self, descriptor: int) -> int:
        self._open.add(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)
