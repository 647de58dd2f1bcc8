"""Memory from headers of weight files, worked out by hand; money from an executor's price."""

from __future__ import annotations

import json
import struct

import pytest

from composer_core.data.estimate import cost, in_bytes, memory
from composer_core.data.model_size import measure, size_of
from composer_core.errors import UsageError
from composer_core.plugins.builtin_settings import InlineSettings
from composer_core.plugins.contributions import ExecutorPlugin, Kind
from composer_core.plugins.hookspecs import hookimpl
from composer_core.plugins.registry import Owner, Registry
from composer_core.plugins.settings import NoSettings, Settings
from composer_core.spec.model import (
    DataSpec,
    LimitsSpec,
    LoraSpec,
    LossSpec,
    ModelSpec,
    Plugged,
    PromptsSpec,
    RunSpec,
    TrainSpec,
)
from composer_core.spec.sections import ReplicasSpec

# 10 tokens of width 4; one layer with q (4 x 4), k (2 x 4), down (4 x 6) and a norm (4); a head of its own.
SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
    "model.layers.0.input_layernorm.weight": (4,),
    "lm_head.weight": (10, 4),
}
PARAMETERS = 40 + 16 + 8 + 24 + 4 + 40


class KlSettings(Settings):
    kl_coef: float = 0.0


class Rented:
    @hookimpl
    def composer_executors(self):
        yield ExecutorPlugin(name="rented", summary="", target="x:Y", usd_per_hour=lambda settings: 2.5)
        yield ExecutorPlugin(name="inline", summary="", target="x:Y", settings=InlineSettings)


@pytest.fixture
def registry():
    made = Registry()
    made.add(Rented(), Owner("rental", "1"))
    return made


def block(kind, use, settings=None):
    return Plugged(kind=kind, use=use, owner="x", settings=settings or NoSettings())


def spec(model, *, kl=0.0, executor="inline", **more):
    return RunSpec(
        version=1,
        name="test",
        model=model,
        data=DataSpec(prompts=PromptsSpec(builtin="digits"), rewards=[block(Kind.REWARD, "regex")]),
        loss=LossSpec(objective=block(Kind.OBJECTIVE, "grpo", KlSettings(kl_coef=kl))),
        train=TrainSpec(steps=1, micro_batch=2, max_completion_tokens=5),
        backend=block(Kind.BACKEND, "toy"),
        executor=block(Kind.EXECUTOR, executor),
        **more,
    )


@pytest.fixture
def folder(tmp_path):
    """A model folder with a real safetensors header and no weights behind it."""
    header = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in SHAPES.items()}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_full_fine_tuning_in_float32(folder):
    found = memory(spec(ModelSpec(path=str(folder))))
    assert (found.parameters, found.trained) == (PARAMETERS, PARAMETERS)
    assert found.to_json()["bytes"] == {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimiser (AdamW)": 8 * PARAMETERS,
        "logits of a micro-batch": 2 * (2 * 5) * 10 * 4,  # value and gradient of 2 x 5 rows of 10 logits
    }


def test_a_kl_loads_a_reference_only_without_adapters(folder):
    plain = memory(spec(ModelSpec(path=str(folder), dtype="bfloat16"), kl=0.1)).parts
    assert plain["reference model (KL)"] == plain["weights"] == 2 * PARAMETERS
    adapters = memory(spec(ModelSpec(path=str(folder), dtype="bfloat16", lora=LoraSpec(rank=3)), kl=0.1))
    assert adapters.parts["reference model (KL)"] == 0
    # rank x (rows + columns) of q, k and down; neither embedding nor head
    assert adapters.trained == 3 * ((4 + 4) + (2 + 4) + (4 + 6))
    assert adapters.parts["gradients"] == 4 * adapters.trained  # float32 beside bfloat16 weights


def test_adapters_on_named_modules_only(folder):
    lora = LoraSpec(rank=2, targets=["q_proj"])
    assert memory(spec(ModelSpec(path=str(folder), lora=lora))).trained == 2 * (4 + 4)


def test_the_shards_of_an_index_are_added_up(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    text = json.dumps({"extra.weight": {"shape": [3]}}).encode()
    (folder / "b.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert size_of(folder).parameters == PARAMETERS + 3


def test_a_gguf_header_tells_the_same(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 1),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<2f", 0, 1),
    ]
    # GGUF writes the fastest dimension first: (10, 4) is 4, 10
    tensors = {"token_embd.weight": (4, 10), "blk.0.attn_q.weight": (4, 4), "blk.0.ffn_down.weight": (6, 4)}
    infos = [text(name) + struct.pack("<IQQIQ", 2, *shape, 0, 0) for name, shape in tensors.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs))
    (tmp_path / "m.gguf").write_bytes(head + b"".join(pairs) + b"".join(infos))
    size = size_of(tmp_path, gguf_file="m.gguf")
    assert (size.parameters, size.vocabulary) == (40 + 16 + 24, 10)
    assert size.linear == (("blk.0.q_proj", 4, 4), ("blk.0.down_proj", 4, 6))


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 2) + b"[]", b"\x08"], ids=str)
def test_a_damaged_header_is_the_users_error(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="the header of this weight file is not readable"):
        size_of(folder)


def test_the_built_in_model_is_known_and_as_large_as_said():
    from composer_core.hf.tiny import _model, tiny_tokenizer

    found = memory(spec(ModelSpec(builtin="tiny")))
    real = _model(len(tiny_tokenizer()), seed=0)
    assert found.parameters == sum(parameter.numel() for parameter in real.parameters())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("acme/model", "acme/model is not a folder on this machine"),
        ("${env:MODEL}", "model.path comes from the environment"),
        ("/nowhere/at/all", "no such model folder"),
    ],
)
def test_what_is_not_known_says_why(path, said):
    assert memory(spec(ModelSpec(path=path))).to_json() == {"unknown": said}


def test_a_norm_or_an_embedding_gets_no_adapter():
    assert [name for name, _, _ in measure(SHAPES).linear] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.mlp.down_proj",
    ]


def test_money_is_price_times_hours_times_replicas(registry):
    model = ModelSpec(builtin="tiny")
    assert cost(spec(model), registry) == {"unknown": "executor 'inline' has no known price"}
    assert cost(spec(model, executor="rented"), registry) == {"usd_per_hour": 2.5}
    limits = LimitsSpec(hours=4)
    assert cost(spec(model, executor="rented", limits=limits), registry) == {"usd_per_hour": 2.5, "usd": 10.0}
    three = spec(model, executor="rented", limits=limits, replicas=ReplicasSpec(count=3))
    assert cost(three, registry) == {"usd_per_hour": 7.5, "usd": 30.0}
    capped = spec(model, executor="rented", limits=LimitsSpec(hours=4, usd=6))
    assert cost(capped, registry)["usd"] == 6.0


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (23_000_000, "23 MB"), (7 * 10**9, "7.0 GB")],
)
def test_sizes_are_shown_short(size, shown):
    assert in_bytes(size) == shown
