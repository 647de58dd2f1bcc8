"""With channels of weight 0 the engine is verl's own, to the last bit."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

import composer_verl.external  # noqa: F401  # before an engine: verl and trl do not fit together without it
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.hf.tiny import make_tiny
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText
from composer_core.run.rebuild import rebuild
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.teachers.pairs import Pair, save_pairs
from composer_verl.engine import ComposerEngine
from composer_verl.objectives import NATIVE
from composer_verl.rows import FIELD, Sample, encode
from composer_verl.worker import composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS, RESPONSES = [3, 1, 5, 2, 4, 3, 1, 2], [6, 1, 12, 4, 8, 5, 11, 2]
LONGEST = 12
TOOL = {2: range(3, 7), 4: range(2)}
"""Rollout -> response tokens that the policy did not sample: in the middle, and at the beginning."""
HINT = [90, 91]
STEPS = 2
SETTINGS = {"composer2": "{use: composer2, kl_coef: 0.0}"}
"""Of objectives that verl computes itself with other settings than the default ones alone."""


# -- the stored batch --------------------------------------------------------------------------------------------------


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(*, packed):
    """Eight rollouts in two micro-batches, off policy, with rows of both channels for each optimiser step."""
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(8, 100, (length,), generator=generator)

    prompts, responses = [ids(n) for n in PROMPTS], [ids(n) for n in RESPONSES]
    mask = nested(
        torch.tensor([int(j not in TOOL.get(i, ())) for j in range(length)]) for i, length in enumerate(RESPONSES)
    )
    texts = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]
    fields = {
        "input_ids": nested(texts),
        "position_ids": nested(torch.arange(len(text)) for text in texts),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": nested(2 * torch.rand(1, generator=generator).expand(n) - 1 for n in RESPONSES),
        # about what a random model of 102 tokens gives, so that ratios lie on both sides of every bound
        "old_log_probs": nested(-4.6 + 0.4 * torch.randn(n, generator=generator) for n in RESPONSES),
        FIELD: encode(
            [sample(i, prompt, response) for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))]
        ),
    }
    data = TensorDict(fields, batch_size=len(texts))
    tu.assign_non_tensor(
        data,
        temperature=0.9,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=4,
        global_batch_size=len(texts),
        calculate_entropy=False,
    )
    return data


def sample(i, prompt, response):
    """Hinted at the end of the prompt; every other rollout brings a pair."""
    begin, sampled = len(prompt), [j for j in range(len(response)) if j not in TOOL.get(i, ())]
    student = [begin + j for j in sampled]
    segment = Segment(
        [*prompt.tolist(), *HINT, *response.tolist()], student, [at + len(HINT) for at in student], [1.0] * len(student)
    )
    row = pack([segment], RolloutText(str(i), prompt.tolist(), response.tolist(), [True] * len(response), 0.0))
    pairs = [pair_row([10], [40 + i], [50, 51], reference=(-4.0, -9.0))] if i % 2 == 0 else []
    drawn = {str(step): {"replay": pairs} for step in range(1, STEPS + 1)}
    return Sample(str(i), i // 4, 0.0, {"sdpo": row}, drawn)


# -- engines -----------------------------------------------------------------------------------------------------------


SPEC = """
version: 1
name: bit-equal
model: {path: FOLDER/tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
  pairs: {path: FOLDER/pairs.jsonl}
loss:
  objective: {use: grpo}
  channels:
    - {use: sdpo, weight: 0.0, on: all}
    - {use: replay, weight: 0.0}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch: 4, max_completion_tokens: 12, learning_rate: 1.0e-3}
