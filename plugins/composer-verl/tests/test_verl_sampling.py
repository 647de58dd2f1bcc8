"""Decoding: the distribution drawn from, the log-prob reported, when a request ends, and who shares its batch."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_core.errors import NonFinite, UsageError
from composer_core.hf.tiny import make_tiny
from composer_verl.sampling import Request, Sampling, choose, complete, logp_of, read_sampling

EOS = 1
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
DRAWS = 4000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, seed=3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def request(prompt, *, seed=0, max_tokens=8, **params):
    return Request(tuple(prompt), Sampling(seed=seed, max_tokens=max_tokens, **params))


def shares(**params):
    """How often each token is drawn from LOGITS: one draw of each of DRAWS seeds."""
    drawn = [
        choose(LOGITS, Sampling(seed=0, max_tokens=1, **params), generator=torch.Generator().manual_seed(seed))
        for seed in range(DRAWS)
    ]
    return torch.bincount(torch.stack(drawn), minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # e^2, e^1, e^0, e^-1 over their sum 11.475
        ({}, [0.6439, 0.2369, 0.0871, 0.0321, 0]),
        # the same with the exponents doubled: e^4, e^2, 1, e^-2 over 63.122
        ({"temperature": 0.5}, [0.8650, 0.1171, 0.0158, 0.0021, 0]),
        # e^2, e^1 over 10.107
        ({"top_k": 2}, [0.7311, 0.2689, 0, 0, 0]),
        # 0.6439 < 0.7 <= 0.8808: the token that crosses stays
        ({"top_p": 0.7}, [0.7311, 0.2689, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        # temperature comes first: at 0.5 the first token alone holds 0.7
        ({"top_p": 0.7, "temperature": 0.5}, [1, 0, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
    ],
    ids=["plain", "cold", "top-k", "top-p", "smallest-top-p", "cold-top-p", "greedy"],
)
def test_tokens_are_drawn_from_the_filtered_softmax(params, expected):
    # The standard error of a share is at most 0.008 here, and 0.03 almost four of them.
    torch.testing.assert_close(shares(**params), torch.tensor(expected, dtype=torch.float32), atol=0.03, rtol=0)


def test_a_barred_token_is_never_drawn():
    drawn = {
        int(choose(LOGITS, Sampling(seed=0, max_tokens=1), generator=torch.Generator().manual_seed(seed), barred=[0]))
        for seed in range(200)
    }
    assert drawn == {1, 2, 3}


def test_the_logp_is_that_of_the_whole_softmax_at_the_temperature():
    # log(e^2 / 63.122) with doubled exponents; at temperature 0 as at 1
    assert logp_of(LOGITS, torch.tensor(1), temperature=0.5).item() == pytest.approx(-2.1451, abs=1e-4)
    assert logp_of(LOGITS, torch.tensor(1), temperature=0).item() == pytest.approx(-1.4402, abs=1e-4)


def test_reported_logps_equal_a_forward_over_the_whole_sequence(model):
    requests = [
        request([20, 21, 22, 23], seed=5, temperature=0.7, top_k=10),
        request([30], seed=6, max_tokens=20),
        request([40] * 11, seed=7, temperature=0),
    ]
    for asked, got in zip(requests, complete(model, requests, eos=[EOS]), strict=True):
        ids = torch.tensor([[*asked.prompt, *got.tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(asked.prompt) - 1 : -1]
        expected = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(got.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(got.logps), expected, atol=1e-6, rtol=0)


def test_a_request_draws_the_same_alone_and_in_any_company(model):
    asked = request([20, 21, 22], seed=11, max_tokens=16)
    others = [request([50 + i] * (i + 1), seed=i, max_tokens=3 * i + 1, temperature=0.5 + i) for i in range(6)]
    alone = complete(model, [asked], eos=[EOS])[0]
    for at in (0, 3, 6):
        got = complete(model, [*others[:at], asked, *others[at:]], eos=[EOS])[at]
        assert got.tokens == alone.tokens
        assert got.logps == pytest.approx(alone.logps, abs=1e-6)


def test_another_seed_draws_something_else(model):
    first, second = complete(model, [request([20], seed=1), request([20], seed=2)], eos=[EOS])
    assert first.tokens != second.tokens


def test_a_request_that_is_over_stays_inside_the_models_window(model):
    # The first ends at the window's last position; the second goes on for 40 more.
    window = model.config.max_position_embeddings
    seen = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].max().item()), with_kwargs=True
    )
    try:
        requests = [request([20] * (window - 1), max_tokens=1, ignore_eos=True), request([21], max_tokens=40)]
        short, long = complete(model, requests, eos=[])
    finally:
        handle.remove()
    assert (len(short.tokens), len(long.tokens)) == (1, 40)
    assert max(seen) < window


def test_a_completion_ends_with_its_first_stopping_token(model):
    drawn = complete(model, [request([20], seed=3, max_tokens=12)], eos=[])[0].tokens
    stop = drawn[5]
    until = drawn.index(stop) + 1

    def tokens(**params):
        eos = params.pop("eos", [])
        return complete(model, [request([20], seed=3, max_tokens=12, **params)], eos=eos)[0].tokens

    assert tokens(eos=[stop]) == drawn[:until]
    assert tokens(eos=[stop], ignore_eos=True) == drawn
    assert tokens(stop_token_ids=(stop,)) == drawn[:until]
    assert tokens(stop_token_ids=(stop,), ignore_eos=True) == drawn[:until]
    held = tokens(eos=[stop], min_tokens=9)
    assert len(held) >= 10 or stop not in held
    assert stop not in held[:9]
    assert held[: until - 1] == drawn[: until - 1]


def test_logits_that_are_nan_stop_the_batch(model):
    broken = AutoModelForCausalLM.from_config(model.config).eval()
    torch.nn.init.constant_(broken.model.norm.weight, float("nan"))
    with pytest.raises(NonFinite) as caught:
        complete(broken, [request([20])], eos=[])
    assert str(caught.value) == "the rollout model's logits are not finite\n  fix: lower train.learning_rate"


def test_verls_parameters_are_read_with_the_servers_defaults():
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    read = read_sampling(sent, max_tokens=32, room=20, seed=9)
    assert dataclasses.asdict(read) == {
        "seed": 9,
        "max_tokens": 20,
        "min_tokens": 0,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.9,
        "ignore_eos": False,
        "stop_token_ids": (),
    }
    named = {"seed": 4, "max_new_tokens": 3, "stop_token_ids": [7, 8], "min_tokens": 2, "ignore_eos": True}
    read = read_sampling(named, max_tokens=32, room=20, seed=9)
    assert (read.seed, read.max_tokens, read.stop_token_ids, read.min_tokens, read.ignore_eos) == (
        4,
        3,
        (7, 8),
        2,
        True,
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"repetition_penalty": 1.05},
            "sampling_params.repetition_penalty: composer_hf does not know repetition_penalty = 1.05\n"
            "  fix: take it out, or use rollout: vllm or sglang",
        ),
        (
            {"stop": ["\n\n"]},
            "sampling_params.stop: composer_hf does not know stop = ['\\n\\n']\n"
            "  fix: take it out, or use rollout: vllm or sglang",
        ),
        ({"temperature": -1}, "sampling_params.temperature: temperature cannot be -1"),
        ({"top_p": 0}, "sampling_params.top_p: top_p cannot be 0"),
        ({"top_k": -2}, "sampling_params.top_k: top_k cannot be -2"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: max_tokens cannot be 0"),
    ],
    ids=["penalty", "stop", "temperature", "top_p", "top_k", "max_tokens"],
)
def test_a_parameter_that_cannot_be_honoured_is_refused(params, message):
    with pytest.raises(UsageError) as caught:
        read_sampling(params, max_tokens=8, room=8, seed=0)
    assert str(caught.value) == message
