"""report.html: one page that shows a run, without any outside resource, whatever of the run is there.

Here the facts are gathered; `charts.py` draws, `report.html.j2` lays out and escapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_core.run.charts import Chart, Line
from composer_core.run.directory import RunDirectory
from composer_core.run.files import read_jsonl, write_text
from composer_core.run.metrics import LOSS, POLICY_LOSS, REWARD, REWARD_STD, STEP_TIME, TOKENS_PER_S, ends, series
from composer_core.run.progress import duration

MOST_ROLLOUTS = 8
"""Completions shown of a step."""
LONG_TEXT = 600
"""Characters from which a text is folded."""

Metrics = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """What `composer-run report --json` prints."""

    run: str
    state: str
    reason: str
    steps: int
    """The last logged step."""
    total_steps: int | None
    reward_first: float | None
    """Mean of the first five logged steps."""
    reward_last: float | None
    """Mean of the last five."""
    tokens_per_s: float | None
    """Mean of the last five."""
    report: str
    model: str | None
    checkpoints: list[int]


def summarise(directory: RunDirectory) -> Report:
    """The run in figures; writes nothing."""
    metrics = read_jsonl(directory.metrics)
    state = directory.state()
    model = directory.complete_model()
    first, last = ends(metrics, REWARD)
    return Report(
        run=directory.name,
        state=state.state,
        reason=state.reason,
        steps=max((line["step"] for line in metrics), default=0),
        total_steps=look_up(directory.read_json("plan.json"), "spec", "train", "steps"),
        reward_first=first,
        reward_last=last,
        tokens_per_s=ends(metrics, TOKENS_PER_S)[1],
        report=str(directory.report),
        model=None if model is None else str(model),
        checkpoints=[step for step, _ in directory.complete_checkpoints()],
    )


def build_report(directory: RunDirectory) -> Report:
    """Write report.html and return the run in figures."""
    summary = summarise(directory)
    write_text(directory.report, render("report.html.j2", _page(directory, summary)))
    return summary


def render(template: str, page: Mapping[str, Any]) -> str:
    """A page of this folder's template; every value is escaped, and one that is missing is an error."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(template).render(page)


def _page(directory: RunDirectory, summary: Report) -> dict[str, Any]:
    from markupsafe import Markup

    from composer_core.run.charts import draw

    metrics = read_jsonl(directory.metrics)
    charts = [(chart, Markup(draw(chart))) for chart in _charts(metrics)]  # what matplotlib wrote is escaped
    return {
        "summary": summary,
        "spec": look_up(directory.read_json("plan.json"), "spec") or {},
        "tiles": _tiles(summary, metrics, _seconds(directory, metrics)),
        "warnings": _warnings(directory, metrics),
        "charts": charts,
        "bucket": max((chart.bucket for chart, _ in charts), default=1),
        "rollouts": _rollouts(read_jsonl(directory.rollouts)),
        "resolved": directory.read_json("resolved.json") or {},
        "provenance": directory.read_json("provenance.json") or {},
        "events": read_jsonl(directory.events),
        "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def look_up(value: Any, *keys: str) -> Any:
    """A value in nested mappings, or None: a report must also show a run that lacks it."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _seconds(directory: RunDirectory, metrics: Metrics) -> float | None:
    """From the first event to the last sign of life."""
    times = [line["time"] for line in [*read_jsonl(directory.events), *metrics]]
    return max(times) - min(times) if times else None


# -- parts of the page -------------------------------------------------------------------------------------------------


def _tiles(summary: Report, metrics: Metrics, seconds: float | None) -> list[tuple[str, str, str]]:
    """(label, value, small print)."""
    step_times = [line[STEP_TIME] for line in metrics if line.get(STEP_TIME) is not None]
    step_time = sum(step_times) / len(step_times) if step_times else None
    total = "" if summary.total_steps is None else f"of {summary.total_steps}, "
    return [
        ("Steps", str(summary.steps), f"{total}{len(metrics)} logged"),
        ("Reward, start", number(summary.reward_first), "mean of the first 5"),
        ("Reward, end", number(summary.reward_last), "mean of the last 5"),
        ("Tokens per second", number(summary.tokens_per_s), "mean of the last 5"),
        ("Step time", "–" if step_time is None else f"{number(step_time)} s", "mean"),
        ("Duration", "–" if seconds is None else duration(seconds), "to the last sign of life"),
    ]


def number(value: float | None) -> str:
    """A figure for reading: three digits, or whole with thousands marked."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _warnings(directory: RunDirectory, metrics: Metrics) -> list[str]:
    """What a reader must not miss: non-finite metrics, warnings among the events."""
    found: dict[str, list[int]] = {}
    for line in metrics:
        for name in line.get("nonfinite", ()):
            found.setdefault(name, []).append(line["step"])
    warnings = [
        f"{name} was not finite in {len(steps)} logged step{'s' * (len(steps) > 1)}, first in step {steps[0]}"
        for name, steps in found.items()
    ]
    return warnings + [str(line.get("reason")) for line in read_jsonl(directory.events) if line["event"] == "warning"]


def _charts(metrics: Metrics) -> Iterator[Chart]:
    """Reward, each loss by itself (their scales differ), gradient norms, times; those that were logged."""
    names = list(dict.fromkeys(name for line in metrics for name in line))
    if REWARD in names:
        yield Chart("Reward", [_reward_line(metrics)], unit="mean ± std" if REWARD_STD in names else "mean", wide=True)
    for colour, name in enumerate(loss_names(metrics, names), 1):
        label = name.removeprefix("loss/")
        yield Chart(f"Loss: {label}", [_line(metrics, name, label, colour)])
    norms = [name for name in names if name == "grad_norm" or name.startswith("grad_norm/")]
    if norms:
        lines = [_line(metrics, name, name.partition("/")[2] or "total", i) for i, name in enumerate(norms)]
        yield Chart("Gradient norm", lines, log=True)
    if STEP_TIME in names:
        yield Chart("Step time", [_line(metrics, STEP_TIME, "step time", 0)], unit="s")


def loss_names(metrics: Metrics, names: Sequence[str]) -> list[str]:
    """The losses among `names`, total and policy first; a policy loss equal to the total in every step is left out."""
    first = [name for name in (LOSS, POLICY_LOSS) if name in names]
    if len(first) == 2 and all(line.get(LOSS) == line.get(POLICY_LOSS) for line in metrics):
        first.remove(POLICY_LOSS)
    return [*first, *(name for name in names if name.startswith("loss/") and name not in (LOSS, POLICY_LOSS))]


def _line(metrics: Metrics, name: str, label: str, colour: int) -> Line:
    steps, values = series(metrics, name)
    return Line(label, steps, values, colour=colour)


def _reward_line(metrics: Metrics) -> Line:
    steps, values = series(metrics, REWARD)
    _, stds = series(metrics, REWARD_STD)
    return Line("reward", steps, values, band=stds if len(stds) == len(values) else ())


def _rollouts(lines: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """(step, samples) of the first and the last sampled step."""
    steps = sorted({line["step"] for line in lines})
    shown = [*steps[:1], *steps[1:][-1:]]
    return [(step, [_sample(line) for line in lines if line["step"] == step][:MOST_ROLLOUTS]) for step in shown]


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = _text(line["prompt"]), line["completion"]
    rewards = [(name, number(score)) for name, score in line["rewards"].items()]
    texts = [("prompt", prompt, len(prompt) > LONG_TEXT), ("completion", completion, len(completion) > LONG_TEXT)]
    return {"texts": texts, "rewards": rewards, "advantage": number(line["advantage"])}


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as text; chat messages one behind the other under their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
