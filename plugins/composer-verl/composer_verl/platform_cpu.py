"""The CPU as one of verl's platforms, so that its trainer runs on a machine without an accelerator.

verl imports this module at the end of `import verl`, in each of its processes (entry point `verl.plugins`), so it
imports nothing but torch and verl's registry. verl asks its platforms in the order of registration: the accelerators
it knows come first, and this one answers only where the machine shows no sign of any. `VERL_PLATFORM=cpu`, or any
other name, decides instead of the search. Rollouts, engines and trainers are registered elsewhere (external.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"

ACCELERATOR_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/davinci_manager")
"""What the drivers of NVIDIA, AMD and Ascend leave behind. A Ray actor without a GPU of its own sees none through
torch (`CUDA_VISIBLE_DEVICES` is empty there), and still has to speak of the platform that its trainer runs on."""


class CPUDevice(ModuleType):
    """`torch.cpu` with what verl calls on the module of a device and `torch.cpu` lacks: memory, names, random state."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def empty_cache(self) -> None:
        """Nothing to empty: CPU memory is not cached."""

    def ipc_collect(self) -> None:
        """Nothing is shared by handles."""

    def memory_allocated(self, device: Any = None) -> int:
        """0 bytes of device memory."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """No peak is kept."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of device memory: none."""
        return 0, 0

    def get_device_name(self, device: Any = None) -> str:
        """A name that is in none of verl's tables of FLOPS, so that it reports no utilisation."""
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The two fields of `torch.cuda`'s that verl reads."""
        return SimpleNamespace(name="CPU", total_memory=0)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator of this process."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of torch's generator: verl's checkpoints hold it twice, as the CPU's and as the device's."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Put a state back."""
        torch.set_rng_state(state)


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """verl's questions about its platform, answered for a CPU."""

    @property
    def device_name(self) -> str:
        """The device's type in torch."""
        return NAME

    @property
    def vendor_name(self) -> str:
        """With `device_name`, the key of the engines made for this platform."""
        return NAME

    @property
    def device_module(self) -> ModuleType:
        """What verl uses in place of `torch.cuda`."""
        return CPUDevice("verl_cpu_device")

    def is_available(self) -> bool:
        """A CPU always is."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether this machine, not only this process, is without an accelerator that torch could use."""
        if torch.cuda.is_available() or hasattr(torch, "npu"):
            return False
        return not any(Path(file).exists() for file in ACCELERATOR_FILES)

    def current_device(self) -> Any:
        """A device without an index: verl passes it on to torch, where "cpu:0" is another device than "cpu"."""
        return torch.device(NAME)

    def device_count(self) -> int:
        """One device per process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Work on a CPU is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator of this process."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generator of this process."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings verl passes are those of CUDA's allocator."""

    def empty_cache(self) -> None:
        """Nothing to empty: CPU memory is not cached."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """(None, None): no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """The collectives that torch has for the CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets it for the logical GPUs it counts; nothing here reads it."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler range."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """A GPU: verl's pools count nothing else, so a local Ray is started with as many logical ones as ranks."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None: Ray may hide devices that are not there."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device memory, no handles to it."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""
        return None
