"""RecordedTrainer alone: its gradients are the core's, whatever the split; what it refuses and what it counts."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from composer_core.batch import Batch
from composer_core.channels.replay import Replay
from composer_core.channels.rows import Segment, pack, pair_row
from composer_core.channels.sdpo import sdpo
from composer_core.channels.settings import ReplaySettings, SdpoSettings
from composer_core.errors import NonFinite, UsageError
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.loss.lm_ce import LmCe
from composer_core.loss.views import ModelView
from composer_core.plugins.builtin_settings import LmCeSettings
from composer_core.protocols import Need, RolloutText
from composer_core.run.recorded import RecordedRow
from composer_trl.recorded import RecordedTrainer, Unrolled, rollouts_of

STEP_ROWS = 4


def ids(start, count):
    """Some tokens of the tiny vocabulary, none of them special."""
    return [4 + (start * 7 + 3 * i) % 90 for i in range(count)]


def row(number, *, hinted):
    """A prompt of three tokens, an answer of a length of its own, and for some a teacher that reads two tokens more."""
    prompt, completion = ids(number, 3), ids(number + 1, 4 + 3 * number)
    text = RolloutText(f"r{number}", prompt, completion, [True] * len(completion), None)
    taught = range(4, 4 + number + 2)
    segment = Segment([5, 6, *prompt, *completion], list(taught), [t + 2 for t in taught])
    hints = pack([segment], text) if hinted else None
    return RecordedRow(
        uid=text.uid,
        ids=[*prompt, *completion],
        action=[False] * 3 + [True] * len(completion),
        reward=None,
        rows={"sdpo": hints, "replay": None},
    )


ROWS = [row(0, hinted=True), row(1, hinted=False), row(2, hinted=True), row(3, hinted=False)]
PAIRS = [pair_row(ids(9, 4), ids(n, 3 + n), ids(n + 5, 6 - n)) for n in range(3)]


def loss_of(*, objective=True, sdpo_weight=0.7, replay_weight=0.3, teacher="self-frozen"):
    replay = Replay(ReplaySettings(variant="simpo", pairs_per_step=3))
    replay.take_pairs(PAIRS)
    channels = [
        ActiveChannel("sdpo", sdpo_weight, sdpo(SdpoSettings(teacher=teacher)), frozenset({Need.DIVERGENCE_FULL})),
        ActiveChannel("replay", replay_weight, replay),
    ]
    return CompositeLoss(channels, LmCe(LmCeSettings()) if objective else None)


class Gradients(TrainerCallback):
    """The first step's, before the optimiser uses them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if not hasattr(self, "found"):
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def policy_of(folder, *, lora=False):
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # else a random model hardly looks at what it reads, and a hint changes nothing
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        policy = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return policy


def trainer_of(folder, tmp_path, loss, *, micro=2, rows=ROWS, policy=None, steps=1, callbacks=(), **arguments):
    numbers = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "save_strategy": "no", "logging_steps": 1} | arguments
    return RecordedTrainer(
        policy or policy_of(folder),
        TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=micro, max_steps=steps, use_cpu=True,
            gradient_accumulation_steps=STEP_ROWS // micro, remove_unused_columns=False, report_to="none",
            disable_tqdm=True, **numbers,
        ),
        loss=loss, rows=rows, callbacks=list(callbacks),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )  # fmt: skip


def expected_gradients(policy, loss, *, starting):
    """All rows and pairs of the first step in one batch, by the core alone."""
    rollouts = rollouts_of(ROWS, "cpu")
    rows = {active.name: [row.rows[active.name] for row in ROWS] for active in loss.active} | loss.draw(1, 0, 1)
    tokens = float(rollouts.action.sum())
    base = Batch(rollouts=rollouts, counts={"tokens": tokens, "sequences": 4.0, **loss.count(rows)}, step=1)
    view = ModelView(policy, rollouts=rollouts.seqs, teacher=starting, reference=starting)
    total = loss.channels(view, loss.batches(rows, base)).total
    if loss.objective is not None:
        total = total + loss.policy(view, base).sum / tokens
    total.backward()
    return {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}, float(total.detach())


def assert_close(found, wanted):
    assert set(found) == set(wanted)
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    gap = torch.stack([(found[n] - g).norm() for n, g in wanted.items()]).norm()
    assert norm > 1e-3
    assert gap <= 1e-5 * norm


