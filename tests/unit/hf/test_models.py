from __future__ import annotations

import builtins
import json
import shutil

import pytest
import torch

from composer_core.errors import MissingError, UsageError
from composer_core.hf.models import load_policy, load_tokenizer, model_folder
from composer_core.hf.tiny import make_tiny
from composer_core.spec.model import ModelSpec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, seed=0)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy of the tiny model, to break."""
    return shutil.copytree(tiny, tmp_path / "broken")


def message(call, *args, **options):
    with pytest.raises((UsageError, MissingError)) as caught:
        call(*args, **options)
    return str(caught.value)


def test_the_builtin_model_is_made_once_per_seed(cache):
    import transformers

    folder = model_folder(ModelSpec(builtin="tiny"), seed=3)
    assert folder == cache / "models" / f"tiny-seed3-tf{transformers.__version__}-v1"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(ModelSpec(builtin="tiny"), seed=3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert model_folder(ModelSpec(builtin="tiny"), seed=4) != folder


def test_a_local_folder_is_used_where_it_is(tiny):
    assert model_folder(ModelSpec(path=str(tiny)), seed=0) == tiny


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_has_the_asked_dtype_and_knows_its_folder(tiny, dtype):
    model = load_policy(tiny, dtype=dtype)
    assert model.dtype is getattr(torch, dtype)
    assert model.config._name_or_path == str(tiny)  # trainers load the reference model again from there


def test_a_tokenizer_pads_on_the_left_and_borrows_the_end_token_for_it(broken):
    config = broken / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings |= {"padding_side": "right", "pad_token": None}
    config.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(broken)
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<|end|>")


def test_a_tokenizer_without_an_end_token_is_refused(broken):
    config = broken / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"eos_token": None}), encoding="utf-8")
    assert message(load_tokenizer, broken) == (
        f"{broken}: this tokenizer has no end token (eos_token): no completion would ever end"
    )


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(broken):
    config = broken / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"vocab_size": 102}), encoding="utf-8")
    assert message(load_tokenizer, broken) == (
        f"{broken}: the tokenizer has ids up to 102, but the model has only 102 embeddings"
        "\n  fix: take the tokenizer that belongs to this model, or resize its embeddings and save it again"
    )


def test_broken_files_are_a_plain_message(broken):
    (broken / "tokenizer.json").write_text("{", encoding="utf-8")
    assert message(load_tokenizer, broken).startswith(f"{broken}: this tokenizer does not load: ")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert message(load_policy, broken, dtype="float32").startswith(f"{broken}: this model does not load: ")


def test_a_folder_without_a_tokenizer_never_reaches_the_loader(broken):
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    assert message(model_folder, ModelSpec(path=str(broken)), seed=0) == (
        f"{broken}: this model folder has no tokenizer"
        "\n  fix: save it beside the model: AutoTokenizer.from_pretrained(<its origin>).save_pretrained(<this folder>)"
    )


def test_without_transformers_it_says_what_to_install(monkeypatch, tiny):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: model_folder(ModelSpec(builtin="tiny"), seed=0), lambda: load_tokenizer(tiny)):
        assert message(call) == (
            "language models need transformers: No module named 'transformers'\n  fix: pip install 'composer-core[hf]'"
        )


# -- the Hub, which is not there in a test: its client's own exceptions, raised by a double ----------------------------


@pytest.fixture
def hub(monkeypatch):
    """Make the download raise, or return a folder; returns the calls it got."""
    import huggingface_hub

    calls = []

    def _answer(result):
        def snapshot_download(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return _answer


def hub_error(name):
    from huggingface_hub import errors

    kind = getattr(errors, name)
    return kind.__new__(kind)  # their constructors want an HTTP response


def test_a_hub_model_is_downloaded_at_its_revision_without_pickles(hub, tiny):
    calls = hub(tiny)
    assert model_folder(ModelSpec(path="acme/model", revision="v2"), seed=0) == tiny
    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    assert calls == [(("acme/model",), {"revision": "v2", "allow_patterns": wanted})]


OFFLINE = (
    MissingError,
    "acme/model: there is no such folder, the model is not in the local Hugging Face cache, "
    "and the Hub is not reachable"
    "\n  fix: check model.path; to try things offline, use `model: {builtin: tiny}`",
)
HUB_ANSWERS = {
    "LocalEntryNotFoundError": OFFLINE,
    "OfflineModeIsEnabled": OFFLINE,
    "HfHubHTTPError": OFFLINE,
    "RepositoryNotFoundError": (
        UsageError,
        "acme/model: there is no such folder, and the Hugging Face Hub has no such model"
        "\n  fix: check model.path; for a private model, log in with `hf auth login`",
    ),
    "RevisionNotFoundError": (UsageError, "acme/model: this model has no revision 'v2'\n  fix: check model.revision"),
    "GatedRepoError": (
        MissingError,
        "acme/model: this model is gated and the Hub did not let you in"
        "\n  fix: accept its terms on the model's page, then log in with `hf auth login`",
    ),
}


@pytest.mark.parametrize(("name", "expected"), HUB_ANSWERS.items(), ids=HUB_ANSWERS.keys())
def test_each_answer_of_the_hub_has_its_own_message(hub, name, expected):
    hub(hub_error(name))
    with pytest.raises((UsageError, MissingError)) as caught:
        model_folder(ModelSpec(path="acme/model", revision="v2"), seed=0)
    assert (type(caught.value), str(caught.value)) == expected


def test_a_real_client_without_a_network_gives_the_offline_message(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert message(model_folder, ModelSpec(path="acme/model"), seed=0) == OFFLINE[1]
