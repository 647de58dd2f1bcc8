"""What code in a sandbox can do, tried for real in each: it is given this machine's programs and tries to get out."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from composer_core.errors import MissingError, UsageError
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.sandbox import Candidate, Limits
from composer_executors.sandbox.bubblewrap import BubblewrapSandbox
from composer_executors.sandbox.docker import DockerSandbox
from composer_executors.sandbox.memory import MemoryGroups

sys.path.insert(0, str(Path(__file__).with_name("services")))
from docker_service import IMAGE, docker_daemon, missing  # type: ignore[import-not-found]

LIMITS = Limits(seconds=20, memory_mb=128, processes=16, output_kb=64, disk_mb=4)


@pytest.fixture(scope="module")
def docker():
    with docker_daemon() as host, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host)
        yield DockerSandbox(SandboxSettings(use="docker", image=IMAGE, readable=["/usr"]))


@pytest.fixture(scope="module")
def bubblewrap():
    if shutil.which("bwrap") is None:
        missing("bwrap is not installed (apt-get install bubblewrap)")
    return BubblewrapSandbox(SandboxSettings())


@pytest.fixture(params=["bubblewrap", "docker"])
def sandbox(request):
    return request.getfixturevalue(request.param)


def run(sandbox, *argv, limits=LIMITS, **given):
    (result,) = sandbox.run_batch([Candidate(argv, **given)], limits)
    return result


def python(sandbox, code, **given):
    return run(sandbox, sandbox.python, "-c", textwrap.dedent(code), **given)


def ends(result):
    return (result.timed_out, result.oom, result.truncated)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_their_candidates(sandbox):
    candidates = [
        Candidate(("sh", "-c", f"sleep 0.{3 - n}; read line; echo $line {n} >&2; cat part/of.txt; exit {n}"),
                  f"in {n}\n".encode(), {"part/of.txt": f"file {n}".encode()})
        for n in range(4)
    ]  # fmt: skip
    results = sandbox.run_batch(candidates, LIMITS, workers=4)
    assert [(r.exit, r.stdout, r.stderr) for r in results] == [(n, f"file {n}", f"in {n} {n}\n") for n in range(4)]
    assert [ends(result) for result in results] == [(False, False, False)] * 4


def test_no_candidates_give_no_results(sandbox):
    assert sandbox.run_batch([], LIMITS) == []


def test_a_program_that_is_not_there_ends_as_in_a_shell(sandbox):
    result = run(sandbox, "no-such-program")
    assert result.exit == 127
    assert "no-such-program" in result.stderr


def test_a_signal_ends_as_in_a_shell(sandbox):
    assert run(sandbox, "sh", "-c", "sh -c 'kill -SEGV $$'; exit $?").exit == 128 + signal.SIGSEGV


def test_bytes_that_are_no_text_are_replaced(sandbox):
    assert run(sandbox, "printf", r"a\377b").stdout == "a�b"


# -- limits ------------------------------------------------------------------------------------------------------------


def test_time_is_limited_also_for_what_it_started(sandbox):
    begin = time.monotonic()
    result = run(sandbox, "sh", "-c", "echo begun; sleep 600 & setsid sleep 600 & wait", limits=Limits(seconds=2))
    assert (result.exit, result.stdout, ends(result)) == (137, "begun\n", (True, False, False))
    assert time.monotonic() - begin < 10


def test_memory_is_limited(sandbox):
    result = python(sandbox, "x = bytearray(1 << 30)")
    assert ends(result) == (False, True, False)
    assert result.exit != 0


def test_memory_of_several_processes_is_limited_together(sandbox):
    code = """
    import os, time
    for n in range(6):
        if os.fork() == 0:
            x = bytearray(b"x") * (40 << 20)
            time.sleep(60)
    for n in range(6):
        os.wait()
    """
    if getattr(sandbox, "memory_by", "group") == "process":
        pytest.skip("no memory group can be made here")
    result = python(sandbox, code, limits=Limits(seconds=5, memory_mb=128))
    assert result.oom


def test_memory_below_the_limit_is_to_be_had(sandbox):
    assert python(sandbox, "print(len(bytearray(b'x') * (60 << 20)))").stdout == f"{60 << 20}\n"


def test_a_fork_bomb_meets_the_limit_of_processes(sandbox):
    code = """
    import os, time
    n = 1
    try:
        while n < 200:
            if os.fork() == 0:
                time.sleep(60)
            n += 1
    except OSError as error:
        print(n, error.errno)
    """
    count, errno = python(sandbox, code).stdout.split()
    assert errno == "11"
    assert LIMITS.processes - 1 <= int(count) <= LIMITS.processes


def test_output_is_limited_to_both_streams_together(sandbox):
    result = run(sandbox, "sh", "-c", "head -c 40000 /dev/zero >&2; yes")
    assert ends(result) == (False, False, True)
    assert len(result.stderr) == 40000
    assert len(result.stdout) == (64 << 10) - 40000


def test_files_are_limited(sandbox):
    code = """
    for path in ("/tmp/big", "/dev/shm/big"):
        try:
            with open(path, "wb") as file:
                for n in range(64):
                    file.write(bytes(1 << 20))
        except OSError as error:
            print(n <= 4, error.errno in (27, 28))
    """  # File too large, No space left
    ignoring = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    assert python(sandbox, ignoring + textwrap.dedent(code)).stdout == "True True\nTrue True\n"


# -- walls -------------------------------------------------------------------------------------------------------------


def test_it_cannot_reach_this_machine_by_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"composer-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        code = f"""
        import os, socket
        for address, kind in ((("127.0.0.1", {server.getsockname()[1]}), 2), (("10.0.0.1", 80), 2), ("\\0{name}", 1)):
            try:
                socket.socket(kind).connect(address)
                print("connected to", address)
            except OSError as error:
                print(error.strerror)
        print(sorted(os.listdir("/sys/class/net")) if os.path.exists("/sys/class/net") else ["lo"])
        """
        assert python(sandbox, code).stdout.splitlines() == [
            "Connection refused",
            "Network is unreachable",
            "Connection refused",
            "['lo']",
        ]


def test_it_writes_to_tmp_alone(sandbox):
    code = """
    import os
    for path in ("/tmp", "/", "/usr", "/etc", "/candidate", "/dev", "/var/tmp", "/root", "/proc/sys/kernel"):
        try:
            open(os.path.join(path, "mine"), "w").write("x")
            print(path)
        except OSError:
            pass
    open("/candidate/given", "w")
    """
    result = python(sandbox, code, files={"given": b"x"})
    assert result.stdout == "/tmp\n"
    assert result.exit == 1
    assert not Path("/tmp/mine").exists()


def test_it_does_not_see_this_machines_files_and_processes(sandbox, tmp_path):
    (tmp_path / "secret").write_text("s")
    code = f"""
    import os
    print(os.path.exists({str(tmp_path)!r}), os.path.exists("/etc/shadow"), os.path.exists("/root/.ssh"))
    print(len([name for name in os.listdir("/proc") if name.isdigit()]) < 6)
    print(os.path.exists("/proc/{os.getpid()}/environ") and open("/proc/{os.getpid()}/environ").read())
    """
    assert python(sandbox, code).stdout == "False False False\nTrue\nFalse\n"


def test_it_gets_none_of_our_environment(sandbox, monkeypatch):
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "do not tell")
    result = run(sandbox, "sh", "-c", "env; cat /proc/1/environ 2>/dev/null || true")
    assert "HOME=/tmp" in result.stdout
    assert "do not tell" not in result.stdout


def test_it_has_no_rights(sandbox):
    code = """
    import os
    lines = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    print(lines["CapEff"], lines["CapPrm"], lines["CapAmb"], lines["NoNewPrivs"], os.getuid() != 0)
    try:
        os.setuid(0)
    except OSError as error:
        print(error.strerror)
    """
    zero = "0" * 16
    assert python(sandbox, code).stdout == f"{zero} {zero} {zero} 1 True\nOperation not permitted\n"


def test_it_cannot_signal_this_machine(sandbox):
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        result = run(sandbox, "sh", "-c", f"kill -9 {sleeper.pid}; kill -9 -1; echo still here")
        assert "No such process" in result.stderr
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def _marked(mark):
    """Processes of this machine with a word on their command line, zombies left out."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def test_nothing_of_it_is_left_however_it_ended(sandbox):
    mark = "600.0625"
    start = f"(setsid sleep {mark} &) ; sleep {mark} & (sleep {mark} & exec true) ; "
    limits = Limits(seconds=2)
    results = sandbox.run_batch(
        [Candidate(("sh", "-c", start + last)) for last in ("exit 3", "kill -9 $$", "wait; sleep 60", "yes")], limits
    )
    assert [r.timed_out for r in results] == [False, False, True, False]
    assert _marked(mark) == []


