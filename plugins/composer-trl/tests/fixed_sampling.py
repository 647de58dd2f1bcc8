"""A local plugin: the backend `trl` with completions that depend on the prompt and the place in its group alone.

So one process and several train on the same rollouts. Each rank leaves a digest of its weights, and its process id,
beside the run's files.
"""

import json
import os

import torch.distributed as dist
from trl import GRPOTrainer

from composer_core.plugins.contributions import BackendPlugin
from composer_core.plugins.hookspecs import hookimpl
from composer_trl import backend
from composer_trl.config import derive
from composer_trl.objectives import NATIVE
from composer_trl.plugin import PROVIDED
from composer_trl.settings import TrlSettings


def fixed_completions(trainer, prompt_ids, images, fields, num_generations, has_tool_images=False):
    """In the place of `GRPOTrainer._generate_single_turn`."""
    start, count = 20, 60  # ids of plain characters in the built-in tokenizer
    texts = []
    for number, prompt in enumerate(prompt_ids):
        member, base = number % num_generations, sum(prompt)
        texts.append([start + (base + 7 * member + 3 * k * (member + 1)) % count for k in range(3 + member)])
    return [[*ids, trainer.processing_class.eos_token_id] for ids in texts], None


class FixedSampling(backend.TrlBackend):
    def train(self, run, loss):
        number = dist.get_rank() if dist.is_initialized() else 0
        beside = run.scratch.parents[1]
        (beside / f"pid-{number}").write_text(str(os.getpid()))
        original, save = GRPOTrainer._generate_single_turn, backend._save
        GRPOTrainer._generate_single_turn = fixed_completions

        def digest(trainer, run):
            sums = {name: float(p.detach().double().sum()) for name, p in trainer.model.named_parameters()}
            (beside / f"weights-{number}.json").write_text(json.dumps(sums))
            save(trainer, run)

        backend._save = digest
        try:
            return super().train(run, loss)
        finally:
            GRPOTrainer._generate_single_turn, backend._save = original, save


@hookimpl
def composer_backends():
    yield BackendPlugin(
        name="trl-fixed",
        summary="trl on rollouts that do not depend on a random generator",
        target=f"{__name__}:FixedSampling",
        settings=TrlSettings,
        native_objectives=frozenset(NATIVE),
        provides=lambda spec: PROVIDED,
        honours=frozenset({"data.eval", "data.pairs"}),
        derive=derive,
        processes=lambda settings: settings.processes,
    )
