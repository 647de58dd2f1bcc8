"""Several processes in a plan: TRL's numbers for each of them, and what is refused before anything starts."""

import pytest

from composer_core.errors import SpecError
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan

SPEC = """\
version: 1
name: t
model: {builtin: tiny}
data:
  prompts: {builtin: digits}
  rewards: [{use: regex, pattern: "[0-9]"}]
loss:
  objective: {use: grpo}
train: {steps: 2, prompts_per_step: 6, group_size: 4}
backend: {use: trl, processes: 2}
"""


@pytest.fixture
def plan(tmp_path):
    def make(*overrides):
        (tmp_path / "spec.yaml").write_text(SPEC)
        registry = Registry.discover()
        return make_plan(load_spec(tmp_path / "spec.yaml", registry, overrides=overrides), registry)

    return make


@pytest.fixture
def refused(plan, tmp_path):
    def message(key, *overrides):
        """What is said from the key on; before it stands the place, in the file or on the command line."""
        with pytest.raises(SpecError) as caught:
            plan(*overrides)
        (problem,) = caught.value.problems
        assert problem.key == key
        return f"{problem.problem}\n  fix: {problem.fix}"

    return message


@pytest.mark.parametrize(
    ("processes", "given", "micro", "accumulation"),
    # 24 sequences: each of two takes 12, of three 8; the default is the largest divisor of that up to 8
    [(1, "null", 8, 3), (2, "null", 6, 2), (3, "null", 8, 1), (2, "4", 4, 3)],
)
def test_each_process_accumulates_its_share_of_a_step(plan, processes, given, micro, accumulation):
    made = plan(f"backend.processes={processes}", f"train.micro_batch={given}")
    assert made.processes == processes
    upstream = made.upstream
    assert upstream["per_device_train_batch_size"] == micro
    assert upstream["gradient_accumulation_steps"] == accumulation
    assert upstream["steps_per_generation"] == accumulation
    assert made.numbers["micro-batch (sequences)"] == micro
    assert processes * micro * accumulation == made.numbers["sequences per step"] == 24


def test_a_step_that_cannot_be_shared_equally_is_refused(refused):
    # four sequences a prompt: 4 prompts are the fewest that 16 processes can share
    assert refused("train.prompts_per_step", "backend.processes=16") == (
        "the 24 sequences of a step (prompts_per_step x group_size) cannot be shared equally by 16 processes\n"
        "  fix: a multiple of 4"
    )


def test_a_micro_batch_must_divide_the_share_of_a_process(refused):
    assert refused("train.micro_batch", "train.micro_batch=8") == (
        "8 does not divide the 12 sequences that each of 2 processes takes of a step (prompts_per_step x group_size)\n"
        "  fix: one of 1, 2, 3, 4, 6, 12"
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("option", ["fsdp=full_shard", "fsdp_config={}", "deepspeed=z.json", "parallelism_config={}"])
def test_a_model_in_parts_is_refused_with_the_reason(refused, processes, option):
    key = f"backend.options.{option.partition('=')[0]}"
    assert refused(key, f"backend.processes={processes}", f"backend.options.{option}") == (
        "a model in parts is not supported: channels and objectives read whole weights, and the gradient of the output "
        "head would come out wrong\n"
        "  fix: leave it out; backend.processes trains on several GPUs with a whole model on each, model.lora makes "
        "room"
    )


@pytest.mark.parametrize("option", ["use_cpu=true", "ddp_backend=mpi", "ddp_timeout=60", "accelerator_config={}"])
def test_how_processes_come_together_is_not_an_option(plan, refused, option):
    key = f"backend.options.{option.partition('=')[0]}"
    assert refused(key, f"backend.options.{option}") == (
        "the worker decides how several processes come together: NCCL and a GPU for each, gloo on a machine without "
        "one\n  fix: leave it out; an empty CUDA_VISIBLE_DEVICES hides the GPUs"
    )
    plan("backend.processes=1", f"backend.options.{option}")


def test_checkpointing_is_not_reentrant_and_cannot_be_made_so_for_several(plan, refused):
    made = plan("train.gradient_checkpointing=true")
    assert made.upstream["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert plan().upstream["gradient_checkpointing_kwargs"] is None
    key = "backend.options.gradient_checkpointing_kwargs"
    assert refused(key, f"{key}={{use_reentrant: true}}") == (
        "use_reentrant: true fails where several processes train on more than one forward per step\n"
        "  fix: use_reentrant: false, which is the default here"
    )
    plan("backend.processes=1", f"{key}={{use_reentrant: true}}")
