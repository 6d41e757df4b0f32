"""What holds for every command: help, exit codes, colours, and what is needed to run it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import MAIN, REPOSITORY, clean_environment, command

COMMANDS = ("run", "doctor", "plan", "verify", "path")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_json(cli, name):
    answer = cli(name, "--help", COLUMNS="200")
    assert answer.exit_code == 0
    assert "Example" in answer.stdout
    assert "--json" in answer.stdout


def test_help_tells_the_exit_codes(cli):
    assert "Exit codes: 0 yes; 1 no" in cli("--help", COLUMNS="400").stdout


def test_version_is_the_packages(cli):
    from altay_kvfix import __version__

    assert cli("--version").stdout == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [("bogus",), ("plan", "--bogus"), ("verify",)])
def test_wrong_usage(cli, arguments):
    answer = cli(*arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert "Usage" in answer.stderr


def test_python_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "altay_kvfix", "path"],
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{REPOSITORY}\n", "")


def test_package_itself_loads_nothing_of_the_command_line():
    check = "import sys, altay_kvfix; print([m for m in ('typer', 'rich') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_requirement_is_one_line(tmp_path, missing):
    hide = f"import sys; sys.modules[{missing!r}] = None; {MAIN}"
    done = subprocess.run([sys.executable, "-c", hide, "path"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        f"altay-kvfix: the command line needs {missing}: pip install 'altay-kvfix[cli]'\n"
    )


def on_terminal(arguments: list[str], **variables: str) -> str:
    """What a terminal gets of stdout."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        env=clean_environment(TERM="xterm-256color", **variables),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # the terminal's other end is closed
    process.wait()
    os.close(ours)
    return shown.decode()


FAMILIES = [
    *("plan", "--family", "full:16", "--family", "gdn:48"),
    *("--block-size", "1648", "--max-model-len", "65536"),
]
GREEN = "\x1b[1;32m"


def test_colours_on_a_terminal_only(cli):
    assert GREEN in on_terminal(FAMILIES)
    assert "\x1b" not in cli(*FAMILIES).stdout


def test_no_color(tmp_path: Path):
    shown = on_terminal(FAMILIES, NO_COLOR="1")
    assert "Chosen" in shown or "kept" in shown
    assert "\x1b[1;32m" not in shown and "\x1b[32m" not in shown


@pytest.mark.parametrize("columns", ["80", "120", "200"])
def test_table_fits_the_terminal(columns):
    """Nothing is cut off and no row is folded, whatever the width."""
    shown = on_terminal([*FAMILIES, "--kv-memory", "40GiB"], COLUMNS=columns, NO_COLOR="1")
    text = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "\u2026" not in text
    marked = [line for line in text.splitlines() if line.startswith(("->", "vLLM "))]
    assert 1 <= len(marked) <= 2
    assert all("\u2588" in line and "%" in line for line in marked)
