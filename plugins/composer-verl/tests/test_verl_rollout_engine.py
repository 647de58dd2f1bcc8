"""The adapter that verl's own FSDP2 engine sends, taken by our server without being merged.

As a program (`test_verl_rollout_engine.py FOLDER`) it is the trainer's rank and the server in one process, and prints
the largest distance between the server's log-probs and those of the engine's module.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.hf.tiny import make_tiny

PROMPT = [20, 21, 22]
PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_server_draws_with_the_engines_adapter(tmp_path):
    make_tiny(tmp_path / "model", seed=3)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "model")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-5


def engine_of(folder):
    import torch.distributed as dist
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    dist.init_process_group("gloo", init_method=f"file://{Path(folder).parent}/meeting", rank=0, world_size=1)
    engine = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=folder,
            external_lib="composer_verl.external",
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
            lora_rank=4,
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=PRECISION),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def randomize(module):
    """Move the adapters away from zero, where they say nothing."""
    import torch

    torch.manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            own = parameter.detach().to_local()  # all of it: there is one rank
            own.add_(torch.randn(own.shape), alpha=0.1)


async def drawn(engine, folder):
    """A completion of a server that took all the engine has to send."""
    from composer_verl.server import HFServer, ServerSettings
    from composer_verl.weights import buckets

    server = HFServer(
        ServerSettings(
            model=folder, dtype="float32", load=False, prompt_length=8, response_length=12, max_batch=4, seed=1
        )
    )

    async def send(named, **terms):
        parts = list(buckets(named, size=20_000))
        for i, part in enumerate(parts):
            await server.update_weights(part, first=i == 0, last=i == len(parts) - 1, step=1, **terms)

    # The order of verl's ActorRolloutRefWorker.update_weights.
    named, adapter = engine.get_per_tensor_param(base_sync_done=True)
    base, _ = engine.get_per_tensor_param(base_sync_done=False)
    await send(base, adapter=adapter)
    await send(named, adapter=adapter, whole=False)
    return await server.generate("r", prompt_ids=PROMPT, sampling_params={"seed": 1})


def main(folder):
    import torch

    engine = engine_of(folder)
    randomize(engine.module)
    output = asyncio.run(drawn(engine, folder))
    ids = torch.tensor([[*PROMPT, *output.token_ids]])
    with torch.no_grad():
        logits = engine.module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    print(float((expected - torch.tensor(output.log_probs)).abs().max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
