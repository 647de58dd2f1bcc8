"""One optimiser step of verl's engine with the channels, beside the core's own: what `composer-run doctor` tries out.

    python -m composer_verl.probe      its last line is JSON: one object for each layout of batches that runs here have

A tiny model, four rollouts, two hints and two pairs; one process, no Ray. On a GPU it runs what no test of ours could:
the device's kernels, and flash-attn's with packed sequences. `diagnosis.py` reads the result.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings, replay_needs, sdpo_needs
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import RolloutText, Row
from composer_core.testing.accumulate import Window, accumulate_gradients
from composer_verl.engine import Composed, ComposerEngine
from composer_verl.rows import FIELD, Sample, encode

POLICY_LOSS = "composer_probe"
MICRO_BATCH = 2
LONGEST = 8
TEMPERATURE = 0.8
ADVANTAGES = (1.0, -1.0, 0.5, -0.25)
PROMPTS = ([10, 11, 12], [10, 11, 12], [13], [13])
ANSWERS = ([20, 21, 22, 23, 1], [30, 31, 1], [40, 41, 42, 43, 44, 45, 46, 1], [1])
HINTED = (0, 2)
"""Rollouts that the teacher reads again, with a hint in front."""
HINT = [90, 91]
PAIRS = [pair_row([10, 11], [50, 51], [60], reference=(-9.0, -4.5)), pair_row([13], [52], [61, 62, 63])]


@dataclass(frozen=True)
class Layout:
    """How a batch lies in memory."""

    packed: bool
    """Sequences one behind the other, without padding."""
    low: bool
    """Products in bfloat16, which flash-attn's kernels want."""

    @property
    def name(self) -> str:
        """For people."""
        return "packed" if self.packed else "padded"


@dataclass(frozen=True)
class Outcome:
    """What one layout gave."""

    layout: str
    device: str
    dtype: str
    losses: Mapping[str, tuple[float, float]]
    """Loss -> by verl's engine, by the core."""
    gradient: float
    """Distance of the two gradients of the whole model, over the norm of the core's."""


def layouts() -> list[Layout]:
    """Those that a run could have here; as `config.machine_fields` decides it."""
    if get_device_name() == "cpu":
        return [Layout(packed=False, low=False), Layout(packed=True, low=False)]
    flash = importlib.util.find_spec("flash_attn") is not None
    return [Layout(packed=False, low=False), *([Layout(packed=True, low=True)] if flash else [])]


def compare(layout: Layout, folder: Path) -> Outcome:
    """The same step by verl's engine and by the core's reference, on the model in `folder`."""
    losses, gradients = _by_verl(layout, folder)
    expected, wanted = _by_core(folder)
    assert gradients.keys() == wanted.keys(), "verl's engine names its parameters otherwise than the model"
    gap = torch.cat([(gradients[name] - wanted[name]).flatten() for name in wanted]).norm()
    whole = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    return Outcome(
        layout.name,
        get_device_name(),
        "bfloat16" if layout.low else "float32",
        {name: (losses[name], value) for name, value in expected.items() if name.startswith("loss/")},
        float(gap / whole),
    )


# -- the two sides -----------------------------------------------------------------------------------------------------


def _by_verl(layout: Layout, folder: Path) -> tuple[Mapping[str, float], dict[str, Tensor]]:
    loss = _loss()
    engine = _engine(layout, folder)
    composed = Composed(
        loss,
        native=False,
        policy_loss=POLICY_LOSS,
        longest=LONGEST,
        total_steps=1,
        pad_id=engine.model_config.tokenizer.pad_token_id,
    )
    batch = _batch(layout, loss)
    with engine.eval_mode():
        batch["old_log_probs"] = _of_answers(engine.infer_batch(batch)["model_output"]["log_probs"])
    engine.compose(composed)
    function = engine.loss_function(_actor_config())
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, function)
        named = engine.module.named_parameters()
        gradients = {name: p.grad.full_tensor().float().clone() for name, p in named if p.grad is not None}
        engine.optimizer_step()
    report = engine.report()
    if report["fault"] is not None:
        raise FloatingPointError(report["fault"])
    return report["steps"][0], gradients


