"""Run `lmpress` commands inside the test process: what a shell would see, without its start-up time."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import NamedTuple

from compress.cli import app

# What makes a run short without making it another run.
SMALL = ("calibration.samples=4", "calibration.seqlen=64", "evaluate.context=64", "evaluate.tokens=256")


class Done(NamedTuple):
    """A finished command: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def lmpress(*arguments: str) -> Done:
    """Run one command, and undo what it set for its process."""
    hook, handlers = sys.excepthook, logging.getLogger().handlers[:]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main(arguments)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            sys.excepthook = hook
            logging.getLogger().handlers[:] = handlers
    return Done(code, out.getvalue(), err.getvalue())


def settings(*changes: str) -> list[str]:
    """`--set` options for `changes`."""
    return [word for change in changes for word in ("--set", change)]
