"""The command as scripts see it: exit codes, one line per mistake, JSON alone on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compress import __version__
from compress.cli import app
from compress.errors import InputError
from tests.command import lmpress

INSTALLED = str(Path(sys.executable).parent / "lmpress")


def test_version() -> None:
    assert lmpress("--version") == (0, f"lmpress {__version__}\n", "")


def test_the_installed_command_runs() -> None:
    done = subprocess.run([INSTALLED, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lmpress {__version__}\n", "")


@pytest.mark.parametrize("verb", app.VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = lmpress(verb, "--help")
    assert done.code == 0 and f"Usage: lmpress {verb}" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantise",),
        ("run",),
        ("run", "demo", "--modle", "x"),
        ("list", "mehtods"),
        ("plan", "demo", "--context", "many"),
        ("recipe", "check", "no_such_recipe"),
        ("recipe", "check", "demo", "--set", "calibration.sampels=1"),
    ],
    ids=["verb", "argument missing", "option", "topic", "not a number", "no recipe", "key"],
)
def test_usage_mistakes_leave_with_2(arguments: tuple[str, ...]) -> None:
    done = lmpress(*arguments)
    assert (done.code, done.out) == (2, "") and done.err != ""


def test_a_mistake_is_one_line_on_stderr() -> None:
    done = lmpress("recipe", "check", "demo", "--set", "stages.0.quantize.scheme=W4A61")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "lmpress: demo: field stages.0.quantize.scheme: 'W4A61' is not known; did you mean 'W4A16'? "
        "Known: W4A16, W4A16_ASYM, W8A16, W8A8, LLM_INT8\n"
    )


@pytest.mark.parametrize("place", [0, 2], ids=["before the verb", "behind it"])
def test_debug_lets_the_traceback_through(place: int) -> None:
    arguments = ["recipe", "check", "no_such_recipe"]
    arguments.insert(place, "--debug")
    with pytest.raises(InputError, match="no such recipe"):
        lmpress(*arguments)


def test_bugs_are_one_line_too() -> None:
    code = "import compress.cli.app as app; app.build = lambda: 1 / 0; app.main({!r})"
    plain = subprocess.run([sys.executable, "-c", code.format(["list"])], capture_output=True, text=True, check=False)
    assert plain.returncode == 1
    assert plain.stderr.startswith("lmpress: internal error: ZeroDivisionError: ") and plain.stderr.count("\n") == 1
    debug = ["list", "--debug"]
    loud = subprocess.run([sys.executable, "-c", code.format(debug)], capture_output=True, text=True, check=False)
    assert loud.returncode == 1 and "Traceback" in loud.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--debug", "run", "demo"), "interrupted: resume by the same command"),
        (("recipe", "check", "demo"), "interrupted"),
    ],
    ids=["run", "another verb"],
)
def test_interruption_names_the_way_on_where_there_is_one(
    arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.recipe.load", interrupt)
    done = lmpress(*arguments)
    assert done.code == 130 and done.err.splitlines()[-1] == f"lmpress: {told}"


@pytest.mark.parametrize("topic", ["methods", "schemes", "formats", "kernels", "recipes"])
def test_lists_are_json_on_stdout_alone(topic: str) -> None:
    done = lmpress("list", topic, "--json")
    rows = json.loads(done.out)
    assert (done.code, done.err) == (0, "") and rows and all(row["name"] for row in rows)
    assert all(row.get("about", "-") for row in rows)
    assert lmpress("list", topic).out.count("\n") > len(rows)


def test_recipe_show_schema_and_check() -> None:
    shown = lmpress("recipe", "show", "demo", "--json", "--set", "stages.0.quantize.group_size=32")
    assert json.loads(shown.out)["stages"][0]["quantize"]["group_size"] == 32
    assert json.loads(lmpress("recipe", "schema").out)["properties"]["version"]["const"] == 1
    assert lmpress("recipe", "check", "demo").out == "demo: valid (quantize gptq)\n"
    assert json.loads(lmpress("recipe", "check", "demo", "--json").out)["valid"] is True


def test_doctor() -> None:
    found = json.loads(lmpress("doctor", "--json").out)
    values = {check["name"]: check["value"] for check in found["checks"]}
    assert found["ok"] and values["lmpress"] == __version__ and values["torch"]
    assert lmpress("doctor").code == 0


def test_doctor_fails_where_something_required_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.cli.doctor.REQUIRED", ("torch", "no-such-distribution"))
    done = lmpress("doctor")
    assert done.code == 1 and "MISSING no-such-distribution none" in done.out