# one forward; two of two; four of one; checkpointed activations; adapters, whose teacher is the model without them
@pytest.mark.parametrize(
    ("micro", "lora", "arguments"),
    [
        (4, False, {}),
        (2, False, {}),
        (1, False, {}),
        (
            2,
            False,
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        (2, True, {}),
    ],
    ids=["whole", "halves", "ones", "checkpointed", "lora"],
)
def test_gradients_are_those_of_the_core_on_the_whole_step(tiny_model_folder, tmp_path, micro, lora, arguments):
    policy = policy_of(tiny_model_folder, lora=lora)
    wanted, total = expected_gradients(
        copy.deepcopy(policy), loss_of(), starting=policy_of(tiny_model_folder, lora=False)
    )
    seen = Gradients()
    trainer = trainer_of(
        tiny_model_folder, tmp_path, loss_of(), micro=micro, policy=policy, callbacks=[seen], **arguments
    )
    trainer.train()
    assert_close(seen.found, wanted)
    (line,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert line["loss"] == pytest.approx(total, rel=1e-5)
    parts = line["composer:loss/policy"] + 0.7 * line["composer:loss/sdpo"] + 0.3 * line["composer:loss/replay"]
    assert line["loss"] == pytest.approx(parts, rel=1e-6)
    assert line["composer:active/sdpo"] == 0.5
    assert line["composer:tokens/sdpo"] == 2 + 4  # of rows 0 and 2: number + 2
    # what the policy read of rows, 3 + 4 + 3 x number each, and the pairs' answers of 9 tokens
    assert line["num_tokens"] == sum(7 + 3 * n for n in range(4)) + 3 * 9
    assert line["composer:tokens/replay"] == 3 * 9


# each by itself: beside cross-entropy the gradient of a hint is too small for a relative bound to see it
@pytest.mark.parametrize(
    ("sdpo_weight", "replay_weight"), [(0.7, 0), (0, 0.3), (0.7, 0.3)], ids=["sdpo", "replay", "both"]
)
def test_without_an_objective_the_channels_are_all_there_is(tiny_model_folder, tmp_path, sdpo_weight, replay_weight):
    def loss():
        return loss_of(objective=False, sdpo_weight=sdpo_weight, replay_weight=replay_weight)

    policy = policy_of(tiny_model_folder)
    wanted, total = expected_gradients(policy, loss(), starting=policy_of(tiny_model_folder))
    seen = Gradients()
    trainer = trainer_of(tiny_model_folder, tmp_path, loss(), callbacks=[seen])
    trainer.train()
    assert_close(seen.found, wanted)
    (line,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert line["loss"] == pytest.approx(total, rel=1e-5)
    assert "composer:loss/policy" not in line


def test_a_channel_of_weight_0_is_not_there(tiny_model_folder, tmp_path):
    weights = []
    for loss in (loss_of(sdpo_weight=0, replay_weight=0), CompositeLoss([], LmCe(LmCeSettings()))):
        trainer = trainer_of(tiny_model_folder, tmp_path, loss, steps=3)
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        assert not [key for key in trainer.state.log_history[0] if "sdpo" in key or "replay" in key]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_pairs_alone_need_no_row(tiny_model_folder, tmp_path):
    trainer = trainer_of(tiny_model_folder, tmp_path, loss_of(objective=False, sdpo_weight=0), rows=[], steps=6)
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["composer:active/replay"] for line in lines] == [1.0] * 6
    assert lines[-1]["composer:loss/replay"] < lines[0]["composer:loss/replay"]
    assert lines[0]["num_tokens"] == 3 * 9


def test_every_row_comes_once_a_round_in_an_order_that_only_the_place_decides():
    items = Unrolled(ROWS, items=12, seed=5)
    order = [items[i].uid for i in range(12)]
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [["r0", "r1", "r2", "r3"]] * 3
    assert len({tuple(order[i : i + 4]) for i in (0, 4, 8)}) > 1
    late = Unrolled(ROWS, items=99, seed=5)  # a run that is longer, asked from its middle
    assert [late[i].uid for i in (9, 2, 11)] == [order[9], order[2], order[11]]
    assert [Unrolled(ROWS, items=12, seed=6)[i].uid for i in range(12)] != order


def test_fewer_rows_than_a_step_takes_are_refused(tiny_model_folder, tmp_path):
    with pytest.raises(UsageError) as error:
        trainer_of(tiny_model_folder, tmp_path, loss_of(), rows=ROWS[:3])
    assert str(error.value) == (
        "data.traces: 3 recorded rows, but one step takes 4\n  fix: lower train.prompts_per_step"
    )


class Broken:
    """A channel whose loss is not a number in the second step."""

    rows_per_step = 0

    def prepare(self, rollout):
        return {}

    def count(self, row):
        return {}

    def collate(self, rows, rollouts):
        return {}

    def divergences(self, step):
        return ()

    def loss(self, view, batch):
        from composer_core.protocols import Term

        logps = view.logps(batch.rollouts.seqs, grad=True, temperature=1.0)
        return Term(logps.sum() * (float("nan") if batch.step == 2 else 1.0), "tokens")


def test_a_loss_that_is_no_number_stops_before_its_step_is_applied(tiny_model_folder, tmp_path):
    rows = [RecordedRow(r.uid, r.ids, r.action, None, {"broken": {}}) for r in ROWS]
    loss = CompositeLoss([ActiveChannel("broken", 1.0, Broken())], None)
    trainer = trainer_of(tiny_model_folder, tmp_path, loss, rows=rows, steps=3)
    applied = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            applied.append({name: value.clone() for name, value in model.state_dict().items()})

    trainer.add_callback(Keep())
    with pytest.raises(NonFinite, match="the loss of 'broken' is nan at step 2"):
        trainer.train()
    assert len(applied) == trainer.state.global_step == 1
    assert all(torch.equal(value, applied[0][name]) for name, value in trainer.model.state_dict().items())


def test_an_average_teacher_follows_the_policy_and_is_in_the_state(tiny_model_folder, tmp_path):
    trainer = trainer_of(tiny_model_folder, tmp_path, loss_of(teacher="self-ema"), steps=2)
    start = trainer.composition_state()["teacher"]
    start = {name: value.clone() for name, value in start.items()}
    seen = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    trainer.add_callback(Keep())
    trainer.train()
    name = "model.layers.0.mlp.up_proj.weight"
    # rate 0.05: two steps of average <- 0.95 average + 0.05 policy
    by_hand = 0.95 * (0.95 * start[name] + 0.05 * seen[0][name]) + 0.05 * seen[1][name]
    average = trainer.composition_state()["teacher"][name]
    torch.testing.assert_close(average, by_hand)
    assert not torch.equal(average, start[name])
