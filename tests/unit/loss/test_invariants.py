"""What any wiring of the three parts must keep, one test per line of the recipes' cross-recipe checklist.

In corrected form: TAID is a target in front of the base divergence, so that both of its ends hold exactly.
"""

import pytest
import torch

from composer_core.loss.compose import compose_loss
from composer_core.loss.example_batch import build_batch
from composer_core.loss.preference import simpo_loss

PAIR_KEYS = ("dpo_",)
SDPO_KEYS = ("ctx_teacher", "sdpo_")


@pytest.fixture(scope="module")
def parts(tiny_model_folder):
    from composer_core.hf.models import load_policy, load_tokenizer

    model = load_policy(tiny_model_folder, dtype="float32")
    return model, build_batch(load_tokenizer(tiny_model_folder))


def _without(batch, prefixes):
    return {key: value for key, value in batch.items() if not key.startswith(prefixes)}


def _run(model, batch, **options):
    model.zero_grad()
    result = compose_loss(model, batch, **options)
    result.total.backward()
    return result, [p.grad.clone() for p in model.parameters()]


def _assert_bit_equal(one, other):
    (a, a_grads), (b, b_grads) = one, other
    assert torch.equal(a.total, b.total)
    assert all(torch.equal(x, y) for x, y in zip(a_grads, b_grads, strict=True))


def test_alpha_sdpo_zero_is_bit_equal_to_no_sdpo(parts):
    model, batch = parts
    _assert_bit_equal(_run(model, batch, alpha_sdpo=0.0), _run(model, _without(batch, SDPO_KEYS)))


def test_beta_replay_zero_is_bit_equal_to_no_replay(parts):
    model, batch = parts
    _assert_bit_equal(_run(model, batch, beta_replay=0.0), _run(model, _without(batch, PAIR_KEYS)))


def test_both_zero_is_bit_equal_to_the_first_part_alone(parts):
    model, batch = parts
    alone = _without(batch, (*SDPO_KEYS, *PAIR_KEYS))
    _assert_bit_equal(_run(model, batch, alpha_sdpo=0.0, beta_replay=0.0), _run(model, alone))


def test_taid_without_its_t_is_refused_before_anything_is_computed(parts):
    model, batch = parts
    with pytest.raises(ValueError, match=r"^sdpo_wrapper='taid' needs taid_t, in \[0, 1\]: take it from a TAIDSche"):
        compose_loss(model, batch, sdpo_wrapper="taid")


def test_taid_at_zero_ignores_the_teacher(parts):
    model, batch = parts
    with_teacher = _run(model, batch, sdpo_wrapper="taid", taid_t=0.0)
    assert with_teacher[0].sdpo_jsd.item() == 0.0
    without = _run(model, batch, alpha_sdpo=0.0)
    for found, expected in zip(with_teacher[1], without[1], strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_taid_at_one_is_plain_sdpo(parts, beta):
    model, batch = parts
    options = {"sdpo_jsd_beta": beta}
    _assert_bit_equal(_run(model, batch, sdpo_wrapper="taid", taid_t=1.0, **options), _run(model, batch, **options))


def test_simpo_is_differentiable_through_log_sigmoid():
    chosen = torch.tensor([-1.0, -400.0], requires_grad=True)
    rejected = torch.tensor([-2.0, -1.0], requires_grad=True)
    simpo_loss(chosen, rejected, beta=2.0, gamma=1.0).backward()
    # d/dx -log sigmoid(2 x - 1) = -2 sigmoid(1 - 2 x), over two pairs: x = 1 and x = -399
    assert chosen.grad.tolist() == pytest.approx([-torch.sigmoid(torch.tensor(-1.0)).item(), -1.0])
    assert rejected.grad.tolist() == pytest.approx([-x for x in chosen.grad.tolist()])


def test_entropy_opd_is_zero_where_student_and_teacher_agree(parts):
    model, batch = parts
    same = {**batch, "ctx_teacher_input_ids": batch["input_ids"], "sdpo_loss_mask": batch["response_mask"]}
    agreed, gradients = _run(model, same, sdpo_wrapper="entropy_opd", alpha_sdpo=1.0, beta_replay=0.0)
    assert agreed.sdpo_jsd.item() == pytest.approx(0.0, abs=1e-6)
    for found, expected in zip(gradients, _run(model, same, alpha_sdpo=0.0, beta_replay=0.0)[1], strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
