"""What `ModelView` does not compute: tokens nobody scores, forwards a trainer has run, numbers an earlier call left."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import composer_core.loss.outputs
from composer_core.batch import Hints, Seqs
from composer_core.divergences import Divergence, DivergenceKind, PaperGate, SoftGate, Support
from composer_core.loss.heads import take_apart
from composer_core.loss.outputs import Outputs
from composer_core.loss.views import KnownForward, ModelView

VOCABULARY, WIDTH = 12, 5
SEQS = Seqs.from_lists([[1, 2, 3, 4], [5], [2, 2, 7]])
SCORED = torch.tensor([False, False, True, True, True, False, True, False])  # one of them a first token
HINTS = Hints(
    seqs=Seqs.from_lists([[9, 8, 3, 4], [6, 2]]),
    student=torch.tensor([2, 3, 6, 0]),
    teacher=torch.tensor([2, 3, 5, 0]),
    weight=torch.tensor([1.0, 0.5, 2.0, 0.0]),
)


class Backbone(nn.Module):
    """Each state is a squashed sum of the embeddings so far. Counts its forwards."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.forwards = 0

    def forward(self, input_ids, attention_mask, use_cache):
        self.forwards += 1
        seen = self.embedding(input_ids) * attention_mask[:, :, None]
        return SimpleNamespace(last_hidden_state=torch.tanh(seen.cumsum(1)))


class Tiny(nn.Module):
    """What `take_apart` knows of a Hugging Face model."""

    config = SimpleNamespace(model_type="llama")

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base_model = Backbone()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    @property
    def forwards(self):
        return self.base_model.forwards


@pytest.fixture
def model():
    return Tiny().double()


@pytest.fixture
def projected(monkeypatch):
    """Rows of hidden states that met a head, one number per call."""
    calls = []

    def watch(name):
        real = getattr(composer_core.loss.outputs, name)

        def watched(hidden, *args, **kwargs):
            calls.append(len(hidden))
            return real(hidden, *args, **kwargs)

        monkeypatch.setattr(composer_core.loss.outputs, name, watched)

    watch("fused_logps")
    watch("fused_linear_divergence")
    return calls


def _gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def _equal(found, expected):
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(found, expected, strict=True))


# -- tokens that nobody scores -----------------------------------------------------------------------------------------


def _scored(mask):
    return Seqs(SEQS.ids, SEQS.cu, scored=mask)


def test_tokens_left_out_give_zero_and_never_meet_the_head(model, projected):
    whole = ModelView(model, rollouts=None).logps(SEQS, grad=True, temperature=0.7)
    part = ModelView(model, rollouts=None).logps(_scored(SCORED), grad=True, temperature=0.7)
    assert projected == [5, 3]  # all but the three first tokens; of the four scored ones, one is a first token
    assert torch.allclose(part, torch.where(SCORED, whole, 0), rtol=1e-12, atol=0)
    assert part.nonzero().flatten().tolist() == [2, 3, 6]


def test_the_gradients_are_those_of_scoring_everything(model):
    factors = torch.linspace(-1, 2, 8, dtype=torch.float64)

    def gradients(seqs):
        logps = ModelView(model, rollouts=None).logps(seqs, grad=True, temperature=0.7)
        return _gradients((logps * factors * SCORED).sum(), model)

    assert _equal(gradients(_scored(SCORED)), gradients(SEQS))


def test_a_mask_of_another_length_is_refused(model):
    with pytest.raises(
        ValueError, match=r"^ids \(8,\), scored \(1,\): the shapes must be equal \(one entry per token\)$"
    ):
        ModelView(model, rollouts=None).logps(_scored(torch.ones(1).bool()), grad=True, temperature=1.0)


def test_nothing_to_score_is_zero_joined_to_the_graph(model, projected):
    logps = ModelView(model, rollouts=None).logps(_scored(torch.zeros(8).bool()), grad=True, temperature=1.0)
    assert projected == [0]
    assert (model.forwards, logps.tolist()) == (1, [0.0] * 8)
    assert not any(gradient.any() for gradient in _gradients(logps.sum(), model))


# -- forwards that the trainer has run ---------------------------------------------------------------------------------


