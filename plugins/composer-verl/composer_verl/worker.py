"""verl's worker of one rank, a Ray actor, with the core's loss in its engine.

The plan travels in verl's configuration, and what this process has installed must be what the plan was made with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from composer_core.errors import MissingError
from composer_core.run.rebuild import Rebuilt, rebuild
from composer_verl.checkpoint import export_model, load_engine, save_engine
from composer_verl.engine import Composed, ComposerEngine, register_engine
from composer_verl.objectives import is_native, policy_loss_name
from composer_verl.rows import unpacked
from composer_verl.settings import AHEAD
from composer_verl.shares import settings_of


class ComposerWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """See the module."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """See `ActorRolloutRefWorker`; the engine then has the losses of the plan.

        Raises:
            MissingError: a plugin of the plan is not installed here or has another version; or verl has made another
                engine than this package's.
        """
        join_on_cpu()
        rebuilt = rebuild(json.loads(unpacked(self.config.composer.plan)))
        register_engine()
        super().init_model()
        engine = self.actor.engine
        if not isinstance(engine, ComposerEngine):
            raise MissingError(f"verl made a {type(engine).__name__}, not the engine of composer-verl")
        if (wanted := composed(rebuilt, engine)) is not None:
            engine.compose(wanted)
            self.actor.set_loss_fn(engine.loss_function(self.loss_fn.keywords["config"]))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def composer_teach(self, data: TensorDict) -> TensorDict:
        """See `ComposerEngine.teach`; in the micro-batches that verl reads old log-probs in."""
        engine = self.actor.engine
        sizes = engine.engine_config
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=sizes.use_dynamic_bsz,
            max_token_len_per_gpu=sizes.infer_max_token_len_per_gpu,
            micro_batch_size_per_gpu=sizes.infer_micro_batch_size_per_gpu,
        )
        with engine.eval_mode():
            found: TensorDict = engine.teach(data).cpu()
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def composer_report(self) -> dict[str, Any]:
        """See `ComposerEngine.report`."""
        report: dict[str, Any] = self.actor.engine.report()
        return report

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def composer_save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint."""
        save_engine(self.actor.engine, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def composer_load(self, folder: str) -> None:
        """Go back to a checkpoint."""
        load_engine(self.actor.engine, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def composer_export(self, folder: str, dtype: str, merge: bool) -> None:
        """Write the policy as a Hugging Face folder, by rank 0: its adapter where it has one, unless `merge`."""
        export_model(self.actor.engine, Path(folder), dtype=getattr(torch, dtype), merge=merge)


def join_on_cpu() -> None:
    """Bring the ranks together over gloo where there is no GPU; verl would ask for it twice, which torch refuses."""
    if torch.cuda.is_available() or dist.is_initialized():
        return
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def composed(rebuilt: Rebuilt, engine: ComposerEngine) -> Composed | None:
    """What the plan wants of the engine; None where verl's own loss is all there is."""
    block = rebuilt.spec.loss.objective
    assert block is not None  # `rollouts: none` is refused when planned
    native = is_native(block)
    if native and not rebuilt.loss.active:
        return None
    return Composed(
        rebuilt.loss,
        native=native,
        policy_loss=policy_loss_name(block.name),
        longest=rebuilt.spec.train.max_completion_tokens,
        total_steps=rebuilt.spec.train.steps,
        pad_id=engine.model_config.tokenizer.pad_token_id,
        ahead=settings_of(rebuilt.spec).topk == AHEAD,
    )
