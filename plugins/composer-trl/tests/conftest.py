import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(scope="session")
def digits():
    """Prompts for the tiny model."""
    return [{"prompt": [{"role": "user", "content": f"n{i % 10}"}], "target": i % 10} for i in range(16)]


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)