def _known(model, **options):
    """The trainer's own forward on left-padded ids, as `KnownForward`."""
    width, lengths = 6, SEQS.lengths
    start = width - lengths
    ids, mask = torch.full((3, width), 11), torch.zeros(3, width, dtype=torch.int64)
    for row, (low, high) in enumerate(zip(SEQS.cu[:-1], SEQS.cu[1:], strict=True)):
        ids[row, start[row] :], mask[row, start[row] :] = SEQS.ids[low:high], 1
    states = model.base_model(ids, mask, use_cache=False).last_hidden_state
    return KnownForward(Outputs(SEQS, states, take_apart(model).head, start=start), **options)


def _loss(view):
    divergence = (view.divergence(HINTS, Divergence(temperature=1.3)) * HINTS.weight).sum()
    logits = view.logits(SEQS, torch.tensor([1, 7]), grad=True, temperature=0.9)
    return divergence + view.logps(SEQS, grad=True, temperature=0.8).sum() + logits.square().sum()


def test_a_known_forward_on_left_padded_ids_is_as_good_as_the_views_own(model):
    known = _loss(ModelView(model, rollouts=SEQS, known=_known(model)))
    assert model.forwards == 2  # the trainer's, and the teacher's
    fresh = _loss(ModelView(model, rollouts=SEQS))
    assert known.item() == pytest.approx(fresh.item(), rel=1e-12)
    assert _equal(_gradients(known, model), _gradients(fresh, model))


def test_known_log_probs_serve_at_their_temperature_alone(model, projected):
    logps = torch.arange(8, dtype=torch.float64)
    view = ModelView(model, rollouts=SEQS, known=_known(model, logps=logps, temperature=0.6))
    assert view.logps(SEQS, grad=True, temperature=0.6) is logps
    assert projected == []
    own = ModelView(model, rollouts=SEQS).logps(SEQS, grad=True, temperature=1.0)
    assert torch.allclose(view.logps(SEQS, grad=True, temperature=1.0), own, rtol=1e-12)


# -- numbers that an earlier call left ---------------------------------------------------------------------------------


def _gap(temperature):
    return Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=temperature, support=Support.SAMPLED)


SPECS = {
    "jsd": Divergence(temperature=1.3),
    "taid": Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=1.3, taid=0.4),
    "topk": Divergence(temperature=1.3, support=Support.TOPK_UNION, k=3, clip=0.01),
    "soft": Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=1.3, gate=SoftGate(), taid=0.7),
    "paper": Divergence(DivergenceKind.KL_STUDENT_TEACHER, temperature=1.3, gate=PaperGate(tau=0.1)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_sampled_gap_after_another_divergence_of_the_same_hints_is_free(model, projected, spec):
    other = Tiny(seed=1).double()
    with torch.no_grad():
        expected = ModelView(model, rollouts=SEQS, teacher=other).divergence(HINTS, _gap(1.3), teacher="teacher")
    view = ModelView(model, rollouts=SEQS, teacher=other)
    view.divergence(HINTS, spec, teacher="teacher")
    before = len(projected)
    with torch.no_grad():
        gap = view.divergence(HINTS, _gap(1.3), teacher="teacher")
    assert len(projected) == before
    assert torch.allclose(gap, expected, rtol=1e-12)
    assert gap[3] == 0  # filler
    assert gap[:3].all()


@pytest.mark.parametrize(
    "ask",
    [
        lambda view: view.divergence(HINTS, _gap(1.0)),
        lambda view: view.divergence(HINTS, _gap(1.3), teacher="teacher"),
        lambda view: view.divergence(Hints(HINTS.seqs, HINTS.student, HINTS.teacher, HINTS.weight), _gap(1.3)),
        lambda view: view.divergence(HINTS, Divergence(temperature=1.3)),
    ],
    ids=["temperature", "teacher", "hints", "divergence"],
)
def test_another_question_is_computed(model, projected, ask):
    view = ModelView(model, rollouts=SEQS, teacher=Tiny(seed=1).double())
    view.divergence(HINTS, Divergence(temperature=1.3))
    with torch.no_grad():
        ask(view)
    assert len(projected) == 2


def test_with_gradient_the_gap_is_computed(model):
    view = ModelView(model, rollouts=SEQS)
    view.divergence(HINTS, Divergence())
    assert view.divergence(HINTS, _gap(1.0)).requires_grad


def test_a_target_of_the_student_alone_leaves_no_gap_behind(model, projected):
    view = ModelView(model, rollouts=SEQS)
    assert not view.divergence(HINTS, Divergence(taid=0.0)).any()
    with torch.no_grad():
        assert view.divergence(HINTS, _gap(1.0))[:3].all()
    assert len(projected) == 2
