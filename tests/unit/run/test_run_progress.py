import io

import pytest
from rich.console import Console

from composer_core.run.progress import Bar, Lines, Silent, display, duration, figures

METRICS = {
    "reward/mean": 0.25,
    "reward/std": 0.1,
    "loss/policy": 0.0123456,
    "loss/sdpo": 1.5,
    "loss/total": 0.2,
    "tokens_per_s": 1234.5,
    "upstream/entropy": 3.0,
}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def lines_of(total, times):
    """What is printed when step i + 1 is logged at second times[i]."""
    stream, clock = io.StringIO(), Clock()
    lines = Lines(total, stream, clock=clock)
    for step, second in enumerate(times, 1):
        clock.now = 100.0 + second
        lines.step(step, {"reward/mean": step / 10})
    lines.close()
    return stream.getvalue().splitlines()


def test_the_figures_are_reward_losses_and_speed():
    expected = ["reward 0.25", "loss 0.2", "policy 0.01235", "sdpo 1.5", "1234 tokens/s"]
    assert figures(METRICS) == expected


def test_a_loss_of_one_part_is_shown_once():
    assert figures({"loss/policy": 0.5, "loss/total": 0.5}) == ["loss 0.5"]


def test_the_first_and_the_last_step_are_printed_and_at_most_one_in_two_seconds_between():
    # step 3 comes 1 s after the line of step 1, step 4 comes 2 s after it: 2 s a 3 steps -> 2 steps left = 1.33 s
    assert lines_of(6, [0, 0.5, 1, 2, 2.5, 3]) == [
        "step 1/6  reward 0.1",
        "step 4/6  reward 0.4  1s left",
        "step 6/6  reward 0.6",
    ]


def test_a_run_that_ends_early_still_shows_its_last_step():
    # 1 s per step, 98 steps to come: 98 s
    assert lines_of(100, [0, 1]) == ["step 1/100  reward 0.1", "step 2/100  reward 0.2  1m38s left"]


def test_a_pipe_gets_lines_and_quiet_gets_nothing():
    assert isinstance(display(3, io.StringIO(), quiet=False), Lines)
    assert isinstance(display(3, io.StringIO(), quiet=True), Silent)


def test_the_bar_shows_step_and_figures_and_gives_the_cursor_back():
    stream = io.StringIO()
    bar = Bar(8, Console(file=stream, force_terminal=True, width=140))
    bar.step(3, METRICS)
    bar.close()
    shown = stream.getvalue()
    assert "3/8" in shown
    assert "reward 0.25  loss 0.2" in shown
    assert shown.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (3600 * 2 + 300, "2h05m")], ids=str
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
