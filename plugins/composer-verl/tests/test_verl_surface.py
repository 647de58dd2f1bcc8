"""What the check at start says of a verl that differs, and of one that did not load our platform."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import ray
import torch
from transfer_queue import KVBatchMeta
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.rollout import base

import composer_verl.platform_cpu
from composer_verl import surface
from composer_verl.rollout import ServerAdapter

OURS = EntryPoint("composer_cpu", "composer_verl.platform_cpu", "verl.plugins")


def test_today_s_install_has_no_problems_and_asking_starts_no_ray(monkeypatch):
    monkeypatch.delenv(surface.POLICY, raising=False)
    assert surface.problems() == []
    assert not ray.is_initialized()


def test_another_release_is_named(monkeypatch):
    monkeypatch.setattr(surface, "version", lambda name: "0.10.0")
    assert surface.problems() == ["verl 0.10.0 is installed; composer-verl is written against verl 0.9"]


def test_a_method_with_other_arguments_is_named_with_both(monkeypatch):
    monkeypatch.setattr(FSDPEngineWithLMHead, "optimizer_step", lambda self, closure: None)
    assert surface.problems() == [
        "verl 0.9.1: FSDPEngineWithLMHead.optimizer_step takes (self, closure), expected (self)"
    ]


def test_a_method_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(FSDPEngine, "lr_scheduler_step")
    monkeypatch.delattr(BaseEngine, "lr_scheduler_step")
    assert surface.problems() == [
        "verl 0.9.1: verl.workers.engine.fsdp.transformer_impl has no FSDPEngineWithLMHead.lr_scheduler_step"
    ]


def test_a_method_of_ours_that_verl_calls_no_more_is_named(monkeypatch):
    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        self.forward_backward_batch(data, loss_function)
        self.optimizer.step()

    monkeypatch.setattr(BaseEngine, "train_batch", train_batch)
    assert surface.problems() == ["verl 0.9.1: FSDPEngineWithLMHead.train_batch no longer uses optimizer_step"]


def test_an_attribute_that_is_gone_is_named(monkeypatch):
    def wait(self, partition_id, last_debug_time):
        return last_debug_time

    monkeypatch.setattr(ReplayBuffer, "__init__", lambda self: None)
    monkeypatch.setattr(ReplayBuffer, "_wait_for_next_poll", wait)
    assert surface.problems() == ["verl 0.9.1: ReplayBuffer no longer uses poll_interval"]


def test_a_field_that_is_gone_is_named(monkeypatch):
    fields = {name: field for name, field in KVBatchMeta.__dataclass_fields__.items() if name != "tags"}
    monkeypatch.setattr(KVBatchMeta, "__dataclass_fields__", fields)
    assert surface.problems() == ["verl 0.9.1: KVBatchMeta has no field tags"]


def test_a_private_table_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(base, "_ROLLOUT_REGISTRY")
    assert surface.problems() == ["verl 0.9.1: verl.workers.rollout.base has no _ROLLOUT_REGISTRY"]


def test_a_private_name_of_rays_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER")
    assert surface.problems() == ["ray 2.60.0: ray._private.ray_constants has no ENABLE_RAY_CLUSTER"]


def test_a_module_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.utils.debug", None)
    assert surface.problems() == [
        "verl 0.9.1: verl.utils.debug cannot be imported: import of verl.utils.debug halted; None in sys.modules"
    ]


def test_an_abstract_method_that_we_do_not_have_is_named(monkeypatch):
    monkeypatch.setattr(ServerAdapter, "__abstractmethods__", frozenset({"pause"}))
    assert surface.problems() == ["verl 0.9.1: it wants pause of ServerAdapter"]


# -- the platform ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unregistered(monkeypatch):
    """A machine without a GPU on which verl has not loaded our platform."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(surface.POLICY, raising=False)
    others = {name: kind for name, kind in PlatformRegistry._platforms.items() if name != "cpu"}
    monkeypatch.setattr(PlatformRegistry, "_platforms", others)
    monkeypatch.setattr(surface, "entry_points", lambda group: [OURS])
    return monkeypatch


