"""Seven fixed rollouts, all channels, any objective: one process's gradients, or one rank's of two.

As a program (`fixed_rollouts.py RANK FOLDER MODEL`) it is a rank: it takes its share of the sequences, meets the
other over gloo and writes its gradients and metrics to FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "third_party" / "acme-composer"))
from acme_composer.channel import Brevity as AcmeBrevity
from acme_composer.plugin import BrevitySettings

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings
from composer_core.hf.models import load_policy
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS
from composer_core.protocols import RolloutText
from composer_core.testing.accumulate import Window, accumulate_gradients, take
from composer_core.testing.fakes import Brevity, HintFake

# one per aggregation that does not depend on the split
OBJECTIVES = ("grpo", "dapo", "luspo", "dr-grpo")
PROMPTS = [[10, 11, 12], [13], [14, 15], [16, 17], [18, 19, 20, 21], [22], [23, 24]]
# lengths from 1 to 9; the channel's threshold of 4 leaves some rows out
COMPLETIONS = [[30 + (7 * i + j) % 50 for j in range(n)] for i, n in enumerate([5, 2, 7, 1, 9, 4, 6])]
# good answers get no hint: the second rank (the last four) has filler only
REWARDS = [0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0]
SHARES = ([0, 1, 2], [3, 4, 5, 6])
SPLITS = ([[0], [1, 2]], [[3], [0, 1, 2]])
HINT = [90, 91]
# answers of lengths 1 to 4; three pairs in a step, so that two ranks and four micro-batches share them unequally
PAIRS = [pair_row(PROMPTS[i], [40 + i] * (i + 1), [50, 51], reference=(-4.5 * (i + 1), -9.5)) for i in range(4)]


class Hinted(Sdpo):
    """A hint between prompt and answer, as `traces/rows.py` puts it, without a tokenizer."""

    def prepare(self, rollout):
        """For rollouts that failed."""
        actions = [i for i, action in enumerate(rollout.action) if action]
        if rollout.reward >= self.settings.success or not actions:
            return None
        prompt = len(rollout.prompt_ids)
        segment = Segment(
            teacher_ids=[*rollout.prompt_ids, *HINT, *rollout.completion_ids],
            student=[prompt + i for i in actions],
            teacher=[prompt + len(HINT) + i for i in actions],
            weight=[1.0 + i for i in range(len(actions))],
        )
        return pack([segment], rollout)


def replay() -> Replay:
    """With its pairs."""
    channel = Replay(ReplaySettings(pairs_per_step=3, beta=0.5))
    channel.take_pairs(PAIRS)
    return channel


def composite(objective: str) -> CompositeLoss:
    """The objective with a KL and all channels."""
    channels = [
        ActiveChannel("fake-brevity", 0.05, Brevity()),
        ActiveChannel("hint-fake", 2.0, HintFake()),
        ActiveChannel("brevity", 0.02, AcmeBrevity(BrevitySettings(free=4))),
        ActiveChannel("sdpo", 3.0, Hinted(SdpoSettings())),
        ActiveChannel("replay", 0.5, replay()),
    ]
    return CompositeLoss(channels, PolicyObjective(PRESETS[objective], OBJECTIVE_SETTINGS[objective](kl_coef=0.1)))


def rollouts() -> Rollouts:
    """Off policy, with tool output in the middle of one answer; the sixth has no action at all."""
    seqs = Seqs.from_lists([p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    flags = [[False] * len(p) + list(_action(i)) for i, p in enumerate(PROMPTS)]
    generator = torch.Generator().manual_seed(0)
    return Rollouts(
        seqs=seqs,
        action=torch.tensor([flag for sequence in flags for flag in sequence]),
        advantages=torch.tensor([-1.0, 0.25, -0.5, 1.25, 0.5, 2.0, -0.75])[seqs.owner],
        old_logps=-4.6 + 0.4 * torch.randn(seqs.ids.shape, generator=generator),  # about -ln(vocabulary)
        ref_logps=-4.6 + 0.4 * torch.randn(seqs.ids.shape, generator=generator),
        rewards=torch.tensor(REWARDS),
        group=torch.zeros(7, dtype=torch.int64),
        uid=tuple(str(i) for i in range(7)),
    )


def gradients(
    model: Path, objective: str, *, share=range(7), splits, rank: int = 0, world: int = 1
) -> tuple[dict[str, torch.Tensor], dict]:
    """Gradients by parameter, and the metrics, from a share of the rollouts in the micro-batches given."""
    policy, loss = load_policy(model, dtype="float32").train(), composite(objective)
    teacher = load_policy(model, dtype="float32").requires_grad_(False)
    texts = [RolloutText(str(i), PROMPTS[i], COMPLETIONS[i], _action(i), REWARDS[i]) for i in share]
    prepared = [loss.prepare(text) for text in texts]
    rows = {active.name: [row[active.name] for row in prepared] for active in loss.active}
    rows |= loss.draw(1, rank, world)
    window = Window(rollouts=take(rollouts(), share), rows=rows, splits=splits, longest=9)
    metrics = accumulate_gradients(policy, loss, window, base=Batch(temperature=0.8), reference=teacher)
    return {name: parameter.grad for name, parameter in policy.named_parameters()}, metrics


def _action(i: int) -> list[bool]:
    n = len(COMPLETIONS[i])
    return [i != 5 and not (i == 4 and 3 <= j < 6) for j in range(n)]


def _rank(rank: int, folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for objective in OBJECTIVES:
        found, metrics = gradients(model, objective, share=SHARES[rank], splits=SPLITS[rank], rank=rank, world=2)
        save_file(found, folder / f"{objective}-{rank}.safetensors")
        (folder / f"{objective}-{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
