"""The `lmpress` command: registers one verb per file, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated

import typer

from compress import __version__
from compress.errors import InputError

# In the order of the help page. Each is the function of the same name in compress/cli/<name>.py, dashes as underscores.
VERBS = (
    "run",
    "quantize",
    "prune",
    "distill",
    "plan",
    "inspect",
    "compare",
    "eval",
    "bench",
    "generate",
    "export",
    "kernels",
    "list",
    "recipe",
    "demo-model",
    "doctor",
)
RESUMABLE = ("run", "quantize", "prune", "distill", "export")
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def build() -> typer.Typer:
    """The application with every verb registered. Verb modules import nothing heavy before they are called."""
    app = typer.Typer(
        name="lmpress",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help="Makes trained language models smaller and faster, and proves what that cost.")(_root)
    for verb in VERBS:
        name = verb.replace("-", "_")
        module = importlib.import_module(f"compress.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(name=verb)(getattr(module, name))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 ok, 1 failed, 2 usage or invalid recipe, 3 a gate failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        # --debug counts wherever it stands; the application knows it only in front of the verb.
        build()(args=[argument for argument in given if argument != "--debug"], prog_name="lmpress")
    except InputError as error:
        if debug:
            raise
        _complain(str(error))
        sys.exit(error.exit_code)
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            verb = next((argument for argument in given if not argument.startswith("-")), "")
            _complain("interrupted: resume by the same command" if verb in RESUMABLE else "interrupted")
        raise
    finally:
        # Reached by a bug's exception too, on its way to the interpreter, which then asks this hook to show it.
        sys.excepthook = sys.__excepthook__ if debug else _confess


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmpress {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. May stand anywhere on the line.")] = False,
) -> None:
    """What holds for every verb: messages go to stderr, and other libraries' bars only to a terminal."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("compress").setLevel(logging.INFO)
    # Read by GNU OpenMP when torch is first imported: how long an idle thread spins before it sleeps. Its default of
    # 300,000 rounds makes every operation wait for a core that another program has taken.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    if not sys.stderr.isatty():
        # The one switch that transformers, datasets and huggingface_hub all read, before any of them is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _confess(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for an error that is nobody's input but a bug here."""
    _complain(f"internal error: {kind.__name__}: {error} (the same command with --debug shows where)")


def _complain(message: str) -> None:
    """One red line on stderr, whatever the message holds."""
    typer.secho(f"lmpress: {' '.join(message.split())}", fg=typer.colors.RED, err=True)


if __name__ == "__main__":  # for what starts several processes: accelerate launch -m compress.cli.app
    main()
