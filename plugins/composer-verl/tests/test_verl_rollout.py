"""The rollout's server without Ray: requests, batches, weights and what happens when one of them goes wrong."""

import asyncio
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from composer_core.errors import RunFailed, UsageError
from composer_core.hf.tiny import make_tiny
from composer_verl import server
from composer_verl.sampling import Request, Sampling, complete
from composer_verl.server import HFServer, ServerSettings, stopping_ids
from composer_verl.weights import buckets

BUCKET = 20_000  # bytes: several parts for the tiny model's 300 kB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(made, seed=3)
    return made


@pytest.fixture(scope="module")
def settings(folder):
    return ServerSettings(
        model=str(folder),
        dtype="float32",
        load=False,
        prompt_length=8,
        response_length=12,
        max_batch=16,
        seed=7,
    )


@pytest.fixture(scope="module")
def policy(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def send(to, named, *, step=1, size=BUCKET, **kwargs):
    parts = list(buckets(named, size=size))
    for i, part in enumerate(parts):
        await to.update_weights(part, first=i == 0, last=i == len(parts) - 1, step=step, **kwargs)
    return len(parts)


def ask(to, prompt, **params):
    return to.generate("r", prompt_ids=list(prompt), sampling_params={"seed": 1, "temperature": 1.0, **params})


def drawn(model, prompt, *, seed=1, max_tokens=12):
    request = Request(tuple(prompt), Sampling(seed=seed, max_tokens=max_tokens))
    return complete(model, [request], eos=[1])[0]


def test_the_servers_model_is_the_trainers_bit_by_bit(settings, policy):
    async def run():
        to = HFServer(settings)
        assert await send(to, policy.state_dict().items()) > 5
        return to, await ask(to, [20, 21])

    to, output = asyncio.run(run())
    own = to._weights.model.state_dict()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(own[name], tensor)
        assert own[name].data_ptr() != tensor.data_ptr()
    expected = drawn(policy, [20, 21])
    assert output.token_ids == expected.tokens
    assert output.log_probs == pytest.approx(expected.logps, abs=1e-6)
    assert (output.stop_reason, output.extra_fields) == ("completed", {"global_steps": 1})


def test_a_tied_head_need_not_be_sent(settings, policy):
    named = {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}
    assert len(named) == len(policy.state_dict()) - 1

    async def run():
        to = HFServer(settings)
        await send(to, named.items())
        return to._weights.model

    assert torch.equal(asyncio.run(run()).lm_head.weight, policy.lm_head.weight)


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: without(state, "model.norm.weight"),
            "the trainer did not send all weights of the rollout's model: model.norm.weight",
        ),
        (
            lambda state: {**state, "model.extra.weight": torch.zeros(2)},
            "the trainer sent weights that the rollout's model does not have: model.extra.weight",
        ),
        (
            lambda state: {**state, "model.norm.weight": torch.zeros(2)},
            "the trainer sent model.norm.weight in the shape (2,), here (64,)",
        ),
        (
            lambda state: {"lm_head.weight": state["lm_head.weight"]},
            "the trainer did not send all weights of the rollout's model: model.layers.0.input_layernorm.weight, "
            "model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight and 20 more",
        ),
    ],
    ids=["missing", "unknown", "shape", "many"],
)
def test_weights_that_do_not_fit_are_refused_and_then_nothing_is_generated(settings, policy, change, message):
    async def run():
        to = HFServer(settings)
        await send(to, policy.state_dict().items())
        with pytest.raises(RunFailed) as refused:
            await send(to, change(policy.state_dict()).items(), step=2)
        with pytest.raises(RunFailed) as asked:
            await ask(to, [20])
        await send(to, policy.state_dict().items(), step=3)
        return str(refused.value), str(asked.value), await ask(to, [20])

    refused, asked, output = asyncio.run(run())
    assert refused == message
    assert asked == "no rollout: an update of the rollout's weights broke off"
    assert output.extra_fields == {"global_steps": 3}


