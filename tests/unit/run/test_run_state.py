import random

import numpy
import pytest
import torch

from composer_core.run.state import capture_rng, load_state, restore_rng, save_state


def test_state_with_tensors_comes_back_equal(tmp_path):
    shared = torch.arange(3.0)
    state = {"taid": {"t": 0.4, "seen": [1, 2], "ema": shared, "nested": [{"copy": shared}]}, "policy": {}, "no": None}
    save_state(tmp_path, "loss", state)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.json", "loss.safetensors"}
    back = load_state(tmp_path, "loss")
    assert torch.equal(back["taid"].pop("ema"), shared)
    assert torch.equal(back["taid"].pop("nested")[0]["copy"], shared)
    assert back == {"taid": {"t": 0.4, "seen": [1, 2]}, "policy": {}, "no": None}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.uint8], ids=str)
def test_tensors_keep_their_type_and_shape(tmp_path, dtype):
    value = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    save_state(tmp_path, "s", {"scalar": value[0, 0], "matrix": value})
    back = load_state(tmp_path, "s")
    assert back["scalar"].shape == ()
    assert torch.equal(back["matrix"], value)
    assert back["matrix"].dtype == dtype


def test_what_is_neither_json_nor_a_tensor_is_refused(tmp_path):
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        save_state(tmp_path, "s", {"names": {"a"}})


def draws():
    # a Gaussian leaves a second one in numpy's and Python's generators, which must come back as well
    return [random.gauss(0, 1), random.random(), numpy.random.normal(), float(torch.rand(1))]


def test_the_global_generators_go_on_where_they_stood_even_from_a_file(tmp_path):
    draws()
    save_state(tmp_path, "rng", capture_rng())
    expected = [draws() for _ in range(3)]
    restore_rng(load_state(tmp_path, "rng"))
    assert [draws() for _ in range(3)] == expected
