"""Settings of the executors: how GPUs are written, what a spec may not set."""

import pytest
from pydantic import ValidationError

from composer_core.plugins.registry import Owner, Registry
from composer_executors import plugin
from composer_executors.gpus import Gpu, parse_gpu
from composer_executors.settings import JobSettings, RaySettings, SlurmSettings


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("H200:8", Gpu("H200", 8)), ("h100", Gpu("H100", 1)), ("any:2", Gpu("any", 2)),
        ("A100-80G:4", Gpu("A100-80G", 4)),
    ],
    ids=["kind-and-number", "one", "any", "memory"],
)  # fmt: skip
def test_a_gpu_is_a_kind_and_a_number(text, gpu):
    assert parse_gpu(text) == gpu


@pytest.mark.parametrize("text", ["", "8", "H200:0", "H200:x", "H200:8:1", ":8", "8:H200", "H200:-1"])
def test_anything_else_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="must be a kind and a number, such as H200:8"):
        parse_gpu(text)


def test_each_service_has_its_own_word_for_a_kind():
    assert SlurmSettings(gpu="H200:8").gpus() == ("h200", 8)
    assert SlurmSettings(gpu="H200:8", gpu_names={"h200": "nvidia_h200"}).gpus() == ("nvidia_h200", 8)
    assert SlurmSettings(gpu="any:2").gpus() == ("", 2)
    assert RaySettings(gpu="H200:8").gpus() == ("H200", 8)
    assert SlurmSettings().gpus() is None


@pytest.mark.parametrize("settings", [SlurmSettings, RaySettings], ids=["slurm", "ray"])
def test_an_unknown_kind_is_refused_with_those_there_are(settings):
    with pytest.raises(ValidationError, match=r"has no GPU of kind 'H2000'; it has A100, A100-40G, .*, V100, any"):
        settings(gpu="H2000:8")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"1A": "x"}, "'1A' is no name of an environment variable"),
        ({"COMPOSER_RANK": "1"}, "COMPOSER_RANK: names that begin with COMPOSER_ are Composer's own"),
        (
            {"TOKEN": "${env:TOKEN}"},
            r"TOKEN: a value from the environment is passed on by its name: secrets: \[TOKEN\]",
        ),
    ],
    ids=["no-name", "ours", "secret"],
)
def test_variables_that_a_spec_may_not_set(env, message):
    with pytest.raises(ValidationError, match=message):
        JobSettings(env=env)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "10"}, "time is not for a spec to set: limits.hours"),
        ({"gres": "gpu:1"}, "gres is not for a spec to set: executor.gpu"),
        ({"--exclusive": ""}, "'--exclusive' must be the long name of an option of sbatch, without the two hyphens"),
        ({"comment": "x"}, "comment is not for a spec to set: it is the label by which leftovers are found"),
        ({"licenses": "a\n#SBATCH --uid=0"}, "licenses: one line"),
    ],
    ids=["time", "gres", "hyphens", "label", "two-lines"],
)
def test_options_of_sbatch_that_a_spec_may_not_set(options, message):
    with pytest.raises(ValidationError, match=message):
        SlurmSettings(sbatch=options)


def test_the_plugin_offers_three_places():
    registry = Registry()
    registry.add(plugin, Owner("composer-executors", "0.1.0"))
    names = {contribution.name for _, contribution in registry if contribution.kind == "executor"}
    assert (names, registry.problems) == ({"local", "slurm", "ray"}, [])
