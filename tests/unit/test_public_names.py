"""`from composer_core import ...`: what is promised is there, and a bare import is cheap."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import composer_core

SEEDS = {
    "compose_loss",
    "LossComponents",
    "build_batch",
    "generalized_jsd_loss",
    "simpo_loss",
    "avg_sequence_logprob",
    "taid_loss",
    "TAIDScheduler",
    "entropy_aware_opd_loss",
    "teacher_entropy",
    "ClaudeCodeIngester",
    "IngestionStats",
    "TraceState",
    "extract_dpo_pairs",
    "replay_trace",
    "save_pairs",
    "replay_and_normalize",
}


def test_the_promised_names_are_offered():
    assert set(composer_core.PUBLIC) >= SEEDS
    assert set(composer_core.PUBLIC) <= set(dir(composer_core))


@pytest.mark.parametrize("name", sorted(composer_core.PUBLIC))
def test_each_name_is_its_modules_own(name):
    found = getattr(composer_core, name)
    assert found.__module__ == composer_core.PUBLIC[name], "PUBLIC must name the module that defines it"
    assert found.__name__ == name


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(composer_core.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == dict(composer_core.PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'composer_core' has no attribute 'compose_los'$"):
        composer_core.compose_los  # noqa: B018


def test_a_bare_import_brings_no_torch():
    code = "import sys, composer_core; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compose_loss_takes_the_arguments_it_always_took():
    parameters = list(inspect.signature(composer_core.compose_loss).parameters)
    assert parameters == [
        "model",
        "inputs",
        "alpha_sdpo",
        "beta_replay",
        "sdpo_jsd_beta",
        "sdpo_temperature",
        "sdpo_token_clip",
        "replay_dpo_beta",
        "lm_ce_label_smoothing",
        "dpo_variant",
        "sdpo_wrapper",
        "taid_t",
        "simpo_beta",
        "simpo_gamma",
        "entropy_opd_h_max",
    ]
