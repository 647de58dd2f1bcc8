import json
import platform
import shutil
import subprocess
import sys

import pytest

from composer_core.run import provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "-q")
    (tmp_path / "spec.yaml").write_text("steps: 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_clean_repository_gives_its_commit(repository):
    state = provenance.git_state(repository)
    assert len(state.pop("commit")) == 40
    assert state == {"dirty": False, "diff": "", "diff_bytes": 0, "diff_cut": False}


def test_changes_are_kept_up_to_a_limit(repository, monkeypatch):
    (repository / "spec.yaml").write_text("steps: 2\n")
    state = provenance.git_state(repository)
    assert state["dirty"]
    assert "-steps: 1\n+steps: 2\n" in state["diff"]
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 10)
    cut = provenance.git_state(repository)
    assert cut["diff"] == state["diff"][:10]
    assert cut["diff_cut"]
    assert cut["diff_bytes"] == state["diff_bytes"]


def test_programs_that_a_repository_configures_for_its_diffs_are_not_run(repository):
    git(repository, "config", "diff.external", f"touch {repository / 'ran'};")
    (repository / "spec.yaml").write_text("steps: 2\n")
    assert "+steps: 2" in provenance.git_state(repository)["diff"]
    assert not (repository / "ran").exists()


def test_no_repository_and_no_git_are_no_failure(tmp_path, monkeypatch):
    assert provenance.git_state(tmp_path / "nonesuch") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(tmp_path) is None


def test_no_value_of_the_environment_gets_in(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "marker-5d41402a")
    facts = [
        provenance.control_facts(["composer-run", "spec.yaml"], tmp_path),
        provenance.worker_facts(seed=3, plugins=[{"name": "composer-core"}]),
    ]
    assert "marker-5d41402a" not in json.dumps(facts)


def test_the_worker_records_versions_plugins_and_seed():
    facts = provenance.worker_facts(seed=3, plugins=[{"name": "x.py", "sha256": "00"}])
    assert facts["seed"] == 3
    assert facts["plugins"] == [{"name": "x.py", "sha256": "00"}]
    assert facts["versions"]["python"] == platform.python_version()
    assert {"composer-core", "torch", "pydantic"} <= set(facts["versions"])


def test_asking_for_the_host_does_not_load_torch():
    code = "import sys; from composer_core.run.provenance import host; host(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
