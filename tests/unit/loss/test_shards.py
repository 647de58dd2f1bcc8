"""Self-teachers of a policy sharded by FSDP2, against a policy that is not and deep copies for its teachers.

The two-rank test runs this file as a program: `test_shards.py RANK FOLDER`.
"""

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_core.loss.shards import own_parts, whole
from composer_core.loss.teachers import Average, FrozenBase, SelfTeacher, Stored, make_teacher

RATE, LEARNING_RATE = 0.25, 0.5
WANTED = [SelfTeacher("live"), SelfTeacher("frozen"), SelfTeacher("ema", rate=RATE)]


def _policy(*, adapters=False):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=True,
    )
    policy = Qwen3ForCausalLM(config)
    if not adapters:
        return policy
    from peft import LoraConfig, get_peft_model

    return get_peft_model(policy, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def _sharded(policy, *, reshard_after_forward):
    """A copy, wrapped as verl does: each decoder layer, then the whole."""
    policy = copy.deepcopy(policy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [module for module in policy.modules() if type(module).__name__ == "Qwen3DecoderLayer"]
    for module in (*layers, policy):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return policy


def _batch(step, rank):
    """What student and teacher read: the teacher's has a hint in front."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    student = torch.randint(0, 17, (2, 5), generator=generator)
    return student, torch.cat([torch.randint(0, 17, (2, 3), generator=generator), student], 1)


def _loss(student, taught):
    return nn.functional.kl_div(student.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="sum")


def _sharded_loss(policy, teacher, step):
    """As a trainer goes: the teacher reads between the policy's forward and its backward."""
    ids, hinted = _batch(step, dist.get_rank())
    student = policy(ids).logits
    with teacher.reading(), torch.no_grad():
        taught = teacher.network(hinted).logits[:, 3:]
    return _loss(student, taught)


def _plain_loss(policy, read, step):
    """Mean over ranks, as FSDP takes it; `read` gives the teacher's logits."""
    batches = [_batch(step, rank) for rank in range(dist.get_world_size())]
    return sum(_loss(policy(ids).logits, read(hinted)[:, 3:]) for ids, hinted in batches) / len(batches)


def _moved(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad
                parameter.grad = None


def _compare_gradients(policy, plain):
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(
            grad.full_tensor(), theirs[name], rtol=1e-4, atol=2e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


def _check_teacher(wanted, *, reshard_after_forward):
    plain = _policy()
    policy = _sharded(plain, reshard_after_forward=reshard_after_forward)
    teacher = make_teacher(policy, wanted)
    copied = plain if wanted.weights == "live" else copy.deepcopy(plain)

    @torch.no_grad()
    def read(ids):
        return copied(ids).logits

    for step in range(3):
        before = {name: own.clone() for name, own in own_parts(policy).items()}
        _sharded_loss(policy, teacher, step).backward()
        _plain_loss(plain, read, step).backward()
        _compare_gradients(policy, plain)
        after = own_parts(policy)
        assert all(torch.equal(own, after[name]) for name, own in before.items())
        _moved(policy)
        _moved(plain)
        teacher.step()
        if wanted.weights == "ema":
            with torch.no_grad():
                for mean, moved in zip(copied.parameters(), plain.parameters(), strict=True):
                    mean.copy_((1 - RATE) * mean + RATE * moved)


def _check_adapters(*, reshard_after_forward):
    plain = _policy(adapters=True)
    policy = _sharded(plain, reshard_after_forward=reshard_after_forward)
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    assert type(teacher) is FrozenBase

    @torch.no_grad()
    def read(ids):
        with plain.disable_adapter():
            return plain(ids).logits

    for step in range(3):
        _sharded_loss(policy, teacher, step).backward()
        _plain_loss(plain, read, step).backward()
        _compare_gradients(policy, plain)
        _moved(policy)
        _moved(plain)


def _check_average_state():
    policy = _sharded(_policy(), reshard_after_forward=True)
    teacher = make_teacher(policy, SelfTeacher("ema", rate=RATE))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    teacher.step()
    again = make_teacher(policy, SelfTeacher("ema", rate=RATE))
    assert type(again) is Average
    again.load_state_dict(copy.deepcopy(teacher.state_dict()))
    shapes = {name: own.shape for name, own in own_parts(policy).items()}
    assert {name: mean.shape for name, mean in again.state_dict().items()} == shapes
    ids, _ = _batch(0, 0)
    read = []
    for one in (teacher, again):
        with one.reading(), torch.no_grad():
            read.append(policy(ids).logits)
    assert torch.equal(*read)


def _check_that_ranks_agree_on_fresh_adapters():
    """The last row of one adapter is trained, which is on the last rank alone."""
    policy = _policy(adapters=True)
    second = next(p for name, p in policy.named_parameters() if ".lora_B." in name)
    with torch.no_grad():
        second[-1] = 1.0
    policy = _sharded(policy, reshard_after_forward=True)
    assert type(make_teacher(policy, SelfTeacher("frozen"))) is Stored
    assert all(whole(p).shape == p.shape for p in policy.parameters())


def _check_that_a_backward_through_a_part_itself_is_not_disturbed():
    policy = _sharded(_policy(), reshard_after_forward=True)
    teacher = make_teacher(policy, SelfTeacher("frozen"))
    part = policy.model.norm.weight.to_local()
    decay = part.square().sum()
    with teacher.reading():
        pass
    (grad,) = torch.autograd.grad(decay, part)
    assert torch.equal(grad, 2 * part)


CHECKS = [
    partial(_check_teacher, wanted, reshard_after_forward=reshard) for wanted in WANTED for reshard in (True, False)
]
CHECKS += [partial(_check_adapters, reshard_after_forward=reshard) for reshard in (True, False)]
CHECKS += [
    _check_average_state,
    _check_that_ranks_agree_on_fresh_adapters,
    _check_that_a_backward_through_a_part_itself_is_not_disturbed,
]
IDS = [f"{wanted.weights}-{kept}" for wanted in WANTED for kept in ("resharded", "kept")]
IDS += ["adapters-resharded", "adapters-kept", "state", "fresh", "part"]


def _join(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    _join(0, 1, tmp_path_factory.mktemp("alone"))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("check", CHECKS, ids=IDS)
def test_teachers_of_a_sharded_policy_on_one_rank(check):
    check()


@pytest.mark.slow
def test_teachers_of_a_policy_sharded_over_two_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


def _main(rank: int, folder: Path) -> None:
    _join(rank, 2, folder)
    for check in CHECKS:
        check()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