# -- bubblewrap, started by a user who is not root -------------------------------------------------------------------

AS_NOBODY = """
import os, sys
from pathlib import Path
import composer_executors.sandbox.bubblewrap as module
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.sandbox import Candidate, Limits
module.interpreter_folders = list  # this Python may lie where that user must not look
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sandbox = module.BubblewrapSandbox(SandboxSettings())
limits = Limits(seconds=10, memory_mb=64, processes=8)
count = "for n in 1 2 3 4 5 6 7 8 9; do sleep 5 & echo $n; done"
commands = ["id -u; touch /x /usr/x /dev/x; touch /tmp/x && echo wrote", "head -c 999999999 /dev/zero | tail", count]
print(sandbox.memory_by)
for result in sandbox.run_batch([Candidate(("sh", "-c", command)) for command in commands], limits, workers=1):
    print([result.exit, result.stdout.split(), result.oom, result.stderr.count("Read-only")])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; other users are tested as they are")
def test_a_user_who_is_not_root_has_the_same_walls(bubblewrap):
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "process",  # is limited in memory, as this user can make no memory group
        "[0, ['65534', 'wrote'], False, 3]",
        "[1, [], True, 0]",
        "[2, ['1', '2', '3', '4', '5', '6', '7'], False, 0]",  # with the shell that makes 8
    ]


# -- a launcher that dies ----------------------------------------------------------------------------------------------

KILLED = """
import sys
from composer_core.plugins.sandbox_settings import SandboxSettings
from composer_core.sandbox import Candidate, Limits
from composer_executors.sandbox.bubblewrap import BubblewrapSandbox
from composer_executors.sandbox.docker import DockerSandbox
image = sys.argv[1]
settings = SandboxSettings(use="docker", image=image, readable=["/usr"]) if image else SandboxSettings()
sandbox = DockerSandbox(settings) if image else BubblewrapSandbox(settings)
sandbox.run_batch([Candidate(("sh", "-c", "setsid sleep 600.125 & sleep 600.125"))], Limits(seconds=600))
"""


def _until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_in_bubblewrap_all_ends_when_its_launcher_is_killed(bubblewrap):
    launcher = subprocess.Popen([sys.executable, "-c", KILLED, ""])
    _until(lambda: len(_marked("600.125")) == 2)
    launcher.kill()
    launcher.wait()
    _until(lambda: _marked("600.125") == [])
    groups = MemoryGroups.found()  # removes what the launcher could not
    assert groups is None or list(groups.parent.glob(f"composer-sandbox-*-{launcher.pid}-*")) == []


def test_containers_of_a_killed_launcher_are_removed_by_the_next_one(docker):
    launcher = subprocess.Popen([sys.executable, "-c", KILLED, IMAGE])
    _until(lambda: len(_marked("600.125")) == 2)
    launcher.kill()
    launcher.wait()
    assert run(docker, "true").exit == 0  # and those that live are left alone
    DockerSandbox(SandboxSettings(use="docker", image=IMAGE))
    assert _marked("600.125") == []
    listed = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


# -- what cannot be made -----------------------------------------------------------------------------------------------


def test_without_bwrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError) as caught:
        BubblewrapSandbox(SandboxSettings())
    assert str(caught.value) == (
        "the sandbox bubblewrap needs the program bwrap, which is not installed\n  fix: apt-get install bubblewrap; "
        "a user who is not root also needs user namespaces: sysctl user.max_user_namespaces"
    )


def test_bubblewrap_that_does_not_work_here_says_why(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(MissingError) as caught:
        BubblewrapSandbox(SandboxSettings())
    assert caught.value.problem == (
        "the sandbox bubblewrap does not work here: bwrap: Creating new namespace failed: Operation not permitted"
    )


def test_settings_that_are_not_for_it_are_refused():
    with pytest.raises(UsageError, match=r"^sandbox\.image: bubblewrap starts from no image\n  fix: leave it out"):
        BubblewrapSandbox(SandboxSettings(image="python"))
    with pytest.raises(UsageError, match=r"^sandbox\.image: docker needs an image to start from\n  fix: sandbox: "):
        DockerSandbox(SandboxSettings(use="docker"))
    with pytest.raises(UsageError, match=r"^sandbox\.readable: no such file or folder: /nowhere$"):
        BubblewrapSandbox(SandboxSettings(readable=["/nowhere"]))


def test_without_a_daemon_docker_says_what_to_start(monkeypatch, tmp_path):
    if shutil.which("docker") is None:
        missing("docker is not installed (apt-get install docker.io)")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(MissingError) as caught:
        DockerSandbox(SandboxSettings(use="docker", image=IMAGE))
    assert "cannot reach its daemon: " in caught.value.problem
    assert caught.value.fix == (
        "start it (systemctl start docker), and let this user use it (group docker) or set DOCKER_HOST"
    )


def test_an_image_that_is_not_there_is_not_pulled(docker):
    with pytest.raises(MissingError) as caught:
        DockerSandbox(SandboxSettings(use="docker", image="composer-test:none"))
    assert caught.value.fix == "docker pull composer-test:none"
    assert caught.value.problem.startswith("the sandbox docker has no image 'composer-test:none': ")
