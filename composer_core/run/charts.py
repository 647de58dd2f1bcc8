"""Line charts for the report, as SVG text that takes its colours from the page's CSS variables.

matplotlib draws with stand-in colours that are replaced afterwards, so that one picture fits a light and a dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 600
"""More than these are averaged in runs of equal length: a page stays small however long the run was."""

INK, GRID = "#010101", "#020202"
LINES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
DASHES = ("-", "--", ":")
"""Where there are more lines than colours, the same colours come again in these."""
VARIABLES = {INK: "var(--muted)", GRID: "var(--line)", **{c: f"var(--c{i})" for i, c in enumerate(LINES)}}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
}


@dataclass(frozen=True)
class Line:
    """One curve; NaN leaves a gap."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    band: Sequence[float] = ()
    """Half-width around the values, e.g. a standard deviation; empty for none."""
    colour: int = 0
    """Counts through the page's colours, then through `DASHES`."""


@dataclass(frozen=True)
class Chart:
    """A picture of one or more curves over steps."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    wide: bool = False
    log: bool = False

    @property
    def bucket(self) -> int:
        """Logged steps averaged into one point of its longest line; 1 where every step is drawn."""
        return max((bucket(line.values) for line in self.lines), default=1)


def draw(chart: Chart) -> str:
    """The chart as an `<svg>` element without external references."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": chart.title}):
        from matplotlib.figure import Figure  # not pyplot: no global state, no display

        figure = Figure(figsize=(9.6, 2.9) if chart.wide else (4.7, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for line in chart.lines:
            _draw_line(axes, line)
        _draw_axes(axes, chart)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue())


def _draw_line(axes: Any, line: Line) -> None:
    steps, values, band = thin(line.steps), thin(line.values), thin(line.band)
    round_, colour = line.colour // len(LINES), LINES[line.colour % len(LINES)]
    if band:
        low = [v - b for v, b in zip(values, band, strict=True)]
        high = [v + b for v, b in zip(values, band, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0)
    marker = "o" if len(values) < 3 else ""  # a line of one point is invisible
    label = line.label.replace("$", r"\$")  # else it is a formula
    style = DASHES[round_ % len(DASHES)]
    axes.plot(steps, values, style, color=colour, linewidth=1.8, label=label, marker=marker, markersize=3.5)


def _draw_axes(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if chart.wide else 5))
    axes.set_ylabel(chart.unit)
    axes.margins(x=0.02)
    if chart.log and any(value > 0 for line in chart.lines for value in line.values):
        axes.set_yscale("log")
    if len(chart.lines) > 1:
        beside_exponent = (0.14, 1.16)  # "1e-8" of the axis stands above its left end
        axes.legend(loc="upper left", bbox_to_anchor=beside_exponent, ncols=4, borderaxespad=0, handlelength=1.2)


def bucket(values: Sequence[float]) -> int:
    """How many neighbouring values `thin` makes one of."""
    return max(1, math.ceil(len(values) / MOST_POINTS))


def thin(values: Sequence[float]) -> list[float]:
    """At most MOST_POINTS values: means of runs of equal length, NaN left out of each."""
    length = bucket(values)
    if length == 1:
        return list(values)
    return [_mean(values[start : start + length]) for start in range(0, len(values), length)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _inline(document: str) -> str:
    """The `<svg>` element of a document, without metadata, sized by the page and coloured by its variables."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg
