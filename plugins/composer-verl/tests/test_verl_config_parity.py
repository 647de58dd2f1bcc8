"""Each row of `NATIVE`: verl's own loss, under the fields that the spec turns into, is the core's objective."""

from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.presets import PRESETS
from composer_verl.config import derive
from composer_verl.objectives import NATIVE, is_native

pytestmark = pytest.mark.slow

PROMPTS = [2, 3, 1, 2, 4]
RESPONSES = [6, 1, 5, 4, 6]
LONGEST = 16
RANKS = 2
# of the whole step: this micro-batch is only a part of it
COUNTS = {"tokens": 41.0, "sequences": 12.0, "max_tokens": 12.0 * LONGEST, "micro_batches": 3.0}
# one per action below: in the region, out of it on both sides, beyond dual clip and cap, beyond the clamp
LOG_RATIOS = [0.0, 0.05, -0.05, 0.3, -0.3, 0.19, -0.21, 1.2, -1.2, 2.0, 3.5, -4.0, 25.0, -25.0, 0.1, 0.24, 0.9, -0.6]
ADVANTAGES = [1.5, -0.7, -1.1, 0.4, 0.0]

SETTINGS = [
    ("grpo", {}),
    ("grpo", {"epsilon": 0.1, "epsilon_high": 0.3}),
    ("grpo", {"dual_clip": 3.0, "scale_rewards": "none"}),
    ("dr-grpo", {}),
    ("dapo", {"dual_clip": 1.1}),
    ("dapo", {"kl_estimator": "k2", "kl_corrected": False}),
    ("maxrl", {}),
    ("composer2", {"kl_coef": 0.0}),
    ("cispo", {}),
    ("cispo", {"epsilon_high": 1.0}),
    ("sapo", {}),
    ("sapo", {"temperature_positive": 3.0, "temperature_negative": 0.5}),
    ("dppo", {}),
    ("dppo", {"measure": "kl", "epsilon": 0.05, "epsilon_high": 0.1, "cap": 2.0}),
]


def actions() -> list[list[bool]]:
    """What the policy sampled of each response; tool output stands in the middle of the first, the last has nothing."""
    return [[True, True, False, False, True, True], [True], [True] * 5, [True, False, True, True], [False] * 6]


def values() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all response tokens, and the old ones, (22,)."""
    generator = torch.Generator().manual_seed(0)
    new = -3 * torch.rand(sum(RESPONSES), generator=generator, dtype=torch.float64) - 1e-3
    ratios = iter(LOG_RATIOS)
    gaps = [next(ratios, 0.4) if flag else 30.0 for row in actions() for flag in row]
    return new, new - torch.tensor(gaps, dtype=torch.float64)


def packed(response_values: torch.Tensor) -> torch.Tensor:
    """Response values, (22,), among zeros for prompts, (34,): entry i about token i."""
    parts = response_values.split(RESPONSES)
    return torch.cat([torch.cat([part.new_zeros(length), part]) for length, part in zip(PROMPTS, parts, strict=True)])


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class FixedView:
    """A view whose log-probs are given; nothing else of it is asked."""

    def __init__(self, logps: torch.Tensor) -> None:
        self._logps = logps

    def logps(self, seqs, *, model="policy", grad, temperature):
        return self._logps


def core(block, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    action = packed(torch.tensor([flag for row in actions() for flag in row]).double()).bool()
    rollouts = Rollouts(
        seqs=Seqs.from_lists([[0] * length for length in lengths]),
        action=action,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
        old_logps=packed(old),
    )
    term = PolicyObjective(PRESETS[block.name], block.settings).loss(
        FixedView(packed(new)), Batch(rollouts=rollouts, counts=COUNTS)
    )
    return RANKS * term.sum / COUNTS[term.count]


def upstream(spec, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    plan = derive(spec).upstream
    config = omega_conf_to_dataclass(OmegaConf.create(plan).actor_rollout_ref.actor)
    masks = [torch.tensor(row) for row in actions()]
    data = TensorDict(
        {
            "prompts": jagged([torch.zeros(length, dtype=torch.int64) for length in PROMPTS]),
            "responses": jagged([torch.zeros(length, dtype=torch.int64) for length in RESPONSES]),
            "response_mask": jagged([mask.long() for mask in masks]),
            "old_log_probs": jagged(list(old.split(RESPONSES))),
            "advantages": jagged([a * mask.double() for a, mask in zip(ADVANTAGES, masks, strict=True)]),
        },
        batch_size=len(PROMPTS),
    )
    tu.assign_non_tensor(
        data, dp_size=RANKS, batch_num_tokens=int(COUNTS["tokens"]), global_batch_size=int(COUNTS["sequences"])
    )
    # verl's entry i is about token i + 1, so that the last of each sequence is about nothing
    logps = packed(new).roll(-1)
    loss, _ = ppo_loss(config, {"log_probs": logps}, data)
    return loss


def value_and_gradient(loss_of, new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = new.clone().requires_grad_()
    loss = loss_of(leaf, old)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def test_every_row_is_compared_below():
    assert {name for name, _ in SETTINGS} == set(NATIVE)


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=lambda value: value if isinstance(value, str) else None)
def test_verls_own_loss_is_the_cores_in_value_and_gradient(name, settings, objective, verl_spec):
    block = objective(name, **settings)
    assert is_native(block)
    new, old = values()
    ours = value_and_gradient(partial(core, block), new, old)
    theirs = value_and_gradient(partial(upstream, verl_spec(policy=block, max_completion_tokens=LONGEST)), new, old)
    assert ours[1].count_nonzero() > 3  # something is compared
    torch.testing.assert_close(theirs[0], ours[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(theirs[1], ours[1], rtol=1e-6, atol=1e-12)


def test_the_comparison_sees_verls_dual_clip(objective, verl_spec):
    new, old = values()
    ours = value_and_gradient(partial(core, objective("grpo")), new, old)
    dual = verl_spec(policy=objective("grpo", dual_clip=3.0), max_completion_tokens=LONGEST)
    theirs = value_and_gradient(partial(upstream, dual), new, old)
    assert not torch.allclose(theirs[0], ours[0], rtol=1e-3)