def _by_core(folder: Path) -> tuple[Mapping[str, float], dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    policy = loaded.to(get_device_name()).train()
    loss = _loss()
    window = Window(_rollouts(), {**_rows(), **loss.draw(1, 0, 1)}, [range(len(PROMPTS))], LONGEST)
    base = Batch(step=1, total_steps=1, temperature=TEMPERATURE)
    frozen = copy.deepcopy(policy).requires_grad_(False).eval()
    found = accumulate_gradients(policy, loss, window, base=base, reference=frozen)
    return found, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def _engine(layout: Layout, folder: Path) -> Any:
    low = "bf16" if layout.low else "fp32"
    engine: Any = ComposerEngine(
        model_config=HFModelConfig(
            path=str(folder),
            override_config={"attn_implementation": "flash_attention_2" if layout.low else "sdpa"},
            use_remove_padding=layout.packed,
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": low, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            use_dynamic_bsz=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _actor_config() -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=len(PROMPTS),
        ppo_micro_batch_size_per_gpu=MICRO_BATCH,
        rollout_n=1,
        use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(loss_mode=POLICY_LOSS),
    )


# -- what both compute with --------------------------------------------------------------------------------------------


def _loss() -> CompositeLoss:
    full, topk = SdpoSettings(support="full"), SdpoSettings(support="topk", k=7)
    replay = Replay(ReplaySettings(variant="simpo", pairs_per_step=2))
    replay.take_pairs(PAIRS)
    channels = [
        ActiveChannel("full", 1.0, Sdpo(full), sdpo_needs(full)[0]),
        ActiveChannel("topk", 1.0, Sdpo(topk), sdpo_needs(topk)[0]),
        ActiveChannel("replay", 0.5, replay, replay_needs(replay.settings)[0]),
    ]
    return CompositeLoss(channels, PolicyObjective(PRESETS["grpo"], OBJECTIVE_SETTINGS["grpo"]()))


def _rows() -> dict[str, Sequence[Row | None]]:
    rows = [_hint(index) if index in HINTED else None for index in range(len(PROMPTS))]
    return {"full": rows, "topk": rows}


def _hint(index: int) -> Row | None:
    prompt, answer = PROMPTS[index], ANSWERS[index]
    student = list(range(len(prompt), len(prompt) + len(answer)))
    segment = Segment([*HINT, *prompt, *answer], student, [at + len(HINT) for at in student])
    return pack([segment], RolloutText(str(index), prompt, answer, [True] * len(answer), 0.0))


def _rollouts() -> Rollouts:
    """All of them, packed, on the device."""
    device = get_device_name()
    own = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    flags = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    action = torch.tensor([flag for sequence in flags for flag in sequence], device=device)
    seqs = Seqs.from_lists(own)
    seqs = Seqs(seqs.ids.to(device), seqs.cu.to(device), scored=action)
    advantages = torch.tensor(ADVANTAGES, device=device)[seqs.owner]
    return Rollouts(seqs=seqs, action=action, advantages=advantages)


def _batch(layout: Layout, loss: CompositeLoss) -> TensorDict:
    """The same as verl's workers get it."""
    rows = _rows()
    drawn: list[Any] = [loss.draw(1, 0, 1), *({"replay": []} for _ in PROMPTS[1:])]
    samples = [
        Sample(str(i), i // 2, 0.0, {name: own[i] for name, own in rows.items()}, {"1": drawn[i]})
        for i in range(len(PROMPTS))
    ]
    ids = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    ones = _nested([torch.ones(len(answer), dtype=torch.int64) for answer in ANSWERS])
    fields = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(own)) for own in ids]),
        "prompts": _nested([torch.tensor(prompt) for prompt in PROMPTS]),
        "responses": _nested([torch.tensor(answer) for answer in ANSWERS]),
        "response_mask": ones,
        "loss_mask": ones,
        "advantages": _nested([torch.full((len(a),), value) for a, value in zip(ANSWERS, ADVANTAGES, strict=True)]),
        FIELD: encode(samples),
    }
    batch = TensorDict(fields, batch_size=len(PROMPTS))
    tu.assign_non_tensor(
        batch,
        temperature=TEMPERATURE,
        use_remove_padding=layout.packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=MICRO_BATCH,
        global_batch_size=len(PROMPTS),
        calculate_entropy=False,
        compute_loss=False,
    )
    return batch


def _of_answers(logps: Tensor) -> Tensor:
    """Log-probs of the answers' tokens, from those of whole sequences, where each stands one place before its token."""
    lengths = map(len, ANSWERS)
    return _nested([own[-length - 1 : -1] for own, length in zip(logps.unbind(), lengths, strict=True)])


def _nested(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


# -- as a program ------------------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    backend = "gloo" if get_device_name() == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_model(folder: Path) -> None:
    """The built-in tiny model with wider weights: distributions that are not all alike."""
    from transformers import AutoModelForCausalLM

    from composer_core.hf.tiny import write_tiny

    write_tiny(folder, seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1, generator=generator)
    model.save_pretrained(folder)


def outcomes() -> list[Outcome]:
    """Of every layout that this machine has."""
    with alone(), TemporaryDirectory(prefix="composer-probe-") as name:
        write_model(Path(name))
        return [compare(layout, Path(name)) for layout in layouts()]


if __name__ == "__main__":
    from composer_verl.external import leave_trl_alone

    leave_trl_alone()
    os.environ.setdefault("LOCAL_RANK", "0")
    print(json.dumps([asdict(outcome) for outcome in outcomes()]))
