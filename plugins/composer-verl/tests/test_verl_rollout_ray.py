"""The rollout over a real local Ray: the replica starts the server, the adapter finds it and sends it weights."""

import asyncio
import os
from shutil import rmtree
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import ray
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from composer_core.errors import RunFailed, UsageError
from composer_core.hf.tiny import make_tiny
from composer_verl import external, rollout
from composer_verl.rollout import server_settings
from composer_verl.sampling import Request, Sampling, complete


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(made, seed=3)
    return made


def rollout_config(**changes):
    return RolloutConfig(
        name=external.rollout.NAME,
        dtype="float32",
        prompt_length=8,
        response_length=12,
        tensor_model_parallel_size=1,
        max_num_seqs=16,
        seed=7,
        **changes,
    )


def model_config(folder, **changes):
    return OmegaConf.create({"path": str(folder), "override_config": {}, **changes})


@pytest.fixture
def local_ray(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's socket paths have a limit of 107 characters, which pytest's own folders come close to.
    place = mkdtemp(prefix="ray")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=place,
    )
    yield
    ray.shutdown()
    rmtree(place, ignore_errors=True)


@ray.remote(num_cpus=0)
class Rank:
    """A trainer's rank, as far as the replica asks it anything: where it runs."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_replica_serves_what_the_adapter_sent(local_ray, folder, monkeypatch):
    monkeypatch.setattr(rollout, "BUCKET_BYTES", 20_000)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = rollout_config()

    async def run():
        replica = get_rollout_replica_class("composer_hf")(0, config, model_config(folder), gpus_per_node=1)
        await replica.init_hybrid(SimpleNamespace(workers=[Rank.remote()]))
        adapter = get_rollout_class("composer_hf")(config, {}, None, 0)
        await adapter.resume(["weights"])
        with pytest.raises(RunFailed) as early:
            await replica.server_handle.generate.remote("r", prompt_ids=[20], sampling_params={})
        await adapter.update_weights(iter(policy.state_dict().items()), global_steps=4, peft_config=None)
        await adapter.resume(["kv_cache"])
        outputs = await asyncio.gather(
            *(
                replica.server_handle.generate.remote("r", prompt_ids=[20 + i], sampling_params={"seed": i})
                for i in range(2)
            )
        )
        await replica.clear_kv_cache()
        await replica.sleep()
        return replica, str(early.value), outputs, await _refused(adapter, policy)

    replica, early, outputs, (refused, drawn) = asyncio.run(run())
    assert replica.server_address == "composer_hf_server_0_0"
    assert "no rollout: the trainer has not sent any weights yet" in early
    for i, output in enumerate(outputs):
        expected = complete(policy, [Request((20 + i,), Sampling(seed=i, max_tokens=12))], eos=[1])[0]
        assert output.token_ids == expected.tokens
        assert output.log_probs == pytest.approx(expected.logps, abs=1e-6)
        assert output.extra_fields == {"global_steps": 4}
    assert "the trainer sent weights that the rollout's model does not have: model.extra.weight" in refused
    assert drawn == len(policy.state_dict()) + 1


async def _refused(adapter, policy):
    """Send a name too many, first of all: the error, and how many tensors were drawn from the stream."""
    drawn = []

    def stream():
        for named in [("model.extra.weight", torch.zeros(6000)), *policy.state_dict().items()]:
            drawn.append(named[0])
            yield named

    with pytest.raises(RunFailed) as caught:
        await adapter.update_weights(stream(), global_steps=5)
    return str(caught.value), len(drawn)


def test_a_rollout_over_several_ranks_is_refused(folder):
    replica = rollout.HFReplica(0, rollout_config(data_parallel_size=2), model_config(folder), gpus_per_node=2)
    with pytest.raises(UsageError) as caught:
        asyncio.run(replica.init_hybrid(SimpleNamespace(workers=[None, None])))
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.tensor_model_parallel_size: composer_hf serves from one rank, not from 2\n"
        "  fix: set it to 1, or use rollout: vllm or sglang"
    )


def test_another_trainer_than_the_synchronous_one_is_refused(folder):
    replica = rollout.HFReplica(0, rollout_config(), model_config(folder), gpus_per_node=1)
    replica.rollout_mode = RolloutMode.STANDALONE
    with pytest.raises(RunFailed) as caught:
        asyncio.run(replica.launch_servers())
    assert str(caught.value) == "composer_hf serves verl's synchronous trainer only, not RolloutMode.STANDALONE"


def test_another_wire_format_is_refused(folder, monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "3")
    adapter = rollout.ServerAdapter(rollout_config(), {}, None)
    assert adapter.replica_rank == 3
    with pytest.raises(RunFailed) as caught:
        asyncio.run(adapter.update_weights(iter(()), "delta_flush"))
    assert str(caught.value) == "composer_hf takes named_tensors, not delta_flush"


def test_the_server_sees_its_ranks_gpu_and_on_a_cpu_none(monkeypatch):
    assert rollout._device_env("3") == {}
    monkeypatch.setattr(rollout, "get_platform", PlatformCUDA)
    assert rollout._device_env("3") == {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": "3",
    }


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "under model_config"])
def test_the_servers_settings_come_from_verls_configuration(folder, nested):
    changes = {"rope_theta": 5.0}
    override = {"attn_implementation": "eager", **({"model_config": changes} if nested else changes)}
    read = server_settings(rollout_config(max_model_len=15), model_config(folder, override_config=override))
    assert (read.model, read.dtype, read.load, read.max_batch, read.seed) == (str(folder), "float32", False, 16, 7)
    assert (read.prompt_length, read.response_length, read.window) == (8, 12, 15)
    assert (read.attention, read.override) == ("eager", changes)
