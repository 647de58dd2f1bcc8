"""Fixtures for authors of plugins, loaded by pytest itself (entry point `pytest11`).

Nothing heavy is imported here: every pytest session of an environment with Composer in it pays for this module.
The suites to inherit from stand in `composer_core.testing.contracts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from composer_core.plugins.registry import Registry


@pytest.fixture
def plugin_registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """An empty registry; discovery finds nothing either, so that only the plugin under test exists.

    Example::

        plugin_registry.add(acme.plugin, Owner("acme-composer", "1.0"))
        plugin_registry.get(Kind.REWARD, "polite")
    """
    from composer_core.plugins import registry

    monkeypatch.setattr(registry, "distributions", lambda: iter(()))
    return registry.Registry()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local Hugging Face folder with the built-in tiny model (random weights, character tokenizer), made once."""
    from composer_core.hf.tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny-model")
    make_tiny(folder, seed=0)
    return folder
