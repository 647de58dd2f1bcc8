"""What differs between runs: their resolved specs, their versions, their last figures; and compare.html, one page with
the curves laid over each other.

Runs go by letters, A, B, ..., in charts and tables, as their names are long. `charts.py` draws.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.errors import UsageError
from composer_core.run.charts import LINES, Chart, Line, draw
from composer_core.run.directory import RunDirectory
from composer_core.run.files import read_jsonl, write_text
from composer_core.run.metrics import LOSS, POLICY_LOSS, REWARD, STEP_TIME, ends, series
from composer_core.run.report import look_up, loss_names, number, render

MOST_RUNS = len(string.ascii_uppercase)
INDEX = re.compile(r"^((?:\w+\.)*\w+)\[(\d+)\]")

Values = Mapping[str, Any]
"""Letter of a run -> its value; a run that has none is left out."""


@dataclass(frozen=True)
class Compared:
    """One run among those compared."""

    letter: str
    run: str
    path: str
    state: str
    steps: int
    """The last logged step."""


@dataclass(frozen=True)
class Difference:
    """One key in which runs differ."""

    key: str
    values: Values


@dataclass(frozen=True)
class Comparison:
    """What `composer-run compare --json` prints."""

    runs: list[Compared]
    spec: list[Difference]
    """Keys of the resolved spec; a block in a list goes by its `use`: `loss.channels.sdpo.weight`."""
    versions: list[Difference]
    """Python, packages, the commit of the spec's folder, local plugin files by their sha256."""
    metrics: list[Difference]
    """Mean of the last five logged values of each metric, those of upstream left out; equal ones too."""
    page: str


def compare(directories: Sequence[RunDirectory], page: Path) -> Comparison:
    """Compare runs, and write the page.

    Raises:
        UsageError: fewer than two runs, more than there are letters, or one of them twice; or the page cannot be
            written.
    """
    if len(directories) < 2:
        raise UsageError("two runs at least make a comparison")
    if len(directories) > MOST_RUNS:
        raise UsageError(f"{len(directories)} runs at once; at most {MOST_RUNS}")
    twice = next((one.name for one in directories if [d.path for d in directories].count(one.path) > 1), None)
    if twice is not None:
        raise UsageError(f"run {twice} stands twice")
    lettered = dict(zip(string.ascii_uppercase, directories, strict=False))
    metrics = {letter: read_jsonl(directory.metrics) for letter, directory in lettered.items()}
    made = Comparison(
        runs=[_compared(letter, directory, metrics[letter]) for letter, directory in lettered.items()],
        spec=_differences({letter: spec_values(directory) for letter, directory in lettered.items()}),
        versions=_differences({letter: _versions(directory) for letter, directory in lettered.items()}),
        metrics=_table({letter: dict(_last(lines)) for letter, lines in metrics.items()}),
        page=str(page),
    )
    try:
        write_text(page, _render(made, metrics))
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}", at=str(page), fix="--out names another place"
        ) from error
    return made


def _compared(letter: str, directory: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> Compared:
    steps = max((line["step"] for line in metrics), default=0)
    return Compared(letter, directory.name, str(directory.path), directory.state().state, steps)


# -- values by key -----------------------------------------------------------------------------------------------------


def spec_values(directory: RunDirectory) -> dict[str, Any]:
    """The resolved spec by dotted keys, list items by the name they use where it is the only one of that name."""
    resolved = directory.read_json("resolved.json") or {}
    # an empty list or section says nothing that the lines of its items, in the other run, do not
    values = {key: entry["value"] for key, entry in resolved.items() if entry["value"] not in ([], {})}
    names = {key.removesuffix(".use"): value for key, value in values.items() if re.search(r"\]\.use$", key)}
    return {_by_name(key, names): value for key, value in values.items()}


def _by_name(key: str, names: Mapping[str, str]) -> str:
    """`loss.channels[0].weight` -> `loss.channels.sdpo.weight`: an item that moved in its list is the same item."""
    found = INDEX.match(key)
    if found is None or found[0] not in names:
        return key
    name = names[found[0]]
    same = [item for item, other in names.items() if other == name and item.startswith(f"{found[1]}[")]
    return key if len(same) > 1 else f"{found[1]}.{name}{key[found.end() :]}"


def _versions(directory: RunDirectory) -> dict[str, Any]:
    provenance = directory.read_json("provenance.json")
    found = dict(look_up(provenance, "worker", "versions") or {})
    git = look_up(provenance, "control", "git")
    if git:
        found["commit"] = git["commit"] + (" with changes" if git["dirty"] else "")
    for plugin in look_up(provenance, "worker", "plugins") or []:
        if plugin["sha256"]:
            found[plugin["name"]] = f"sha256 {plugin['sha256'][:12]}"
    return found


def _last(metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float | None]]:
    names = dict.fromkeys(name for line in metrics for name in line if not name.startswith("upstream/"))
    first = [name for name in (REWARD, LOSS, POLICY_LOSS) if name in names]
    for name in [*first, *sorted(set(names) - {*first, "step", "time", "nonfinite"})]:
        yield name, ends(metrics, name)[1]


def _table(columns: Mapping[str, Values]) -> list[Difference]:
    """Every key with the values of the runs that have it, in the order of first appearance."""
    keys = dict.fromkeys(key for values in columns.values() for key in values)
    return [Difference(key, {run: values[key] for run, values in columns.items() if key in values}) for key in keys]


def _differences(columns: Mapping[str, Values]) -> list[Difference]:
    return [row for row in _table(columns) if len(row.values) < len(columns) or not _same(row.values.values())]


def _same(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(other == first and type(other) is type(first) for other in others)


# -- the page ----------------------------------------------------------------------------------------------------------


def _render(made: Comparison, metrics: Mapping[str, list[dict[str, Any]]]) -> str:
    from markupsafe import Markup

    charts = [(chart, Markup(draw(chart))) for chart in _charts(metrics)]  # what matplotlib wrote is escaped
    page = {
        "made": made,
        "letters": list(metrics),
        "charts": charts,
        "bucket": max((chart.bucket for chart, _ in charts), default=1),
        "colours": len(LINES),
        "number": number,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    return render("compare.html.j2", page)


def _charts(metrics: Mapping[str, list[dict[str, Any]]]) -> Iterator[Chart]:
    """Reward, each loss, step time; every run that logged it is a line, in the run's colour on each chart."""
    everything = [line for lines in metrics.values() for line in lines]
    names = list(dict.fromkeys(name for line in everything for name in line))
    if REWARD in names:
        yield Chart("Reward", _lines(metrics, REWARD), unit="mean", wide=True)
    for name in loss_names(everything, names):
        yield Chart(f"Loss: {name.removeprefix('loss/')}", _lines(metrics, name))
    if STEP_TIME in names:
        yield Chart("Step time", _lines(metrics, STEP_TIME), unit="s")


def _lines(metrics: Mapping[str, list[dict[str, Any]]], name: str) -> list[Line]:
    found = [(colour, letter, *series(lines, name)) for colour, (letter, lines) in enumerate(metrics.items())]
    return [Line(letter, steps, values, colour=colour) for colour, letter, steps, values in found if steps]
