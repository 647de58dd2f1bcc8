import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_core.plugins.contributions import BackendPlugin, RewardPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, PluginProblem, Registry
from composer_core.run import doctor
from composer_core.run.doctor import GIB, TESTED, Finding, Level, examine


@pytest.fixture
def look(tmp_path, monkeypatch):
    """`look("threads")`: the finding of that name, on a machine of 8 cores without containers."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(doctor, "_text", lambda path: files.get(str(path), ""))
    for name in ("OMP_NUM_THREADS", *doctor.OFFLINE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    files = {}

    def find(name, *, registry=None, runs=tmp_path / "runs", deep=False, **contents):
        files.update({path.replace("__", "/"): text for path, text in contents.items()})
        findings = examine(registry or Registry(), runs, tmp_path / "cache", deep=deep)
        found = [finding for finding in findings if finding.name == name]
        assert len(found) == 1, findings
        return found[0]

    find.files = files
    return find


def level_and_text(finding):
    return str(finding.level), finding.found, finding.fix


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_that_nobody_set_are_right_on_a_whole_machine(look):
    assert level_and_text(look("threads")) == ("ok", "8 usable cores, OMP_NUM_THREADS not set", "")


def test_a_container_s_quota_is_smaller_than_the_machine_and_torch_does_not_know(look):
    look.files["/sys/fs/cgroup/cpu.max"] = "250000 100000\n"
    fix = "export OMP_NUM_THREADS=2, or executor: {use: inline, threads: 2} in the spec"
    assert level_and_text(look("threads")) == ("warn", "2 usable cores of 8, OMP_NUM_THREADS not set", fix)


def test_an_unlimited_quota_is_none(look):
    look.files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert look("threads").found.startswith("8 usable cores,")


@pytest.mark.parametrize(("value", "level"), [("1", "ok"), ("8", "ok"), ("9", "warn"), ("0", "warn"), ("many", "warn")])
def test_the_threads_variable_is_compared_with_the_cores(look, monkeypatch, value, level):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    found = look("threads")
    assert (str(found.level), found.found) == (level, f"8 usable cores, OMP_NUM_THREADS={value}")
    assert bool(found.fix) == (level == "warn")


# -- memory and disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kib", "level"), [(4 * GIB // 1024, "ok"), (4 * GIB // 1024 - 1, "warn"), (GIB // 1024 - 1, "fail")]
)
def test_memory_that_is_available(look, kib, level):
    look.files["/proc/meminfo"] = f"MemTotal: 99999999 kB\nMemAvailable:   {kib} kB\n"
    assert str(look("memory").level) == level


def test_a_container_s_memory_limit_counts(look):
    look.files["/proc/meminfo"] = f"MemAvailable: {64 * GIB // 1024} kB\n"
    look.files["/sys/fs/cgroup/memory.max"] = f"{8 * GIB}\n"
    look.files["/sys/fs/cgroup/memory.current"] = f"{6 * GIB}\n"
    assert level_and_text(look("memory"))[:2] == ("warn", "2.0 GiB available")


@pytest.mark.parametrize(("free", "level"), [(10 * GIB, "ok"), (10 * GIB - 1, "warn"), (GIB - 1, "fail")])
def test_room_is_looked_for_where_the_folder_will_be(look, monkeypatch, tmp_path, free, level):
    asked = []
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: asked.append(path) or usage)
    assert str(look("disk for runs", runs=tmp_path / "not" / "there").level) == level
    assert asked == [tmp_path, tmp_path]  # runs and cache: neither is there yet


def test_a_folder_that_cannot_be_made_fails(look, tmp_path):
    (tmp_path / "file").write_text("")
    found = look("disk for runs", runs=tmp_path / "file" / "runs")
    assert level_and_text(found) == (
        "fail",
        f"{tmp_path}/file/runs: {tmp_path}/file cannot be written",
        "set COMPOSER_RUNS to another folder",
    )


# -- packages ----------------------------------------------------------------------------------------------------------


class Offers:
    @hookimpl
    def composer_rewards(self):
        yield RewardPlugin(name="gone", summary="", target="nowhere_at_all:Gone", install_hint="pip install nowhere")


def test_plugins_with_problems_fail_and_disabled_ones_warn(look):
    registry = Registry(
        problems=[
            PluginProblem(Owner("acme", "1"), "import", "ZeroDivisionError: division by zero", "pip install -U acme"),
            PluginProblem(Owner("other", "1"), "disabled", "by --no-plugins"),
        ]
    )
    assert look("plugin acme", registry=registry) == Finding(
        "plugin acme", Level.FAIL, "import: ZeroDivisionError: division by zero", "pip install -U acme"
    )
    assert look("plugin other", registry=registry).level is Level.WARN


def test_deep_imports_every_contribution(look):
    registry = Registry()
    registry.add(Offers(), Owner("acme", "1.0"))
    assert look("plugin acme", registry=registry) == Finding("plugin acme", Level.OK, "1.0, 1 contributions")
    found = look("reward gone", registry=registry, deep=True)
    assert (found.level, found.fix) == (Level.FAIL, "pip install nowhere")
    assert found.found.endswith("No module named 'nowhere_at_all'")
    assert look("contributions", registry=registry, deep=True).found == "0 of 1 load and can be made"


class Trainer:
    """Of whom a doctor may ask more than of others."""

    def __init__(self, settings):
        pass

    def check(self):
        return []

    def train(self, run, loss):
        raise AssertionError("a doctor trains nothing")


class Sound(Trainer):
    def diagnose(self):
        yield Finding("kernels", Level.OK, "as the core's")
        yield Finding("network", Level.WARN, "slow", "another one")


class Unsound(Sound):
    def diagnose(self):
        yield Finding("kernels", Level.OK, "as the core's")
        raise ZeroDivisionError("division by zero")


class Absent(Sound):
    def check(self):
        return ["it is another release"]


@pytest.fixture
def backend():
    """`backend(Sound)`: a registry with that trainer alone, called `it`."""

    def registry(kind):
        class Offer:
            @hookimpl
            def composer_backends(self):
                yield BackendPlugin(name="it", summary="", target=f"{__name__}:{kind.__name__}")

        found = Registry()
        found.add(Offer(), Owner("acme", "1.0"))
        return found

    return registry


def deep(registry, tmp_path):
    findings = examine(registry, tmp_path, tmp_path, deep=True)
    after = next(i for i, finding in enumerate(findings) if finding.name == "devices") + 1
    return [(f.name, str(f.level), f.found, f.fix) for f in findings[after:]]


def test_a_backend_adds_what_it_finds(backend, tmp_path):
    assert deep(backend(Sound), tmp_path) == [
        ("kernels", "ok", "as the core's", ""),
        ("network", "warn", "slow", "another one"),
        ("contributions", "ok", "1 of 1 load and can be made", ""),
    ]


def test_a_backend_that_has_nothing_more_to_say_adds_nothing(backend, tmp_path):
    assert deep(backend(Trainer), tmp_path) == [("contributions", "ok", "1 of 1 load and can be made", "")]


def test_a_diagnosis_that_breaks_is_a_finding(backend, tmp_path):
    assert deep(backend(Unsound), tmp_path) == [
        ("kernels", "ok", "as the core's", ""),
        ("backend it", "fail", "its diagnosis ended with ZeroDivisionError: division by zero", ""),
        ("contributions", "ok", "1 of 1 load and can be made", ""),
    ]


def test_a_backend_whose_check_fails_is_asked_no_more(backend, tmp_path):
    assert deep(backend(Absent), tmp_path) == [
        ("backend it", "fail", "it is another release", ""),
        ("contributions", "ok", "0 of 1 load and can be made", ""),
    ]


def test_another_release_than_the_tested_one_is_a_warning(look, monkeypatch):
    monkeypatch.setattr(
        doctor, "version", lambda name: {"torch": "2.13.0+cpu", "transformers": "5.11.2"}.get(name, "1")
    )
    assert level_and_text(look("torch")) == ("ok", "2.13.0+cpu, tested with 2.13", "")
    assert level_and_text(look("transformers")) == (
        "warn",
        "5.11.2, tested with 5.10",
        "pip install 'transformers==5.10.*'",
    )


def test_the_tested_releases_are_those_of_the_constraints():
    text = (Path(__file__).parents[3] / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", text, re.MULTILINE))
    assert {name: pinned[name] for name in TESTED} == TESTED


REQUIREMENTS = [
    # needed and not there; needed and too old; in an extra and not there; in an extra and too old; elsewhere
    "absent>=1",
    "pluggy>=99",
    "absent2>=1 ; extra == 'hf'",
    "pydantic>=99 ; extra == 'hf'",
    "pytest>=99 ; sys_platform == 'plan9'",
    "packaging>=20",
]


def test_unmet_requirements_of_composer_s_packages(look, monkeypatch):
    metadata = type("Metadata", (dict,), {"get_all": lambda self, name: ["hf"]})(Name="composer-acme")
    installed = [
        SimpleNamespace(metadata=metadata, requires=REQUIREMENTS),
        SimpleNamespace(metadata={"Name": "acme"}, requires=["absent3"]),
    ]
    monkeypatch.setattr(doctor, "distributions", lambda: installed)
    found = [f for f in examine(Registry(), Path("runs"), Path("cache"), deep=False) if " needs " in f.name]
    assert [(finding.name, str(finding.level)) for finding in found] == [
        ("composer-acme needs absent", "fail"),
        ("composer-acme needs pluggy", "fail"),
        ("composer-acme needs pydantic", "warn"),
    ]
    assert (found[0].found, found[0].fix) == ("not installed", "pip install 'absent>=1'")
    assert found[1].found.endswith(" is installed, >=99 is needed")


# -- hugging face ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "level", "found"),
    [
        ({}, "ok", "models and datasets may be downloaded"),
        (
            {"HF_HUB_OFFLINE": "1"},
            "ok",
            "offline: models and datasets must be in its cache, HF_HUB_OFFLINE=1",
        ),
        ({"TRANSFORMERS_OFFLINE": "yes"}, "warn", "TRANSFORMERS_OFFLINE=yes"),
        ({"HF_HUB_OFFLINE": "0"}, "ok", "models and datasets may be downloaded, HF_HUB_OFFLINE=0"),
    ],
    ids=["online", "offline", "half", "said-to-be-online"],
)
def test_offline_settings(look, monkeypatch, settings, level, found):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert level_and_text(look("hugging face"))[:2] == (level, found)
