"""verl's two sides of a rollout, over `HFServer`: the replica that starts it, the adapter that sends it weights.

One server per rank, for verl's synchronous trainer alone (`init_hybrid`). verl knows replicas by a registry and
adapters by a private table; `register` writes both. What a server does stands in server.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from composer_core.errors import RunFailed, UsageError
from composer_verl.server import HFServer, ServerSettings
from composer_verl.weights import BUCKET_BYTES, Bucket, buckets

NAME = "composer_hf"
"""What `actor_rollout_ref.rollout.name` says to get this rollout."""


def register() -> None:
    """Make `NAME` known to verl in this process; again changes nothing."""
    RolloutReplicaRegistry.register(NAME, lambda: HFReplica)
    # verl 0.9 has no function that adds to this table; were it gone, workers would stop with "Rollout composer_hf with
    # mode async not found".
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{ServerAdapter.__name__}"


def server_name(replica_rank: int, *, suffix: str = "") -> str:
    """The Ray actor's name: adapters, in other processes, find the server by it."""
    return f"{NAME}_server_{replica_rank}_0{suffix}"


def server_settings(rollout: Any, model: Any) -> ServerSettings:
    """The server's settings from verl's `actor_rollout_ref.rollout` and `actor_rollout_ref.model`."""
    override = _plain(model.get("override_config") or {})
    attention = override.pop("attn_implementation", "sdpa")
    return ServerSettings(
        model=str(model.path),
        dtype=str(rollout.dtype),
        load=rollout.load_format != "dummy",
        prompt_length=int(rollout.prompt_length),
        response_length=int(rollout.response_length),
        max_batch=int(rollout.max_num_seqs),
        seed=int(rollout.seed),
        trust_remote_code=bool(model.get("trust_remote_code", False)),
        window=rollout.max_model_len,
        ignore_eos=bool(rollout.ignore_eos),
        attention=attention,
        override=override.get("model_config", override),  # verl reads both forms
    )


class HFReplica(RolloutReplica):
    """Starts the server of one rank, on that rank's machine and, where there is one, on its GPU."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is built.

        Raises:
            UsageError: a rollout over several ranks.
            RunFailed: another trainer than the synchronous one.
        """
        if self.world_size != 1:
            raise UsageError(
                f"composer_hf serves from one rank, not from {self.world_size}",
                at="actor_rollout_ref.rollout.tensor_model_parallel_size",
                fix="set it to 1, or use rollout: vllm or sglang",
            )
        if self.rollout_mode is not RolloutMode.HYBRID:
            raise RunFailed(f"composer_hf serves verl's synchronous trainer only, not {self.rollout_mode}")
        node, gpu = await self.workers[0].__ray_call__.remote(_whereabouts)
        name = server_name(self.replica_rank, suffix=self.name_suffix)
        server = (
            ray.remote(HFServer)
            .options(
                name=name,
                num_cpus=1,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": _device_env(gpu)},
            )
            .remote(server_settings(self.config, self.model_config))
        )
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class ServerAdapter(BaseRollout):
    """A trainer rank's link to its server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._found: Any = None

    @property
    def _server(self) -> Any:
        if self._found is None:  # looked for late: the server starts after the ranks
            self._found = ray.get_actor(server_name(self.replica_rank))
        return self._found

    async def resume(self, tags: list[str]) -> None:
        """Wake the server."""
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Let the server sleep."""
        await self._server.sleep.remote()

    async def update_weights(  # type: ignore[override]  # all that verl passes, by name, in place of **kwargs
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Send all `weights` to the server, part by part.

        Args:
            weights: names and tensors; drawing the next one is a collective of all ranks where they are sharded.
            wire_format: `named_tensors`.
            global_steps: the optimiser step that they come from.
            peft_config: the fields of peft's configuration, for a LoRA that is not merged.
            base_sync_done: with `peft_config`: whether these are the adapter's weights alone.

        Raises:
            RunFailed: another wire format, or weights that do not fit the server's model.
        """
        if wire_format != "named_tensors":
            raise RunFailed(f"composer_hf takes named_tensors, not {wire_format}")
        size = min(BUCKET_BYTES, self.config.checkpoint_engine.update_weights_bucket_megabytes << 20)
        terms = {"step": global_steps, "adapter": peft_config, "whole": peft_config is None or not base_sync_done}
        failure: Exception | None = None
        for bucket, first, last in _marked(buckets(weights, size=size)):
            if failure is None:
                try:
                    await self._server.update_weights.remote(bucket, first=first, last=last, **terms)
                except Exception as error:
                    # Raised after the loop: the other ranks wait for this one in every tensor that is still to come.
                    failure = error
        if failure is not None:
            raise failure


def _marked(parts: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool, bool]]:
    """Each part with whether it is the first and whether it is the last."""
    held: Bucket | None = None
    first = True
    for part in parts:
        if held is not None:
            yield held, first, False
            first = False
        held = part
    if held is not None:
        yield held, first, True


def _whereabouts(worker: Any) -> tuple[str, str]:
    """The node of a worker and its accelerator's id, "" without one; runs inside the worker."""
    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids().get(get_platform().ray_resource_name(), [])
    return context.get_node_id(), ids[0] if ids else ""


def _device_env(gpu: str) -> dict[str, str]:
    """The server shares its rank's accelerator, so it asks Ray for none; Ray must not hide that one from it then."""
    platform = get_platform()
    if platform.device_name == "cpu" or not gpu:
        return {}
    return {**dict.fromkeys(platform.ray_noset_envvars(), "1"), platform.visible_devices_envvar(): gpu}


def _plain(section: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    return dict(plain)
