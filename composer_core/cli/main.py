"""The `composer-run` program: global options, the table of verbs, and the one place where errors become exit codes.

A verb's module is imported when the verb is used, so that `--help` stays fast. To add a verb, write
`cli/<verb>.py` with a typer function (or a `typer.Typer` for a verb with verbs of its own), add a row to `VERBS`, and
make its page: `python -m composer_core.cli.pages docs/cli`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from composer_core.cli.common import GlobalOptions
from composer_core.errors import ComposerError, UsageError

SPEC_SUFFIXES = (".yaml", ".yml", ".json")
INTERNAL_ERROR = 4


class Verb(NamedTuple):
    """Where a verb lives, and its line in `--help`, which must not import it."""

    module: str
    attribute: str
    help: str


VERBS: dict[str, Verb] = {
    "run": Verb("composer_core.cli.run", "run", "Train what a spec describes (the default verb)."),
    "check": Verb("composer_core.cli.check", "check", "Find every mistake in a spec, without starting anything."),
    "plan": Verb("composer_core.cli.plan", "plan", "Show everything that a run would use and write."),
    "schema": Verb("composer_core.cli.schema", "schema", "Print the JSON Schema of a spec, for editors."),
    "init": Verb("composer_core.cli.init", "init", "Write a commented spec to start from."),
    "plugins": Verb("composer_core.cli.plugins", "app", "What is installed, what it takes, whether it works."),
    "resume": Verb("composer_core.cli.resume", "resume", "Go on with a run from its newest complete checkpoint."),
    "status": Verb("composer_core.cli.status", "status", "Say where runs stand."),
    "logs": Verb("composer_core.cli.logs", "logs", "Show the log files of a run."),
    "stop": Verb("composer_core.cli.stop", "stop", "Ask a run to finish its step, save, and end."),
    "reap": Verb("composer_core.cli.reap", "reap", "End replicas that run for nobody."),
    "traces": Verb("composer_core.cli.traces", "app", "Read recorded agent sessions: count, show, convert."),
    "replay": Verb("composer_core.cli.replay", "replay", "Ask teachers about recorded steps, write preference pairs."),
    "report": Verb("composer_core.cli.report", "report", "Write report.html for a run."),
    "compare": Verb("composer_core.cli.compare", "compare", "What differs between runs, with their curves overlaid."),
    "doctor": Verb("composer_core.cli.doctor", "doctor", "Say what of this machine and environment is in the way."),
}


class VerbGroup(TyperGroup):
    """Shows verbs from the table, imports the one that is used, and takes a spec in a verb's place for `run`."""

    def __init__(self, **attrs: Any) -> None:
        attrs["commands"] = {
            name: TyperCommand(name=name, callback=None, help=verb.help) for name, verb in VERBS.items()
        }
        super().__init__(**attrs)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The verb named by the first argument, or `run` where that is a spec; called by typer."""
        name, rest = args[0], args[1:]
        if name not in VERBS:
            if ctx.resilient_parsing and not name.endswith(SPEC_SUFFIXES):
                return None, None, args  # the shell asks for completions while the verb is still being typed
            if not (name.endswith(SPEC_SUFFIXES) or Path(name).is_file()):
                raise _no_such_command(name)
            name, rest = "run", args
        return name, load(name), rest


def _no_such_command(name: str) -> UsageError:
    near = difflib.get_close_matches(name, VERBS, 1)
    hint = f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(VERBS)}"
    return UsageError(f"no such command {name!r}{hint}")


def load(name: str) -> Any:
    """Import a verb; its command, as typer runs it."""
    verb = VERBS[name]
    target = getattr(importlib.import_module(verb.module), verb.attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, _app(add_completion=False)
        target.command(name=name)(function)
    return typer.main.get_command(target)


def _app(**options: Any) -> typer.Typer:
    # Plain text and plain tracebacks: rich's boxes cost 70 ms of import and break messages that tools read by line.
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"composer-core {version('composer-core')}")
        raise typer.Exit


app = _app(cls=VerbGroup, no_args_is_help=True, name="composer-run")


@app.callback()
def options(
    ctx: typer.Context,
    no_plugins: Annotated[bool, typer.Option("--no-plugins", help="Use the core's own contributions only.")] = False,
    disable_plugin: Annotated[
        list[str] | None, typer.Option("--disable-plugin", metavar="NAME", help="Skip a plugin; repeatable.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Post-train a language-model agent from one spec, on any installed trainer.

    `composer-run spec.yaml` is short for `composer-run run spec.yaml`.
    """
    chosen = ctx.ensure_object(GlobalOptions)
    chosen.third_party = not no_plugins
    chosen.disabled = frozenset(disable_plugin or ())
    chosen.debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program: the console script's entry point, always left through SystemExit or with an exit code."""
    chosen = GlobalOptions()
    try:
        app(args=None if argv is None else list(argv), obj=chosen, prog_name="composer-run")
    except ComposerError as error:
        if chosen.debug:
            traceback.print_exc()
        typer.echo(str(error), err=True)
        return error.exit_code
    except Exception as error:
        if chosen.debug:
            traceback.print_exc()
        name = type(error).__name__
        typer.echo(f"internal error, please report: {name}: {error}; --debug shows the traceback", err=True)
        return INTERNAL_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
