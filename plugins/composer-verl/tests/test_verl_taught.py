"""A teacher's top k, kept: what is read, how it rides through verl's batches, and the specs that cannot have it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from composer_core.batch import Hints, Rollouts, Seqs
from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import SdpoSettings
from composer_core.divergences import Divergence, DivergenceKind, SoftGate, Support
from composer_core.errors import RunFailed, SpecError, UsageError
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.divergence import divergence
from composer_core.plugins.registry import Registry
from composer_core.protocols import Need
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_verl.taught import Source, Taught, for_queue, from_queue, is_known_before, likeliest, sources

TOP_2 = Divergence(DivergenceKind.KL_TEACHER_STUDENT, support=Support.TOPK_TEACHER, k=2)
SOURCE = Source("sdpo", TOP_2, "teacher")


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_likeliest_come_first_and_the_hinted_token_last():
    # probabilities 1/8, 1/2, 1/8, 1/4; the token is the first
    logits = torch.tensor([[1.0, 4.0, 1.0, 2.0]]).log() + 3
    ids, logps = likeliest(logits, torch.tensor([0]), TOP_2)
    assert ids.tolist() == [[1, 3, 0]]
    assert logps[0].tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 4), math.log(1 / 8)])


def test_the_temperature_is_the_divergences():
    # at temperature 2 the odds 16 : 1 become 4 : 1
    _, logps = likeliest(torch.tensor([[0.0, math.log(16)]]), torch.tensor([0]), replace(TOP_2, k=1, temperature=2.0))
    assert logps[0].tolist() == pytest.approx([math.log(4 / 5), math.log(1 / 5)])


SPECS = {
    "forward": TOP_2,
    "reverse": replace(TOP_2, kind=DivergenceKind.KL_STUDENT_TEACHER),
    "jsd": replace(TOP_2, kind=DivergenceKind.JSD, beta=0.3),
    "renormalised": replace(TOP_2, tail=False),
    "hot": replace(TOP_2, temperature=2.5),
    "clipped": replace(TOP_2, clip=0.05),
    "one": replace(TOP_2, k=1),
    "all-but-one": replace(TOP_2, k=10),
    "all": replace(TOP_2, k=11),
    "more-than-all": replace(TOP_2, k=50),
}


# in float64: of a tail of 1e-6 float32 knows a tenth, by either way
@pytest.mark.parametrize("scale", [0.1, 1.0, 15.0], ids=["unsure", "usual", "certain"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_divergence_from_what_is_kept_is_that_from_the_teachers_logits(spec, scale):
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    found = Taught(replace(SOURCE, spec=spec), *likeliest(scale * teacher, torch.zeros(7, dtype=torch.int64), spec))
    values = divergence(student, found.logits(slice(0, 7), 11), spec)
    expected = divergence(student, scale * teacher, spec)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-9)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0], rtol=1e-5, atol=1e-9)


def test_a_teacher_that_has_no_preference_keeps_its_own_top_k():
    uniform = torch.zeros(1, 50_000)
    ids, logps = likeliest(uniform, torch.tensor([0]), replace(TOP_2, k=100))
    logits = Taught(replace(SOURCE, spec=replace(TOP_2, k=100)), ids, logps).logits(slice(0, 1), 50_000)
    assert set(logits.topk(100).indices[0].tolist()) == set(ids[0, :-1].tolist())


# -- through verl's batches --------------------------------------------------------------------------------------------

SEQS = Seqs.from_lists([[1, 2, 3], [4, 5], [6, 7, 8]])
"""Three samples; the first and the last are hinted, the last one's token 7 by two hints."""
TEACHER = Seqs.from_lists([[90, 6, 7, 8], [91, 1, 2], [92, 6, 7]])
HINTS = Hints(
    seqs=TEACHER,
    student=torch.tensor([6, 7, 0, 1, 6]),
    teacher=torch.tensor([2, 3, 0, 6, 9]),
    weight=torch.tensor([1.0, 1.0, 0.0, 0.5, 2.0]),
)
"""In no order of samples; the third is filler."""
FOUND = (
    torch.tensor([[10, 20, 7], [11, 21, 8], [12, 22, 2], [13, 23, 7]]),
    -torch.arange(12.0).reshape(4, 3),
)
"""Of the four real ones."""


def _queue():
    rollouts = Rollouts(SEQS, action=torch.ones(8, dtype=torch.bool))
    parts = for_queue(SOURCE, FOUND, HINTS, rollouts)
    return {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in parts.items()}


def test_each_sample_carries_its_own_hints_and_one_without_a_filler():
    ids, logps = _queue().values()
    assert [own.tolist() for own in ids.unbind()] == [
        [[12, 22, 2]],
        [[-1, -1, -1]],
        [[10, 20, 7], [11, 21, 8], [13, 23, 7]],
    ]
    assert [len(own) for own in logps.unbind()] == [1, 1, 3]


def test_what_comes_out_of_the_queue_is_in_the_hints_own_order():
    (taught,) = from_queue([SOURCE], _queue())
    back = taught.of(HINTS, SEQS)
    assert torch.equal(back.ids, FOUND[0])
    assert torch.equal(back.logps, FOUND[1])


