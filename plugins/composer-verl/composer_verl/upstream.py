"""verl's own configuration: composed by hydra, looked up and changed by dotted keys. verl is never imported here.

What a run puts into it stands in `config.py`, what a user may put into it in `options.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import MissingError

INSTALL = "pip install composer-verl"
ENTRY = "ppo_trainer"
"""The file of verl's that all others hang on."""
UNSET = "???"
"""What OmegaConf writes for a value that somebody must still give."""


def composed() -> dict[str, Any]:
    """The defaults of verl as a nested mapping, interpolations as verl wrote them; takes about 0.4 s.

    Raises:
        MissingError: verl is not installed, or has no such configuration.
    """
    folder = _folder()
    from hydra import compose, initialize_config_dir  # 100 ms, and only specs with this backend need it
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base=None):
        plain: dict[str, Any] = OmegaConf.to_container(compose(ENTRY), resolve=False)  # type: ignore[assignment]
    return plain


def _folder() -> Path:
    found = importlib.util.find_spec("verl")  # finds the package without importing it
    if found is None or not found.submodule_search_locations:
        raise MissingError("verl is not installed", fix=INSTALL)
    folder = Path(found.submodule_search_locations[0], "trainer", "config")
    if not (folder / f"{ENTRY}.yaml").is_file():
        raise MissingError(f"the installed verl has no trainer/config/{ENTRY}.yaml", fix=INSTALL)
    return folder


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each interpolation replaced by its value; what nobody gave stays `UNSET`."""
    from omegaconf import OmegaConf

    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(dict(config)), resolve=True)  # type: ignore[assignment]
    return plain


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key with its value; an empty mapping is a value."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def with_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values at dotted keys; sections on the way are made where there are none."""
    changed = dict(config)
    for key, value in fields.items():
        name, _, rest = key.partition(".")
        inner = changed.get(name)
        changed[name] = with_fields(inner if isinstance(inner, Mapping) else {}, {rest: value}) if rest else value
    return changed
