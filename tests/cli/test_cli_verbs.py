"""The table of verbs as a whole: each imports and has an example that parses, pages are up to date, shells complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_core.cli.main import VERBS, load
from composer_core.cli.pages import examples, main, pages

ROOT = Path(__file__).parents[2]
COMPLETE = "_COMPOSER_RUN_COMPLETE"


def commands(command, path):
    """(words, command) of a verb and of its own verbs."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, [*path, name])


ALL = [
    pytest.param(path, command, id=" ".join(path)) for verb in VERBS for path, command in commands(load(verb), [verb])
]


@pytest.mark.parametrize(("path", "command"), ALL)
def test_every_verb_has_help_with_an_example_of_itself_that_parses(path, command):
    (example,) = examples(command)[:1]
    program, *words = example.split()
    assert program == "composer-run"
    assert words[: len(path)] == path[: len(words)]
    if getattr(command, "commands", {}):
        return  # the example is one of its own verbs', which has its own turn here
    options = [word for word in words[len(path) :] if word.startswith("-")]
    known = {name for param in command.params for name in param.opts}
    assert set(options) <= known


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_in_the_list_is_one_short_sentence(verb):
    assert VERBS[verb].help.endswith(".")
    assert len(VERBS[verb].help) <= 65


def test_the_pages_are_those_of_the_commands():
    folder = ROOT / "docs" / "cli"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert sorted(written) == sorted(pages())
    outdated = [name for name, text in pages().items() if written[name] != text]
    assert outdated == [], "python -m composer_core.cli.pages docs/cli"


def test_the_pages_are_written_by_one_command(tmp_path):
    assert main([str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "plugins.md").read_text() == pages()["plugins.md"]


def test_a_page_shows_usage_example_arguments_and_options():
    assert pages()["logs.md"] == (
        """\
# composer-run logs

Show the log files of RUN; where they are not on this disk, what its replica 0 printed.

```bash
composer-run logs latest --follow
```

`composer-run logs [OPTIONS] [RUN]`

| argument | |
| --- | --- |
| `RUN <str>` | A run's name, the beginning of one, a path, or `latest`. [default: latest] |

| option | |
| --- | --- |
| `--runs DIR` | Folder that holds runs; default COMPOSER_RUNS, else ./runs. |
| `-f, --follow` | Go on with new lines until the run is over. |
| `-n, --lines N` | Show the last N lines of a file. [default: 100; x>=0] |
| `--replica RANK` | What this replica printed, asked of its executor. [x>=0] |
"""
    )


# -- completion --------------------------------------------------------------------------------------------------------


def complete(folder, line):
    """What bash would offer behind `line`, asked the way its script asks."""
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    words = line.split(" ")
    asked = {COMPLETE: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    environment = {**os.environ, **asked}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_verbs_are_completed(tmp_path):
    assert complete(tmp_path, "composer-run re") == [verb for verb in VERBS if verb.startswith("re")]
    assert set(complete(tmp_path, "composer-run ")) >= set(VERBS)


def test_verbs_of_plugins_and_names_of_contributions_are_completed(tmp_path):
    assert complete(tmp_path, "composer-run plugins sh") == ["show"]
    assert complete(tmp_path, "composer-run plugins show regex") == ["regex"]
    assert set(complete(tmp_path, "composer-run plugins check dr")) == {"dr-grpo"}


def test_options_templates_and_runs_are_completed(tmp_path):
    assert complete(tmp_path, "composer-run stop --re") == ["--reason"]
    assert complete(tmp_path, "composer-run init toy") == ["toy-channel"]
    run = tmp_path / "runs" / "fix-traces-1"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    assert complete(tmp_path, "composer-run status fi") == ["fix-traces-1"]
    assert complete(tmp_path, "composer-run status latest fi") == ["fix-traces-1"]
    assert complete(tmp_path, "composer-run compare --runs runs fi") == ["fix-traces-1"]
    assert complete(tmp_path, "composer-run report l") == ["latest"]


def test_behind_a_verb_that_is_none_there_is_no_traceback(tmp_path):
    complete(tmp_path, "composer-run chekc spec")
    complete(tmp_path, "composer-run spec.yaml train")


def test_the_script_for_the_shell_is_shown(tmp_path):
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [*program, "--show-completion", "bash"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{COMPLETE}=complete_bash" in done.stdout
