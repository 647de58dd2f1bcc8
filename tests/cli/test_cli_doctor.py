"""`composer-run doctor` as a command; what it looks at is tested in tests/unit/run/test_run_doctor.py."""

import json
import os
import subprocess
import sys

import pytest

from composer_core.cli.main import main
from composer_core.run import doctor
from composer_core.run.doctor import Finding, Level


@pytest.fixture
def composer(tmp_path, monkeypatch, capsys):
    """`composer("doctor")` -> (exit code, stdout, stderr), where two things are found."""
    monkeypatch.chdir(tmp_path)
    found = [Finding("python", Level.OK, "3.11"), Finding("disk for runs", Level.WARN, "little", "make room")]
    monkeypatch.setattr(doctor, "examine", lambda registry, runs, cache, *, deep: found)

    def run(line):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    run.found = found
    return run


def test_each_finding_is_a_line_and_its_fix_another(composer):
    assert composer("doctor") == (
        0,
        """\
ok    python         3.11
warn  disk for runs  little
                     fix: make room
""",
        "",
    )


def test_a_failure_ends_with_3(composer):
    composer.found.append(Finding("memory", Level.FAIL, "none", "buy some"))
    code, out, _ = composer("doctor")
    assert code == 3
    assert out.endswith("fail  memory         none\n                     fix: buy some\n")


def test_json_is_one_document(composer):
    code, out, err = composer("doctor --json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "ok": True,
        "findings": [
            {"name": "python", "level": "ok", "found": "3.11", "fix": ""},
            {"name": "disk for runs", "level": "warn", "found": "little", "fix": "make room"},
        ],
    }


def test_on_this_machine_it_finds_python_and_imports_no_torch(tmp_path):
    program = (
        "import sys; from composer_core.cli.main import main\n"
        "try: main(['--no-plugins', 'doctor'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'trl') if name in sys.modules])"
    )
    environment = {**os.environ, "COMPOSER_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["ok", "python"]
    assert lines[-1] == "[]"
    assert list(tmp_path.iterdir()) == []
