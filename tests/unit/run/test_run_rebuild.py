"""What a trainer's own processes make of a plan. All of it goes through JSON, as the plan and the rows do."""

import json

import pytest
import torch

from composer_core.batch import Batch, Rollouts, Seqs
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import Sdpo
from composer_core.errors import MissingError, RunFailed
from composer_core.loss.policy import PolicyObjective
from composer_core.loss.views import ModelView
from composer_core.plugins.registry import Registry
from composer_core.protocols import RolloutText
from composer_core.run.rebuild import rebuild
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.testing.contracts.channel import SmallModel

pytestmark = pytest.mark.filterwarnings("ignore:.* is no model type")

SPEC = """\
version: 1
name: parts
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
  pairs: {path: pairs.jsonl}
loss:
  objective: {use: dr-grpo, epsilon_high: 0.28}
  channels:
    - {use: sdpo, weight: 0.25, SDPO}
    - {use: replay, weight: 0.5, variant: VARIANT, pairs_per_step: 2}
train: {steps: 4}
backend: {use: toy}
teachers: {strong: {use: openai, model: m, base_url: "http://127.0.0.1:8000/v1", scores: true}}
"""
TAUGHT_BY_ITSELF = "divergence: kl_teacher_student"
TAUGHT_BY_ANOTHER = "divergence: kl_student_teacher, teacher: strong"
PAIRS = [pair_row([1, 2], [3, 4], [5], reference=(-4.0, -3.0)), pair_row([6], [7], [8, 9], reference=(-2.0, -5.0))]
ROLLOUT = RolloutText("a", [1, 2], [3, 4], [True, True], 0.0)
HINTED = pack([Segment([1, 9, 2, 3, 4], [2, 3], [3, 4])], ROLLOUT)
ROLLOUTS = Rollouts(
    Seqs.from_lists([[1, 2, 3, 4], [5, 6]]), action=torch.tensor([False, False, True, True, False, True])
)


@pytest.fixture
def document(tmp_path):
    """What plan.json holds, for one variant of each channel's loss."""

    def plan(variant="simpo", sdpo=TAUGHT_BY_ITSELF):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.replace("VARIANT", variant).replace("SDPO", sdpo))
        registry = Registry.discover()
        return json.loads(json.dumps(make_plan(load_spec(path, registry), registry).to_json()))

    return plan


def test_a_plan_gives_back_spec_objective_and_channels(document):
    rebuilt = rebuild(document())
    assert (rebuilt.spec.name, rebuilt.plan.objective) == ("parts", "core")
    assert isinstance(rebuilt.objective, PolicyObjective)
    assert rebuilt.objective is rebuilt.loss.objective
    assert [(active.name, active.weight) for active in rebuilt.loss.active] == [("sdpo", 0.25), ("replay", 0.5)]
    sdpo, replay = rebuilt.loss.active
    assert {need.value for need in sdpo.needs} == set(rebuilt.plan.channels[0].needs)
    assert sdpo.channel.settings.divergence == "kl_teacher_student"
    assert replay.channel.settings.variant == "simpo"


def test_channels_are_given_the_plugins_of_the_process(document, monkeypatch):
    given = []
    monkeypatch.setattr(Sdpo, "take_registry", lambda channel, registry: given.append(registry))
    rebuilt = rebuild(document())
    assert [registry is rebuilt.registry for registry in given] == [True]


def test_a_plugin_of_another_version_is_refused(document):
    changed = document()
    (core,) = changed["plugins"]
    installed, core["version"] = core["version"], "0.0.1"
    with pytest.raises(MissingError) as caught:
        rebuild(changed)
    assert caught.value.problem == f"the plan was made with composer-core 0.0.1, the worker has {installed}"


@pytest.mark.parametrize("variant", ["simpo", "dpo", "imitate"])
@pytest.mark.parametrize("sdpo", [TAUGHT_BY_ITSELF, TAUGHT_BY_ANOTHER], ids=["itself", "another"])
def test_the_workers_rows_give_its_loss_in_a_process_without_pairs_and_teachers(document, variant, sdpo):
    plan = document(variant, sdpo)
    worker, actor = rebuild(plan).loss, rebuild(plan).loss
    worker.active[1].channel.take_pairs(PAIRS)
    rows = {"sdpo": [{**HINTED, "teacher_logps": [-1.0, -2.0]}, None], **worker.draw(1, 0, 1)}
    sent = json.loads(json.dumps(rows))
    assert sorted(sent["replay"], key=lambda row: row["prompt"]) == json.loads(json.dumps(PAIRS))
    counts = actor.count(sent)
    # answers of 2 + 1 and 1 + 2 tokens, two hinted tokens in one row of two
    assert counts == {
        "sdpo.rows": 2.0,
        "sdpo.active": 1.0,
        "sdpo.tokens": 2.0,
        "replay.rows": 2.0,
        "replay.active": 2.0,
        "replay.pairs": 2.0,
        "replay.tokens": 6.0,
    }
    assert counts == worker.count(rows)
    here, there = _gradients(worker, rows, counts), _gradients(actor, sent, counts)
    assert here["value"] != 0
    torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_drawing_pairs_is_left_to_the_worker(document):
    with pytest.raises(RunFailed, match=r"channel 'replay' has no pairs to draw from"):
        rebuild(document()).loss.draw(1, 0, 1)


def test_a_micro_batch_without_rows_computes_nothing_and_has_the_same_forwards(document):
    loss = rebuild(document()).loss
    counts = loss.count({"sdpo": [HINTED, None], "replay": PAIRS})
    empty, full = SmallModel(), SmallModel()
    nothing = _channels(loss, empty, {"sdpo": [None, None], "replay": [None]}, counts)
    _channels(loss, full, {"sdpo": [HINTED, None], "replay": PAIRS}, counts)
    assert nothing.total.item() == 0.0
    assert nothing.total.requires_grad
    assert (empty.forwards, full.forwards) == (2, 2)  # rollouts, and pairs joined


def _channels(loss, model, rows, counts):
    frozen = SmallModel()
    view = ModelView(model, rollouts=ROLLOUTS.seqs, teacher=frozen, reference=frozen)
    return loss.channels(view, loss.batches(rows, Batch(rollouts=ROLLOUTS, counts=counts)))


def _gradients(loss, rows, counts):
    model = SmallModel()
    total = _channels(loss, model, rows, counts).total
    total.backward()
    return {"value": total.detach(), **{name: p.grad for name, p in model.named_parameters()}}
