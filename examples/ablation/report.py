"""The table and the figure, as report.html, one page without outside resources, and report.md."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from results import GOAL, GRPO, HALF_WAY, Check, Outcome, Row, checks, rows

import composer_core.run.charts
from composer_core.run.charts import Chart, Line, draw
from composer_core.run.files import write_text

FIGURES = (
    ("Full coverage", (*GRPO, "sdpo", "replay", "all")),
    ("Half coverage: hints for 8 keys, a teacher for the other 8", (*GRPO, "half-sdpo", "half-replay", "half-all")),
    ("Controls", (*GRPO, "wrong-hint", "void-hint", "never-right", "imitate")),
)
HEADINGS = (
    "arm",
    "seeds",
    f"steps to {HALF_WAY:g}",
    f"steps to {GOAL:g}: median (all)",
    "x GRPO",
    "best reward",
    "generated tokens",
    "forward tokens",
    "teacher answers",
    "seconds",
    "known keys kept",
    "follows hints: before, after",
)


def write_report(outcomes: Sequence[Outcome], out: Path, *, machine: str) -> None:
    """Both files, in `out`."""
    write_text(out / "report.md", markdown(outcomes, machine=machine))
    write_text(out / "report.html", page(outcomes, machine=machine))


def markdown(outcomes: Sequence[Outcome], *, machine: str) -> str:
    """The table and the targets."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row) for row in rows(outcomes))]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([machine, "", *table, "", *(f"- {_told(check)}" for check in checks(outcomes)), ""])


def cells(row: Row) -> list[str]:
    """A row as texts, under `HEADINGS`."""
    return [
        row.arm,
        str(row.seeds),
        steps(row.half_way),
        f"{steps(row.goal)} ({', '.join(map(steps, row.goals))})",
        f"{row.ratio:.2f}" if math.isfinite(row.ratio) and row.ratio else "-",
        f"{row.best:.2f}",
        f"{row.generated_tokens / 1000:.1f}k",
        f"{row.forward_tokens / 1000:.0f}k",
        f"{row.teacher_answers:.0f}",
        f"{row.seconds:.1f}",
        f"{row.known:.2f}",
        f"{row.follows_before:.2f}, {row.follows:.2f}",
    ]


def steps(value: float) -> str:
    """`-` for a goal that was not reached."""
    return f"{value:g}" if math.isfinite(value) else "-"


def page(outcomes: Sequence[Outcome], *, machine: str) -> str:
    """The HTML page, in the look of a run's own report."""
    style = Path(composer_core.run.charts.__file__).with_name("page.css").read_text(encoding="utf-8")
    style += "td:first-child { white-space: nowrap; }"
    figures = [
        f'<figure class="card wide" style="margin:0"><h3>{html.escape(chart.title)}</h3>{draw(chart)}</figure>'
        for chart in charts(outcomes)
    ]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in HEADINGS)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in cells(row))}</tr>\n" for row in rows(outcomes)
    )
    told = "".join(f"<li>{html.escape(_told(check))}</li>" for check in checks(outcomes))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">\n'
        f"<title>Ablation - Composer</title><style>{style}</style></head><body><main>\n"
        f'<h1>Three channels, one task</h1><p class="facts">{html.escape(machine)}</p>\n'
        "<h2>Expected reward over optimiser steps, median of seeds</h2>\n"
        f"<p class='muted'>A run ends at {GOAL:g}; its curve stays there while others go on.</p>\n"
        f"<section class='charts'>{''.join(figures)}"
        f"</section>\n<h2>Up to a reward of {GOAL:g}</h2><div class='card scroll'><table><tr>{head}</tr>\n{body}"
        f"</table></div>\n<h2>Targets</h2><ul>{told}</ul>\n</main></body></html>\n"
    )


def charts(outcomes: Sequence[Outcome]) -> Iterator[Chart]:
    """A figure for each group of arms of which one beside GRPO was run."""
    arms = {outcome.arm for outcome in outcomes}
    for title, group in FIGURES:
        shown = [arm for arm in group if arm in arms]
        if set(shown) - set(GRPO) or title == FIGURES[0][0]:
            lines = [_line(arm, [o for o in outcomes if o.arm == arm], colour=group.index(arm)) for arm in shown]
            yield Chart(title, lines, unit="reward", wide=True)


def _line(arm: str, outcomes: Sequence[Outcome], *, colour: int) -> Line:
    """The median curve; a run that has ended at the goal stays where it was, as the others go on."""
    longest = max((outcome.curve for outcome in outcomes), key=len)
    values = [statistics.median(o.curve[min(i, len(o.curve) - 1)][1] for o in outcomes) for i in range(len(longest))]
    return Line(arm, [step for step, _ in longest], values, colour=colour)


def _told(check: Check) -> str:
    return f"{'met' if check.met else 'MISSED'}: {check.says} (found {check.found})"
