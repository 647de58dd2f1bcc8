"""The policy as a local Hugging Face folder, and that folder as a tokenizer and a model.

Whatever a spec names (the built-in model, a GGUF file, a folder, an id on the Hub) becomes a folder first: a trainer
that needs a reference loads the same folder again, and a folder's path is what a model remembers of its origin.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from composer_core.errors import MissingError, UsageError
from composer_core.hf.cache import cached_folder
from composer_core.hf.source import check_folder, first_line, json_object, local_folder
from composer_core.spec.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_INSTALL = "pip install 'composer-core[hf]'"
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]


def model_folder(spec: ModelSpec, *, seed: int) -> Path:
    """The model of `spec` as a local folder; made, converted or downloaded when it is not there yet.

    Args:
        spec: the model section of a run spec, its path absolute or a Hub id.
        seed: weights of the built-in model; nothing else depends on it.

    Raises:
        UsageError: the folder or id is not a model, with what is missing.
        MissingError: a package is not installed, the Hub not reachable, or the cache not writable.
    """
    require_transformers()
    if spec.builtin is not None:
        return _tiny_folder(seed)
    folder = local_folder(spec) or _from_hub(spec)
    check_folder(folder, gguf_file=spec.gguf_file)
    if spec.gguf_file is None:
        return folder
    from composer_core.hf.gguf import dequantised

    return dequantised(folder, spec.gguf_file)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, padding on the left (completions must follow their prompts directly).

    Raises:
        UsageError: it does not load, has no end token, or has ids that the model has no embedding for.
    """
    require_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=trust_remote_code)
    except (
        Exception
    ) as error:  # a broken file shows as OSError, KeyError, JSONDecodeError or a bare Exception from Rust
        raise _does_not_load("tokenizer", folder, error) from error
    if tokenizer.eos_token is None:
        raise UsageError("this tokenizer has no end token (eos_token): no completion would ever end", at=str(folder))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    _check_vocabulary(folder, highest=max(tokenizer.get_vocab().values()))
    return tokenizer


def load_policy(folder: Path, *, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model in `folder`, with `dtype` "float32" or "bfloat16" weights; safetensors only.

    Raises:
        UsageError: it does not load, or is no causal language model.
    """
    require_transformers()
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:  # as above: transformers has no exception class of its own for a bad folder
        raise _does_not_load("model", folder, error) from error


def require_transformers() -> None:
    """Import transformers, or say what to install.

    Raises:
        MissingError: it is not installed, or does not import.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingError(f"language models need transformers: {error}", fix=_INSTALL) from error


def _tiny_folder(seed: int) -> Path:
    import transformers

    from composer_core.hf.tiny import FORMAT, write_tiny

    return cached_folder(f"tiny-seed{seed}-tf{transformers.__version__}-v{FORMAT}", make=partial(write_tiny, seed=seed))


def _from_hub(spec: ModelSpec) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = [spec.gguf_file] if spec.gguf_file else _HUB_FILES + (["*.py"] if spec.trust_remote_code else [])
    at = str(spec.path)
    try:
        return Path(snapshot_download(at, revision=spec.revision, allow_patterns=wanted))
    except GatedRepoError as error:
        fix = "accept its terms on the model's page, then log in with `hf auth login`"
        raise MissingError("this model is gated and the Hub did not let you in", at=at, fix=fix) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"this model has no revision {spec.revision!r}", at=at, fix="check model.revision") from error
    except RepositoryNotFoundError as error:
        fix = "check model.path; for a private model, log in with `hf auth login`"
        raise UsageError(
            "there is no such folder, and the Hugging Face Hub has no such model", at=at, fix=fix
        ) from error
    except HFValidationError as error:
        problem = f"there is no such folder, and it is no id of the Hugging Face Hub: {error}"
        raise UsageError(problem, at=at, fix="check model.path") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        problem = (
            "there is no such folder, the model is not in the local Hugging Face cache, and the Hub is not reachable"
        )
        fix = "check model.path; to try things offline, use `model: {builtin: tiny}`"
        raise MissingError(problem, at=at, fix=fix) from error
    except OSError as error:  # after its subclasses above: the disk
        raise MissingError(f"the download of this model cannot be written: {error}", at=at) from error


def _check_vocabulary(folder: Path, *, highest: int) -> None:
    config = json_object(folder / "config.json")
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if rows is not None and highest >= rows:  # some remote-code configs name it otherwise; the model then decides
        raise UsageError(
            f"the tokenizer has ids up to {highest}, but the model has only {rows} embeddings",
            at=str(folder),
            fix="take the tokenizer that belongs to this model, or resize its embeddings and save it again",
        )


def _does_not_load(what: str, folder: Path, error: Exception) -> UsageError:
    return UsageError(f"this {what} does not load: {type(error).__name__}: {first_line(error)}", at=str(folder))
