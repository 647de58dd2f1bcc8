"""`compose_loss` on a table of bigrams, whose log-probs are known by hand, and on real tokenizers."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer_core.hf.models import load_policy, load_tokenizer
from composer_core.loss.compose import compose_loss
from composer_core.loss.example_batch import build_batch
from composer_core.loss.taid_schedule import TAIDScheduler


class Table(nn.Module):
    """Logits of the next token depend on the current one only. Takes nothing but ids."""

    def __init__(self, vocabulary=7):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64))
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture
def model():
    return Table()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 2, 0]])
MASK = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
TEACHER = torch.tensor([[1, 5, 6, 3, 4], [5, 1, 6, 2, 0]])
TEACHER_MASK = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]])
PAIRS = {
    "dpo_chosen_input_ids": torch.tensor([[1, 2, 3]]),
    "dpo_chosen_response_mask": torch.tensor([[0, 1, 1]]),
    "dpo_rejected_input_ids": torch.tensor([[1, 4]]),
    "dpo_rejected_response_mask": torch.tensor([[0, 1]]),
    "dpo_chosen_ref_logprobs": torch.tensor([-3.0]),
    "dpo_rejected_ref_logprobs": torch.tensor([-1.0]),
}
STUDENT = {"input_ids": IDS, "response_mask": MASK}
SDPO = {"ctx_teacher_input_ids": TEACHER, "sdpo_loss_mask": TEACHER_MASK}
ALL = {**STUDENT, **SDPO, **PAIRS}


def test_cross_entropy_is_the_mean_over_answer_tokens(model):
    logp = model.table.log_softmax(-1)
    # 2 -> 3, 3 -> 4 in the first row, 5 -> 6, 6 -> 2 in the second
    expected = -(logp[2, 3] + logp[3, 4] + logp[5, 6] + logp[6, 2]) / 4
    parts = compose_loss(model, STUDENT)
    assert parts.lm_ce.item() == pytest.approx(expected.item())
    assert parts.total is parts.lm_ce
    assert (parts.sdpo_jsd.item(), parts.trace_replay_dpo.item()) == (0.0, 0.0)


def test_label_smoothing_is_torchs(model):
    rows, targets = model.table[[2, 3, 5, 6]], torch.tensor([3, 4, 6, 2])
    expected = F.cross_entropy(rows, targets, label_smoothing=0.2)
    assert compose_loss(model, STUDENT, lm_ce_label_smoothing=0.2).lm_ce.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("beta", "outside"), [(0.0, "teacher"), (1.0, "student")])
def test_the_ith_teacher_token_is_the_ith_answer_token(model, beta, outside):
    # tokens 3, 4, 6, 2 are predicted from 2, 3, 5, 6 by the student and from 6, 3, 1, 6 by the teacher
    log_q, log_p = model.table[[2, 3, 5, 6]].log_softmax(-1), model.table[[6, 3, 1, 6]].log_softmax(-1)
    a, b = (log_p, log_q) if outside == "teacher" else (log_q, log_p)
    expected = (a.exp() * (a - b)).sum(-1).mean()
    parts = compose_loss(model, {**STUDENT, **SDPO}, sdpo_jsd_beta=beta, alpha_sdpo=0.3)
    assert parts.sdpo_jsd.item() == pytest.approx(expected.item())
    assert parts.total.item() == pytest.approx((parts.lm_ce + 0.3 * parts.sdpo_jsd).item())


def test_the_gradient_reaches_the_student_only(model):
    parts = compose_loss(model, {**STUDENT, **SDPO}, alpha_sdpo=1.0)
    (parts.total - parts.lm_ce).backward()
    # row 1 is read by the teacher alone; the student's tokens are predicted from 2, 3, 5, 6
    assert not model.table.grad[1].any()
    assert model.table.grad[2].any()


def test_dpo_compares_summed_log_ratios(model):
    logp = model.table.log_softmax(-1)
    margin = (logp[1, 2] + logp[2, 3] + 3.0) - (logp[1, 4] + 1.0)
    expected = -F.logsigmoid(0.2 * margin)
    parts = compose_loss(model, {**STUDENT, **PAIRS}, replay_dpo_beta=0.2)
    assert parts.trace_replay_dpo.item() == pytest.approx(expected.item())


def test_simpo_compares_mean_log_probs_and_reads_no_reference(model):
    logp = model.table.log_softmax(-1)
    margin = (logp[1, 2] + logp[2, 3]) / 2 - logp[1, 4]
    expected = -F.logsigmoid(2.0 * margin - 1.0)
    inputs = {key: value for key, value in {**STUDENT, **PAIRS}.items() if "ref" not in key}
    assert compose_loss(model, inputs, dpo_variant="simpo").trace_replay_dpo.item() == pytest.approx(expected.item())


def test_pairs_with_an_empty_side_are_left_out_of_the_mean_and_counted(model):
    three = {key: value.repeat_interleave(3, 0) for key, value in PAIRS.items()}
    three["dpo_chosen_response_mask"][0] = 0
    three["dpo_rejected_response_mask"][2] = 0
    with pytest.warns(UserWarning, match=r"^2 of 3 pairs have an empty side and are left out$"):
        parts = compose_loss(model, {**STUDENT, **three})
    assert parts.trace_replay_dpo.item() == compose_loss(model, {**STUDENT, **PAIRS}).trace_replay_dpo.item()


def test_without_a_complete_pair_the_preference_loss_is_zero_on_the_graph(model):
    empty = {**PAIRS, "dpo_chosen_response_mask": torch.zeros(1, 3)}
    with pytest.warns(UserWarning, match=r"^1 of 1 pairs have an empty side and are left out$"):
        parts = compose_loss(model, {**STUDENT, **empty})
    assert parts.trace_replay_dpo.item() == 0.0
    assert parts.trace_replay_dpo.requires_grad


def test_detached_gives_four_numbers(model):
    parts = compose_loss(model, ALL)
    numbers = parts.detached()
    assert list(numbers) == ["lm_ce", "sdpo_jsd", "trace_replay_dpo", "total"]
    assert numbers["total"] == pytest.approx(
        numbers["lm_ce"] + 0.1 * numbers["sdpo_jsd"] + 0.05 * numbers["trace_replay_dpo"]
    )
    assert all(type(value) is float for value in numbers.values())


def test_an_answer_that_begins_a_row_cannot_be_scored(model):
    first = {"input_ids": torch.tensor([[1, 2]]), "response_mask": torch.tensor([[1, 1]])}
    assert compose_loss(model, first).lm_ce.item() == pytest.approx(-model.table.log_softmax(-1)[1, 2].item())


def test_no_answer_at_all_is_zero_on_the_graph(model):
    parts = compose_loss(model, {"input_ids": IDS, "response_mask": torch.zeros_like(MASK)})
    parts.total.backward()
    assert parts.total.item() == 0.0
    assert not model.table.grad.any()


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        (ALL, {"dpo_variant": "ppo"}, "dpo_variant must be one of dpo, simpo, got 'ppo'"),
        (ALL, {"sdpo_wrapper": "gate"}, "sdpo_wrapper must be one of none, taid, entropy_opd, got 'gate'"),
        (ALL, {"sdpo_wrapper": "taid", "taid_t": 1.5}, "taid must be in [0, 1], got 1.5"),
        (ALL, {"sdpo_jsd_beta": 1.5}, "sdpo_jsd_beta must be in [0, 1], got 1.5"),
        ({"input_ids": IDS}, {}, "inputs lack 'response_mask'"),
        (
            {"input_ids": IDS, "response_mask": MASK[:1]},
            {},
            "input_ids (2, 4) and response_mask (1, 4) must both be (B, T)",
        ),
        (
            {"input_ids": IDS, "response_mask": torch.where(MASK.bool(), IDS, -100)},
            {},
            "response_mask must be a mask of 0 and 1; from Hugging Face labels it is `labels != -100`",
        ),
        (
            {**STUDENT, "sdpo_loss_mask": TEACHER_MASK},
            {},
            "inputs have ['sdpo_loss_mask'] and not ['ctx_teacher_input_ids']: give all or none",
        ),
        (
            {**STUDENT, **SDPO, "sdpo_loss_mask": torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 0]])},
            {},
            "sdpo_loss_mask selects [1, 2] teacher tokens per row and response_mask [2, 2] answer tokens: the i-th of "
            "one is the i-th of the other",
        ),
        (
            {**STUDENT, **SDPO, "sdpo_loss_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 0]])},
            {},
            "answer token 0 has id 3 in input_ids and 6 in ctx_teacher_input_ids: "
            "the teacher must read the same answer",
        ),
        (
            {key: value for key, value in ALL.items() if "chosen_ref" not in key},
            {},
            "dpo_variant='dpo' compares with a reference; inputs lack ['dpo_chosen_ref_logprobs']",
        ),
    ],
)
def test_bad_input_is_refused_by_name(model, inputs, options, said):
    with pytest.raises(ValueError) as caught:
        compose_loss(model, inputs, **options)
    assert str(caught.value) == said


@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
@pytest.mark.parametrize("align", [False, True])
def test_the_example_batch_feeds_every_part(tiny_model_folder, variant, align):
    tokenizer, model = load_tokenizer(tiny_model_folder), load_policy(tiny_model_folder, dtype="float32")
    batch = build_batch(tokenizer, variant=variant, align_sdpo_shapes=align)
    assert list(batch) == [*STUDENT, *SDPO, *PAIRS]
    student, teacher = batch["input_ids"].shape[1], batch["ctx_teacher_input_ids"].shape[1]
    assert (student == teacher) == align
    assert batch["response_mask"].sum() == batch["sdpo_loss_mask"].sum() > 0
    parts = compose_loss(model, batch, sdpo_wrapper="taid", taid_t=TAIDScheduler(10).t)
    parts.total.backward()
    numbers = parts.detached()
    assert all(math.isfinite(value) and value > 0 for value in numbers.values())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_padding_the_student_changes_nothing(tiny_model_folder):
    tokenizer, model = load_tokenizer(tiny_model_folder), load_policy(tiny_model_folder, dtype="float32").double()
    plain, padded = (build_batch(tokenizer, align_sdpo_shapes=align) for align in (False, True))
    one, other = (compose_loss(model, batch).detached() for batch in (plain, padded))
    assert one == pytest.approx(other, rel=1e-6)


def test_the_seed_makes_the_reference_and_leaves_the_global_generator_alone(tiny_model_folder):
    tokenizer = load_tokenizer(tiny_model_folder)
    before = torch.random.get_rng_state()
    one, same, other = (build_batch(tokenizer, seed=seed)["dpo_chosen_ref_logprobs"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_example_is_refused(tiny_model_folder):
    with pytest.raises(ValueError, match=r"^variant must be one of factorial, binary_search, got 'sort'$"):
        build_batch(load_tokenizer(tiny_model_folder), variant="sort")
