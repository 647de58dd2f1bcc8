import torch
from safetensors.torch import load_file
from torch import nn

from composer_core.testing.toy_files import load_loss_state, save_loss_state, save_optimizer


def test_loss_state_with_tensors_comes_back_equal(tmp_path):
    shared = torch.arange(3.0)
    state = {"taid": {"t": 0.4, "seen": [1, 2], "ema": shared, "nested": [{"copy": shared}]}, "policy": {}}
    save_loss_state(tmp_path, state)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.json", "loss.safetensors"}
    back = load_loss_state(tmp_path)
    assert torch.equal(back["taid"].pop("ema"), shared)
    assert torch.equal(back["taid"].pop("nested")[0]["copy"], shared)
    assert back == {"taid": {"t": 0.4, "seen": [1, 2]}, "policy": {}}


def test_optimizer_state_is_saved_under_its_parameters_name(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_optimizer(tmp_path, model, optimizer)
    saved = load_file(tmp_path / "optimizer.safetensors")
    assert saved.keys() == {f"{p}.{k}" for p in ("weight", "bias") for k in ("exp_avg", "exp_avg_sq", "step")}
    # AdamW: exp_avg after one step is (1 - 0.9) x gradient, and the gradient of the sum by each weight is its input, 1
    assert torch.allclose(saved["weight.exp_avg"], torch.full((1, 2), 0.1))