backend: {use: verl}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the built-in model and a file of pairs, beside which a process group of this process is open."""
    folder = tmp_path_factory.mktemp("bit-equal")
    make_tiny(folder / "tiny", seed=0)
    said = {"role": "assistant", "content": "a"}
    reference = {"model": "t", "chosen": -4.0, "rejected": -9.0}
    save_pairs([Pair("s", [{"role": "user", "content": "q"}], said, said, 2, ["a"], reference)], folder / "pairs.jsonl")
    (folder / "spec.yaml").write_text(SPEC.replace("FOLDER", str(folder)), encoding="utf-8")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield folder
    dist.destroy_process_group()


def planned(folder, objective, *, weight):
    """As the worker gets it."""
    overrides = [
        f"loss.objective={SETTINGS.get(objective, f'{{use: {objective}}}')}",
        f"loss.channels.sdpo.weight={weight}",
        f"loss.channels.replay.weight={weight}",
    ]
    registry = Registry.discover()
    return make_plan(load_spec(folder / "spec.yaml", registry, overrides=overrides), registry).to_json()


def make(base, plan):
    """The engine that verl's worker makes of this configuration, and its actor's configuration."""
    upstream = plan["upstream"]["actor_rollout_ref"]
    actor = omega_conf_to_dataclass(OmegaConf.create(upstream["actor"]))
    engine = base(
        model_config=omega_conf_to_dataclass(OmegaConf.create(upstream["model"])),
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine, actor


@pytest.fixture(scope="module")
def stock(folder):
    """`stock(objective, packed)`: what verl's own engine gives, computed once."""

    @cache
    def found(objective, packed):
        engine, actor = make(FSDPEngineWithLMHead, planned(folder, objective, weight=0.0))
        return train(engine, partial(ppo_loss, config=actor), packed=packed)

    return found


def ours(plan, *, packed):
    """And what the plan wanted of the engine."""
    engine, actor = make(ComposerEngine, plan)
    wanted = composed(rebuild(plan), engine)
    if wanted is not None:
        engine.compose(wanted)
    found = train(engine, engine.loss_function(actor), packed=packed)
    assert engine.report()["fault"] is None
    return found, wanted


def train(engine, function, *, packed):
    """What verl returns of each optimiser step, the gradients before and the weights after it, whole."""
    data, steps = batch(packed=packed), []
    for _ in range(STEPS):
        with engine.train_mode():
            output = engine.train_batch(data.copy(), function)
            gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}
        weights = {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}
        steps.append((output["loss"], plain(output["metrics"]), gradients, weights))
    return steps


def plain(metrics):
    """verl's metrics as numbers: a `Metric` compares by identity."""
    return {
        name: [
            own.values if isinstance(own, Metric) else own for own in (values if isinstance(values, list) else [values])
        ]
        for name, values in metrics.items()
    }


def same_bits(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], own) for name, own in expected.items())


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("objective", sorted(NATIVE))
def test_losses_gradients_and_weights_are_those_of_verls_engine(objective, packed, folder, stock):
    found, wanted = ours(planned(folder, objective, weight=0.0), packed=packed)
    assert wanted is None
    for (losses, metrics, gradients, weights), theirs in zip(found, stock(objective, packed), strict=True):
        assert losses == theirs[0]
        assert len(losses) == 2
        assert all(loss != 0 for loss in losses)
        assert metrics == theirs[1]
        assert metrics["grad_norm"][0] > 0
        assert same_bits(gradients, theirs[2])
        assert same_bits(weights, theirs[3])
    assert not same_bits(found[0][3], found[1][3])  # it has learnt something


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("objective", sorted(NATIVE))
def test_channels_that_weigh_next_to_nothing_change_no_bit_either(objective, packed, folder, stock):
    # they run whole, teacher and pairs included, and what they add is lost beside every bit of verl's loss: so its
    # forward, its loss and its backward are its own
    found, wanted = ours(planned(folder, objective, weight=1e-30), packed=packed)
    assert wanted.native
    assert [active.name for active in wanted.loss.active] == ["sdpo", "replay"]
    for (losses, metrics, gradients, weights), theirs in zip(found, stock(objective, packed), strict=True):
        assert losses == theirs[0]
        assert metrics == theirs[1]
        assert same_bits(gradients, theirs[2])
        assert same_bits(weights, theirs[3])


def test_the_comparison_sees_channels_that_weigh_something(folder, stock):
    expected = stock("grpo", False)
    found, _ = ours(planned(folder, "grpo", weight=0.1), packed=False)
    assert found[0][0] != expected[0][0]
    assert not any(torch.equal(own, expected[0][2][name]) for name, own in found[0][2].items())
    assert not same_bits(found[0][3], expected[0][3])