def test_nothing_is_generated_before_the_first_weights(settings):
    with pytest.raises(RunFailed) as caught:
        asyncio.run(ask(HFServer(settings), [20]))
    assert str(caught.value) == "no rollout: the trainer has not sent any weights yet"


def test_a_request_waits_while_weights_are_half_new(settings, policy):
    new = {name: tensor * 1.5 for name, tensor in policy.state_dict().items()}

    async def run():
        to = HFServer(settings)
        await send(to, policy.state_dict().items())
        first, *rest = buckets(new.items(), size=BUCKET)
        await to.update_weights(first, first=True, last=False, step=2)
        asked = asyncio.create_task(ask(to, [20, 21]))
        await asyncio.sleep(10 * server.WINDOW_S)
        assert not asked.done()
        for i, part in enumerate(rest, start=1):
            await to.update_weights(part, first=False, last=i == len(rest), step=2)
        return await asked

    output = asyncio.run(run())
    renewed = AutoModelForCausalLM.from_config(policy.config).eval()
    renewed.load_state_dict(new)
    assert output.token_ids == drawn(renewed, [20, 21]).tokens
    assert output.extra_fields == {"global_steps": 2}


def test_an_error_reaches_the_requests_of_its_batch_and_no_other(settings, policy, monkeypatch):
    batches = []

    def fails_once(model, requests, *, eos):
        batches.append(len(requests))
        if len(batches) == 1:
            raise RuntimeError("out of memory")
        return complete(model, requests, eos=eos)

    monkeypatch.setattr(server, "complete", fails_once)

    async def run():
        to = HFServer(dataclasses.replace(settings, max_batch=2))
        await send(to, policy.state_dict().items())
        return await asyncio.gather(*(ask(to, [20 + i]) for i in range(4)), return_exceptions=True)

    outcomes = asyncio.run(run())
    assert batches == [2, 2]
    assert [str(outcome) for outcome in outcomes[:2]] == ["out of memory"] * 2
    assert [outcome.token_ids for outcome in outcomes[2:]] == [drawn(policy, [22]).tokens, drawn(policy, [23]).tokens]


def test_a_request_whose_caller_went_away_is_left_out(settings, policy, monkeypatch):
    seen = []

    def counted(model, requests, *, eos):
        seen.extend(request.prompt for request in requests)
        return complete(model, requests, eos=eos)

    monkeypatch.setattr(server, "complete", counted)

    async def run():
        to = HFServer(settings)
        await send(to, policy.state_dict().items())
        gone, stays = (asyncio.create_task(ask(to, [token])) for token in (20, 21))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert asyncio.run(run()).token_ids == drawn(policy, [21]).tokens
    assert seen == [(21,)]


def test_a_request_without_a_seed_draws_by_its_id(settings, policy):
    async def run():
        to = HFServer(settings)
        await send(to, policy.state_dict().items())
        ids = ("a", "a", "b")
        return await asyncio.gather(*(to.generate(i, prompt_ids=[20], sampling_params={}) for i in ids))

    first, again, other = asyncio.run(run())
    assert first.token_ids == again.token_ids != other.token_ids
    # the first 8 bytes of sha256("7:a") without the last bit
    assert first.token_ids == drawn(policy, [20], seed=0x82D9D62BAA6A7870 >> 1).tokens


def test_a_completion_ends_where_prompt_and_response_are_full(settings, policy):
    async def run():
        to = HFServer(settings)
        await send(to, policy.state_dict().items())
        lengths = [len((await ask(to, [20] * n, ignore_eos=True)).token_ids) for n in (1, 8, 15, 19)]
        refusals = []
        for prompt in ([], [20] * 20):
            with pytest.raises(UsageError) as caught:
                await ask(to, prompt)
            refusals.append(str(caught.value))
        return lengths, refusals

    lengths, refusals = asyncio.run(run())
    assert lengths == [12, 12, 5, 1]  # at most 12, and 20 with the prompt
    assert refusals == [
        f"rollout: a prompt of {n} tokens: it must be 1 to 19\n  fix: shorten it, or raise data.max_tokens"
        for n in (0, 20)
    ]


