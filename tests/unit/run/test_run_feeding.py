import json
from types import SimpleNamespace

import pytest

from composer_core.channels.replay import Replay
from composer_core.channels.settings import ReplaySettings
from composer_core.errors import UsageError
from composer_core.hf.models import load_tokenizer
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.run.feeding import feed


def _run(folder, pairs=None, max_tokens=None):
    events = []
    spec = SimpleNamespace(
        rollouts="generate",
        data=SimpleNamespace(pairs=pairs and SimpleNamespace(path=str(pairs)), max_tokens=max_tokens),
        model=SimpleNamespace(trust_remote_code=False),
    )
    return SimpleNamespace(
        spec=spec,
        is_main=True,
        model_folder=lambda: folder,
        event=lambda kind, **facts: events.append((kind, facts)),
        events=events,
    )


def _pair(chosen):
    return {
        "state_id": chosen,
        "messages": [{"role": "user", "content": "n1"}],
        "chosen": {"role": "assistant", "content": chosen},
        "rejected": {"role": "assistant", "content": "b"},
        "n_agreeing": 2,
        "teachers": ["x", "y"],
        "ref": None,
        "meta": {},
    }


def test_pairs_reach_the_channel_as_the_policys_token_ids(tiny_model_folder, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(_pair(text)) + "\n" for text in ("a", "a" * 50)))
    channel = Replay(ReplaySettings(variant="simpo", pairs_per_step=1))
    run = _run(tiny_model_folder, path, max_tokens=20)
    feed(CompositeLoss([ActiveChannel("replay", 1.0, channel)], None), run, Registry())
    tokenizer = load_tokenizer(tiny_model_folder)
    (row,) = channel.draw(0, 0, 1)
    assert [tokenizer.decode(row[key]) for key in ("prompt", "chosen", "rejected")] == [
        "<|user|>n1<|end|><|assistant|>",
        "a<|end|>",
        "b<|end|>",
    ]
    facts = {"path": str(path), "read": 2, "kept": 1, "dropped": {"too long": 1}}
    assert run.events == [("pairs", facts)]


def test_a_channel_of_pairs_needs_a_file_of_them(tiny_model_folder):
    with pytest.raises(UsageError) as caught:
        feed(CompositeLoss([ActiveChannel("mine", 1.0, Replay())], None), _run(tiny_model_folder), Registry())
    assert str(caught.value) == (
        "data.pairs: channel 'mine' learns from preference pairs, and the spec names no file of them\n"
        "  fix: data: {pairs: {path: pairs.jsonl}}; `composer-run replay` writes one"
    )


def test_without_such_channels_nothing_is_read(tiny_model_folder):
    run = _run(tiny_model_folder)
    feed(CompositeLoss([], None), run, Registry())
    assert run.events == []
