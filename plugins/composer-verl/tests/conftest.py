import os
from collections.abc import Callable
from typing import Any

import pytest

from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, RegexSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged, RunSpec
from composer_verl.settings import VerlSettings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def _objective(name: str = "grpo", /, **settings: Any) -> Plugged:
    return Plugged(Kind.OBJECTIVE, name, "composer-core 0.1.0", OBJECTIVE_SETTINGS[name](**settings))


def _verl_spec(
    *,
    policy: Plugged | None = None,
    backend: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    seed: int = 0,
    **train: Any,
) -> RunSpec:
    reward = Plugged(Kind.REWARD, "regex", "composer-core 0.1.0", RegexSettings(pattern="[0-9]"))
    return RunSpec(
        version=1,
        name="t",
        seed=seed,
        model=model or {"builtin": "tiny"},
        data={"prompts": {"builtin": "digits"}, "rewards": [reward]} | (data or {}),
        loss={"objective": policy or _objective()},
        train={"steps": 10} | train,
        backend=Plugged(Kind.BACKEND, "verl", "composer-verl 0.1.0", VerlSettings(**(backend or {}))),
        executor=Plugged(Kind.EXECUTOR, "inline", "composer-core 0.1.0", InlineSettings()),
    )


@pytest.fixture(scope="session")
def objective() -> Callable[..., Plugged]:
    """`objective(name, **settings)`: a `loss.objective` block of the core's."""
    return _objective


@pytest.fixture(scope="session")
def verl_spec() -> Callable[..., RunSpec]:
    """`verl_spec(policy=..., backend=..., model=..., data=..., **train)`: a spec of one objective, without a file."""
    return _verl_spec
