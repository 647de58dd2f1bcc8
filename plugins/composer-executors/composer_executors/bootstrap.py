"""What a replica runs where no disk is shared: `python -m composer_executors.bootstrap STORE --input ID -- ...`.

It makes a run directory in a temporary folder, fills it from the store, runs the worker there, and puts into the store
what the worker writes: lines as they come, checkpoints once they are complete, the rest at the end. Started again, it
goes on from the newest checkpoint in the store. Arguments behind `--` are the worker's.

SIGTERM is handed on to the worker, which saves. Whenever this process is killed, the store has all that was complete
(`journal.py`), and the worker ends with it. While the store fails, training goes on and it is tried again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

from composer_core.errors import ComposerError, RunFailed, Stopped
from composer_core.run.control import PARENT_VARIABLE
from composer_core.run.directory import RunDirectory
from composer_core.run.files import is_complete, marker, read_json
from composer_core.run.resume import set_lines_aside
from composer_executors.again import WORKER
from composer_executors.journal import Reader, Tree, Writer, checkpoints
from composer_executors.shipping import BOOTSTRAP, LEFT, unpack, wished_to_stop
from composer_executors.store import Store, files_of

LOOK_SECONDS = 0.5
"""Between two looks at what the worker wrote."""
WISH_SECONDS = 2.0
"""Between two looks for a wish to stop."""
CHUNK_BYTES = 1 << 24
EVENTS = "events.jsonl"
_SHIPPED = ("plan.json", "spec.yaml", "resolved.json", "files")


def main(argv: Sequence[str]) -> int:
    """Run a worker; its exit code, or the one of what kept it from running."""
    parser = argparse.ArgumentParser(
        prog=BOOTSTRAP,
        usage="%(prog)s STORE --input ID [--rank R] [-- ...]",
        description="Run a worker whose files travel by a store.",
    )
    parser.add_argument("store", metavar="STORE", help="URI of the run's store")
    parser.add_argument("--input", required=True, metavar="ID", help="what was put there for this launch")
    parser.add_argument("--rank", type=int, default=int(os.environ.get("COMPOSER_RANK", "0")))
    end = list(argv).index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:end])
    name = os.environ.get("COMPOSER_RUN_ID", "run")
    folder = Path(tempfile.mkdtemp(prefix="composer-"))
    directory = RunDirectory(folder / Path(name).name)
    directory.path.mkdir()
    try:
        store = Store(arguments.store)
        return _Worker(store, arguments.input, arguments.rank, directory).run(argv[end + 1 :])
    except ComposerError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Worker:
    """The worker's process, and what stands between its folder and the store."""

    def __init__(self, store: Store, identity: str, rank: int, directory: RunDirectory) -> None:
        self._store = store
        self._identity = identity
        self._rank = rank
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._woken = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def run(self, options: Sequence[str]) -> int:
        """Until the worker is over and all that it wrote is in the store."""
        options, pusher = self._prepare(options)
        if self._asked:
            raise Stopped("asked to stop before the worker was started")
        command = [sys.executable, "-m", WORKER, str(self._directory.plan), *options]
        self._process = subprocess.Popen(command, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
        if self._asked:  # between the two lines above
            self._process.send_signal(signal.SIGTERM)
        code = self._attend(self._process, pusher)
        code = code if code >= 0 else 128 - code
        pusher.finish(code)
        return code

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._woken.set()

    def _attend(self, process: subprocess.Popen[bytes], pusher: Pusher) -> int:
        next_wish = 0.0
        said = ""
        while (code := process.poll()) is None:
            try:
                pusher.look()
                if time.monotonic() >= next_wish:
                    self._heed_wish()
                    next_wish = time.monotonic() + WISH_SECONDS
            except ComposerError as error:  # the next look tries again, and `finish` says it where none succeeds
                if str(error) != said:
                    said = str(error)
                    print(f"warning: {said}; training goes on", file=sys.stderr, flush=True)
            self._woken.wait(LOOK_SECONDS)
            self._woken.clear()
        return code

    def _heed_wish(self) -> None:
        wish = wished_to_stop(self._store, self._identity)
        if wish is not None and not self._directory.stop_file.exists():
            self._directory.write_text(self._directory.stop_file.name, wish.decode("utf-8", "replace"))

    # -- before it starts ----------------------------------------------------------------------------------------------

    def _prepare(self, options: Sequence[str]) -> tuple[list[str], Pusher]:
        """Fill the run directory, and say in the store that another writer goes on."""
        reader = Reader(self._store, self._rank)
        before = reader.newest(self._identity)
        writer = Writer(self._store, self._rank, {"launch": self._identity, "host": os.uname().nodename})
        unpack(self._store, self._identity, self._directory)
        for folder in (self._directory.logs, self._directory.checkpoints):
            folder.mkdir(exist_ok=True)
        trees = reader.trees()
        options, step = self._where_from(options, again=before is not None, trees=trees)
        if before is not None:
            self._take_over(reader, before)
        if before is not None or step:
            set_lines_aside(self._directory, step)  # the worker would; but files may only grow once it runs
        known = {earlier: tree for earlier, tree in checkpoints(trees).items() if earlier <= step}
        pusher = Pusher(self._directory, writer, known)  # later ones are made anew
        pusher.look_at_lines()
        writer.begin(reader.seen())
        return list(options), pusher

    def _where_from(self, options: Sequence[str], *, again: bool, trees: dict[str, Tree]) -> tuple[list[str], int]:
        """The worker's options, and the step that it goes on from; its checkpoint is in place."""
        known = checkpoints(trees)
        options = list(options)
        if "--resume" in options:
            place = options.index("--resume")
            step = int(options[place + 1])
            del options[place : place + 2]
        else:
            step = 0
        if again and known:
            step = max([step, *known])
        if not step:
            return options, 0
        folder = self._directory.checkpoints / f"step_{step}"
        if not is_complete(folder):
            if step not in known:
                raise RunFailed(f"checkpoint step_{step} is not in the store", at=self._store.uri)
            self._store.get_tree(known[step].prefix, known[step].files, folder)
        return [*options, "--resume", str(step)], step

    def _take_over(self, reader: Reader, before: int) -> None:
        """Lines of the writer before, in place of those that were shipped."""
        for name in reader.growing(before):
            path = self._directory.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = reader.lines(before, name, 0)
            path.write_bytes(content if name.startswith("logs/") else content[: content.rfind(b"\n") + 1])


class Pusher:
    """Puts what a worker writes into the store, each thing once.

    Lines go by the thread that calls, folders by one of their own: a big checkpoint does not hold up metrics. Events
    wait for folders that were complete before them, so who reads `finished` finds the model.
    """

    def __init__(self, directory: RunDirectory, writer: Writer, known: dict[int, Tree]) -> None:
        self._directory = directory
        self._writer = writer
        self._kept = known
        self._put_away = set(known)
        """Steps, those that are no longer kept among them: the worker may be later to remove one."""
        self._keep = int(directory.read_json("plan.json")["spec"]["checkpoint"]["keep"])
        self._model: object = None
        self._locked: object = None
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._busy: Future[None] | None = None

    def look(self) -> None:
        """Put what is new.

        Raises:
            ComposerError: the store failed; the next call tries again.
        """
        self.look_at_lines(but=EVENTS)
        if self._busy is not None and self._busy.done():
            done, self._busy = self._busy, None
            done.result()
        if self._busy is None:
            self._busy = self._hand.submit(self._look_at_folders)

    def look_at_lines(self, *, but: str = "", all_of_it: bool = False) -> None:
        """Put whole lines that are new; at the end `all_of_it`."""
        for name in _growing(self._directory.path):
            if name != but:
                self._grow(name, self._size(name), all_of_it=all_of_it)

    def finish(self, exit_code: int) -> None:
        """Put all that is left, and say that nothing more comes.

        Raises:
            RunFailed: the store failed, again and again.
        """
        if self._busy is not None:
            self._busy.exception()  # what failed is tried again below
        self._hand.shutdown()
        self._look_at_folders()
        self.look_at_lines(all_of_it=True)
        if rest := _rest(self._directory.path):
            self._writer.tree("rest", rest)
        self._writer.end(exit_code)

    def _look_at_folders(self) -> None:
        events = self._size(EVENTS)
        lock = read_json(self._directory.path / "lock.json")
        if lock is not None and lock != self._locked:
            self._writer.lock(lock)
            self._locked = lock
        for step, folder in self._directory.complete_checkpoints():
            if step not in self._put_away and (tree := self._put(f"checkpoints/step_{step}", folder)) is not None:
                self._kept[step] = tree
                self._put_away.add(step)
                self._prune()
        model = self._directory.complete_model()
        if model is not None and (stamp := marker(model)) != self._model and self._put("model", model) is not None:
            self._model = stamp
        self._grow(EVENTS, events, all_of_it=False)

    def _put(self, name: str, folder: Path) -> Tree | None:
        """From links of its own, as the worker may remove the folder meanwhile; None where it just did."""
        with tempfile.TemporaryDirectory(dir=self._directory.path.parent) as own:
            still = Path(own, "tree")
            with suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(folder, still, copy_function=os.link)
            return self._writer.tree(name, files_of(still)) if is_complete(still) else None

    def _prune(self) -> None:
        for step in sorted(self._kept)[: -self._keep]:
            self._writer.remove(self._kept.pop(step))

    def _size(self, name: str) -> int:
        path = self._directory.path / name
        return path.stat().st_size if path.is_file() else 0

    def _grow(self, name: str, until: int, *, all_of_it: bool) -> None:
        """Put a file's bytes up to there; whole lines, or `all_of_it`."""
        path = self._directory.path / name
        while (offset := self._writer.grown(name)) < until:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(min(until - offset, CHUNK_BYTES))
            whole = content.rfind(b"\n") + 1
            if not whole and not all_of_it and len(content) < CHUNK_BYTES:
                return
            if whole and not (all_of_it and offset + len(content) == until):
                content = content[:whole]
            self._writer.append(name, content)


def _growing(folder: Path) -> Iterator[str]:
    """Files that only grow, by relative name."""
    for path in [*sorted(folder.glob("*.jsonl")), *sorted(folder.glob("logs/**/*"))]:
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _rest(folder: Path) -> dict[str, Path]:
    """What else the worker made: the report, provenance, folders of sinks."""
    shipped = {name for name in LEFT if name != "report.html"} | set(_SHIPPED)
    return {
        name: path
        for name, path in files_of(folder).items()
        if name.split("/")[0] not in shipped and not name.endswith(".jsonl") and not name.startswith(".")
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
