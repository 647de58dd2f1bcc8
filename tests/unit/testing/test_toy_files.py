import torch
from safetensors.torch import load_file
from torch import nn

from composer_core.testing.toy_files import load_optimizer, save_optimizer


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


def test_a_restored_optimizer_takes_the_same_next_step(tmp_path):
    weights = []
    for restored in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            if restored and step == 2:
                save_optimizer(tmp_path, model, optimizer)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                load_optimizer(tmp_path, model, optimizer)
            optimizer.zero_grad()
            (model(torch.ones(2)) * (step - 0.5)).sum().backward()
            optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
