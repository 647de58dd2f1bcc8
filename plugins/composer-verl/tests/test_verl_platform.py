"""verl's platform for the CPU: who gets it, and that it answers what verl asks a device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform, platform_manager

import composer_verl.platform_cpu
from composer_verl.platform_cpu import PlatformCPU


@pytest.fixture
def accelerator_files(tmp_path, monkeypatch):
    """What a driver leaves behind on this machine: nothing, until the test makes it."""
    monkeypatch.setattr(composer_verl.platform_cpu, "ACCELERATOR_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_a_machine_without_an_accelerator_gets_the_cpu(accelerator_files, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(PlatformBase, "check_smi_command", staticmethod(lambda command: False))
    assert platform_manager._detect_platform_name() == "cpu"


def test_an_actor_without_a_gpu_on_a_gpu_machine_does_not(accelerator_files):
    assert PlatformCPU().is_platform_available()
    (accelerator_files / "nvidiactl").touch()
    assert not PlatformCPU().is_platform_available()


def test_a_process_that_sees_a_gpu_does_not(accelerator_files, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not PlatformCPU().is_platform_available()


def test_verls_own_platforms_are_asked_first():
    names = PlatformRegistry.registered_names()
    own = [name for name in names if PlatformRegistry.get(name).__module__.startswith("verl.")]
    assert len(own) == 3
    assert names.index("cpu") > max(names.index(name) for name in own)


@pytest.mark.slow
def test_importing_verl_registers_it_and_the_module_is_light():
    program = (
        "import sys, composer_verl.platform_cpu as p\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "assert PlatformRegistry.get('cpu').__module__ == p.__name__\n"
        "print(sorted(m for m in sys.modules if m.startswith('composer_')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['composer_verl', 'composer_verl.platform_cpu']"


def test_the_device_module_answers_what_verls_sources_ask_of_it():
    import re

    import verl

    # Modules that a CPU run with FSDP2 goes through; kernels and other checkpoint engines ask for streams.
    root = Path(verl.__file__).parent
    files = [
        "protocol.py",
        "single_controller/base/worker.py",
        "utils/checkpoint/checkpoint_manager.py",
        "utils/distributed.py",
        "utils/flops_counter.py",
        "utils/fsdp_utils.py",
        "utils/profiler/performance.py",
        "utils/torch_functional.py",
        "workers/engine_workers.py",
    ]
    asked = {name for file in files for name in re.findall(r"get_torch_device\(\)\.(\w+)", (root / file).read_text())}
    assert {"empty_cache", "synchronize", "get_rng_state", "max_memory_allocated"} <= asked
    module = PlatformCPU().device_module
    assert [name for name in sorted(asked) if not callable(getattr(module, name, None))] == []


def test_the_random_state_of_a_checkpoint_comes_back():
    module = PlatformCPU().device_module
    module.manual_seed(5)
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_it_is_this_processs_platform_where_nothing_else_is():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    platform = get_platform()
    assert (platform.device_name, platform.vendor_name) == ("cpu", "cpu")
    assert platform.communication_backend_name() == "gloo"
    assert torch.zeros(1).to(platform.current_device()).device == torch.device("cpu")