def test_metadata_without_the_entry_point(unregistered):
    unregistered.setattr(surface, "entry_points", lambda group: [])
    assert list(surface.plugin_problems()) == [
        "this machine has no GPU, and verl finds no entry point composer_cpu in the group verl.plugins: the metadata "
        "of composer-verl is incomplete; install it again"
    ]


@pytest.mark.parametrize("policy", ["none", "other,another"])
def test_a_variable_that_keeps_it_out_of_verl_s_processes(unregistered, policy):
    unregistered.setenv(surface.POLICY, policy)
    assert list(surface.plugin_problems()) == [
        f"this machine has no GPU, and VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading its platform for "
        "one; unset it, or add composer_cpu"
    ]


def test_a_list_that_names_it_keeps_nothing_out(unregistered):
    unregistered.setenv(surface.POLICY, "other, composer_cpu")
    unregistered.setattr(PlatformRegistry, "_platforms", {"cpu": composer_verl.platform_cpu.PlatformCPU})
    assert list(surface.plugin_problems()) == []


def test_the_error_that_verl_swallowed_is_told(unregistered):
    broken = EntryPoint("composer_cpu", "composer_verl.not_there", "verl.plugins")
    unregistered.setattr(surface, "entry_points", lambda group: [broken])
    assert list(surface.plugin_problems()) == [
        "this machine has no GPU, and verl could not load its platform for one, composer_verl.not_there: "
        "ModuleNotFoundError: No module named 'composer_verl.not_there'"
    ]


def test_a_platform_that_loads_only_now_is_told_too(unregistered):
    assert list(surface.plugin_problems()) == [
        "this machine has no GPU, and verl could not load its platform for one, composer_verl.platform_cpu, which can "
        "be loaded now: something else failed while verl was imported; start again"
    ]


def test_a_platform_that_verl_could_not_make(unregistered):
    class Unfinished(composer_verl.platform_cpu.PlatformCPU):
        """Of a verl that asks for more."""

    Unfinished.__abstractmethods__ = frozenset({"warp_size"})
    unregistered.setattr(PlatformRegistry, "_platforms", {"cpu": Unfinished})
    assert list(surface.plugin_problems()) == [
        "this machine has no GPU, and verl's platform for one lacks warp_size, which this verl wants"
    ]


def test_a_machine_with_gpus_needs_no_platform_of_ours(unregistered):
    unregistered.setattr(torch.cuda, "is_available", lambda: True)
    unregistered.setattr(surface, "entry_points", lambda group: [])
    assert list(surface.plugin_problems()) == []


@pytest.mark.slow
def test_in_a_real_process_verl_says_nothing_and_the_check_does():
    program = (
        "from composer_verl.settings import VerlSettings\n"
        "from composer_verl.backend import VerlBackend\n"
        "print(VerlBackend(VerlSettings()).check())"
    )
    environment = {**os.environ, surface.POLICY: "none"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == (
        "['this machine has no GPU, and VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading its platform for one; "
        "unset it, or add composer_cpu']"
    )


# -- what is looked at -------------------------------------------------------------------------------------------------

PACKAGE = Path(surface.__file__).parent
PROBE = {"probe.py"}
"""Not part of a run: it fails by itself where verl differs."""


def used_of_verl(file):
    """`module:name` for each name of theirs that a file imports, or reads of an imported module."""
    tree = ast.parse(file.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if is_theirs(alias.name)}
        if isinstance(node, ast.ImportFrom) and is_theirs(node.module):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if is_module(whole):
                    modules[alias.asname or alias.name] = whole
                else:
                    yield f"{node.module}:{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}:{node.attr}"


def is_theirs(module):
    """Whether it is verl's or its queue's, or private of Ray's."""
    return module.split(".")[0] in ("verl", "transfer_queue") or module.startswith("ray._")


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_all_that_is_imported_of_verl_is_looked_at():
    files = [file for file in sorted(PACKAGE.glob("*.py")) if file.name not in PROBE]
    places = (*surface.SIGNATURES, *surface.FIELDS, *surface.USED, *surface.NAMES, *surface.RAY)
    looked_at = {re.match(r"[\w.]+:\w+", place)[0] for place in places}
    used = {place for file in files for place in used_of_verl(file)}
    assert len(used) > 30
    assert used <= looked_at, sorted(used - looked_at)