def test_samples_keep_theirs_when_verl_reorders_and_splits():
    from verl.utils import tensordict_utils as tu

    batch = TensorDict(_queue(), batch_size=3)
    turned = tu.index_select_tensor_dict(batch, torch.tensor([2, 0, 1]))
    (taught,) = from_queue([SOURCE], turned)
    assert taught.ids[:, -1].tolist() == [7, 8, 7, 2]
    parts = [from_queue([SOURCE], part)[0].ids[:, -1].tolist() for part in tu.chunk_tensordict(batch, 3)]
    assert parts == [[2], [], [7, 8, 7]]


def test_entries_of_other_tokens_are_refused():
    (taught,) = from_queue([SOURCE], _queue())
    with pytest.raises(RunFailed) as caught:
        taught.of(replace(HINTS, weight=torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0])), SEQS)
    assert str(caught.value) == (
        "channel 'sdpo': what the teacher read before the update is about 4 other tokens than the 3 hinted ones of "
        "this micro-batch"
    )


# -- who can have it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        replace(TOP_2, support=Support.TOPK_STUDENT),
        replace(TOP_2, support=Support.TOPK_UNION),
        replace(TOP_2, taid=0.5),
        replace(TOP_2, kind=DivergenceKind.KL_STUDENT_TEACHER, gate=SoftGate()),
        Divergence(),
    ],
    ids=["student", "union", "taid", "gate", "full"],
)
def test_only_the_plain_top_k_of_the_teacher_is_known_before(spec):
    assert is_known_before(TOP_2)
    assert not is_known_before(spec)


def _composite(**channels):
    top_k = frozenset({Need.DIVERGENCE_TOPK})
    active = [
        ActiveChannel(name, 1.0, Sdpo(SdpoSettings(support="topk", **settings)), top_k)
        for name, settings in channels.items()
    ]
    return CompositeLoss(active, None)


def test_a_live_teacher_is_the_policy_of_before_the_update():
    for teacher, model in (("self-live", "policy"), ("self-frozen", "teacher"), ("self-ema", "teacher")):
        (source,) = sources(_composite(sdpo={"side": "teacher", "k": 5, "teacher": teacher}), step=1)
        assert (source.channel, source.model, source.spec.k) == ("sdpo", model, 5)


def test_channels_that_want_more_or_the_same_are_refused():
    with pytest.raises(UsageError) as caught:
        sources(_composite(sdpo={"side": "union"}), step=1)
    assert str(caught.value.problem) == (
        "channel 'sdpo' learns over more than the top k of its teacher alone, which cannot be read before the update"
    )
    twice = _composite(one={"side": "teacher"}, two={"side": "teacher"})
    with pytest.raises(UsageError) as caught:
        sources(twice, step=1)
    assert str(caught.value.problem) == (
        "channel 'two' and another channel learn over the same top k of one teacher, which cannot be read before the "
        "update"
    )


# -- when it is planned ------------------------------------------------------------------------------------------------

SPEC = """\
version: 1
name: ahead
model: {builtin: tiny}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: exact-match, extract: whole}]
loss:
  objective: {use: grpo}
  channels: [CHANNELS]
train: {steps: 4, iterations: 2, prompts_per_step: 2, group_size: 2, max_completion_tokens: 6}
backend: {use: verl, topk: batch}
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "n", "answer": "1", "tip": "It is 1."}) + "\n")
    registry = Registry.discover()

    def make(channels):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.replace("CHANNELS", channels))
        return make_plan(load_spec(path, registry), registry)

    return make


HINTED = "{use: sdpo, support: topk, hints: {column: tip, at: prompt-end}"


def test_the_plan_says_how_old_the_teacher_is(plan):
    assert plan(f"{HINTED}, side: teacher}}").notes[-1] == (
        "topk: batch: the teacher reads the hints of a batch of rollouts before the optimiser steps on it, 2 here, so "
        "a live or ema teacher stays as it is then, one batch old, for all of them"
    )


@pytest.mark.parametrize(
    ("channels", "key", "problem", "fix"),
    [
        (
            f"{HINTED}}}",
            "loss.channels[0].side",
            "student: it needs the student's and the teacher's logits at once, and with backend.topk: batch the "
            "teacher has read the hints before",
            "side: teacher, or backend.topk: step",
        ),
        (
            f"{HINTED}, side: teacher, target: {{use: taid}}}}",
            "loss.channels[0].target",
            "taid: it needs the student's and the teacher's logits at once, and with backend.topk: batch the teacher "
            "has read the hints before",
            "leave it out, or backend.topk: step",
        ),
        (
            "{use: sdpo, weight: 0.1}",
            "backend.topk",
            "batch: no channel learns over a top k",
            "leave it out, or give channel sdpo support: topk and side: teacher",
        ),
    ],
    ids=["side", "target", "none"],
)
def test_what_cannot_be_known_before_is_refused_when_planned(channels, key, problem, fix, plan):
    with pytest.raises(SpecError) as caught:
        plan(channels)
    (found,) = caught.value.problems
    assert (found.key, found.problem, found.fix) == (key, problem, fix)