def test_a_smaller_window_and_ignoring_the_end_are_taken_from_the_configuration(settings, policy):
    first = drawn(policy, [20]).tokens[0]

    async def length(**changes):
        to = HFServer(dataclasses.replace(settings, window=10, **changes))
        to._eos = (first,)
        await send(to, policy.state_dict().items())
        return [len((await ask(to, [20], **params)).token_ids) for params in ({}, {"ignore_eos": False})]

    assert asyncio.run(length()) == [1, 1]
    assert asyncio.run(length(ignore_eos=True)) == [9, 1]  # 10 with the prompt


def test_images_are_refused(settings):
    with pytest.raises(UsageError) as caught:
        asyncio.run(HFServer(settings).generate("r", prompt_ids=[20], sampling_params={}, image_data=["x"]))
    assert str(caught.value) == "rollout: composer_hf reads text only\n  fix: use rollout: vllm or sglang"


def test_every_end_of_the_folder_stops_a_completion(settings, folder, tmp_path):
    from shutil import copytree

    assert stopping_ids(settings) == (1,)
    other = copytree(folder, tmp_path / "model")
    (other / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert stopping_ids(dataclasses.replace(settings, model=str(other))) == (1, 5, 9)


def test_a_bucket_holds_at_most_its_size_and_only_its_own_memory():
    whole = torch.arange(1000.0)
    named = [("a", whole[:100]), ("b", whole[100:200]), ("c", whole), ("d", torch.ones(3, 2, dtype=torch.bfloat16).T)]
    parts = list(buckets(iter(named), size=1000))
    assert [[name for name, _ in part] for part in parts] == [["a", "b"], ["c"], ["d"]]
    for (name, sent), (_, got) in zip(named, [pair for part in parts for pair in part], strict=True):
        assert torch.equal(got, sent), name
        assert got.dtype == sent.dtype
        assert got.untyped_storage().nbytes() == got.nbytes


def adapted(policy, *, seed):
    """The policy with a LoRA that is not zero, and its configuration."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_config(policy.config)
    model.load_state_dict(policy.state_dict())
    model = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model, config


def base_of(model):
    """The base model's weights as verl sends them: named as if every projection had an adapter."""
    state = model.get_base_model().state_dict()
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in state.items() if "lora_" not in name}
    return {name.replace("proj.weight", "proj.base_layer.weight"): tensor for name, tensor in kept.items()}


@pytest.mark.parametrize("load", [False, True], ids=["base sent", "base loaded"])
def test_an_adapter_is_taken_without_being_merged(settings, policy, load):
    model, config = adapted(policy, seed=1)
    later, _ = adapted(policy, seed=2)

    async def run():
        to = HFServer(dataclasses.replace(settings, load=load))
        if not load:
            await send(to, base_of(model).items(), adapter=config.to_dict())
        outputs = []
        for step, sent in enumerate((model, later)):
            await send(to, get_peft_model_state_dict(sent).items(), step=step, adapter=config.to_dict(), whole=False)
            outputs.append(await ask(to, [20, 21]))
        return outputs

    for sent, output in zip((model, later), asyncio.run(run()), strict=True):
        expected = drawn(sent, [20, 21])
        assert output.token_ids == expected.tokens
        assert output.log_probs == pytest.approx(expected.logps, abs=1e-6)
    assert drawn(model, [20, 21]).logps != drawn(policy, [20, 21]).logps


def test_a_rollout_with_an_adapter_takes_no_weights_without_one(settings, policy):
    model, config = adapted(policy, seed=1)

    async def run():
        to = HFServer(settings)
        await send(to, base_of(model).items(), adapter=config.to_dict())
        await send(to, policy.state_dict().items())

    with pytest.raises(RunFailed) as caught:
        asyncio.run(run())
    assert str(caught.value) == "the trainer sent weights without an adapter to a rollout that has one"
