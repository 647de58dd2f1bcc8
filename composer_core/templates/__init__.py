"""What `composer-run init` and `composer-run plugins new` write, and the code that writes it.

    specs/<name>/      a recipe: spec.yaml, whose first comment is its summary, and the files it names
    plugin/common/     every new plugin package: pyproject.toml, README, an example spec
    plugin/<kind>/     and what a reward, an objective or a channel has beside them

To add a recipe, add a folder; tests plan each. Nothing here is ever overwritten at its destination.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer_core.errors import UsageError
from composer_core.plugins.contributions import NAME, Kind

HERE = Path(__file__).parent
SPEC = "spec.yaml"
SUFFIX = ".j2"


@dataclass(frozen=True)
class Recipe:
    """A spec to start from."""

    name: str
    summary: str
    files: tuple[str, ...]
    """Beside the spec, by name."""


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    folders = sorted(path.parent for path in (HERE / "specs").glob(f"*/{SPEC}"))
    return {folder.name: _recipe(folder) for folder in folders}


def _recipe(folder: Path) -> Recipe:
    summary = (folder / SPEC).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    beside = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SPEC)
    return Recipe(folder.name, summary, tuple(beside))


def write_recipe(recipe: Recipe, out: Path) -> list[Path]:
    """Copy a recipe: its spec to `out`, the files it names beside that.

    Raises:
        UsageError: one of them is there already; nothing is written then.
    """
    folder = HERE / "specs" / recipe.name
    texts = {out: SPEC} | {out.parent / name: name for name in recipe.files}
    return _write({path: (folder / name).read_text(encoding="utf-8") for path, name in texts.items()})


def write_package(name: str, kind: Kind, folder: Path) -> list[Path]:
    """Write a package that brings one contribution, called like the package, with tests that pass.

    Args:
        name: of the distribution, e.g. `acme-brevity`; the import name has underscores.
        kind: channel, reward or objective; each has a folder under `plugin/`.
        folder: the package's own, which must not be there yet.

    Raises:
        UsageError: the name cannot be one, or the folder is there already.
    """
    import jinja2

    module = name.replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(module):
        raise UsageError(f"{name!r} cannot name a plugin", fix="lower case letters, digits and hyphens: acme-brevity")
    if folder.exists():
        raise UsageError("this is there already", at=str(folder), fix="another name, or --out DIR")
    class_name = "".join(part.title() for part in name.split("-"))
    words = {"name": name, "module": module, "kind": str(kind), "class_name": class_name}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    texts = {
        folder / str(path).replace("module", module): environment.from_string(text).render(words)
        for path, text in _package_templates(kind).items()
    }
    return _write(texts)


def _package_templates(kind: Kind) -> Mapping[Path, str]:
    """Path in the package, where `module` stands for the import name -> template."""
    sources = [HERE / "plugin" / "common", HERE / "plugin" / str(kind)]
    return {
        path.relative_to(source).with_suffix(""): path.read_text(encoding="utf-8")
        for source in sources
        for path in sorted(source.rglob(f"*{SUFFIX}"))
    }


def _write(texts: Mapping[Path, str]) -> list[Path]:
    from composer_core.run.files import write_text

    there = [path for path in texts if path.exists()]
    if there:
        raise UsageError(
            f"{', '.join(str(path) for path in there)} would be overwritten", fix="--out names another place"
        )
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", at=str(error.filename)) from error
    return list(texts)
