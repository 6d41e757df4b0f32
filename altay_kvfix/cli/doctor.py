"""``altay-kvfix doctor``: would a vLLM process started here be hooked, and if not, why not?

Nothing is concluded from this process: interpreters are started the way vLLM starts its own, and
asked (:mod:`probe`).
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, settings, vllm_compat
from ..layout import LayoutPlan
from ..settings import DISABLE_ENV_NAME, VARIABLES, Settings
from ..vllm_releases import PLANNER_MODULES
from .common import (
    FOLDER,
    NO,
    OK,
    WRONG_INPUT,
    Failure,
    console,
    new_table,
    print_json,
    process_group,
    progress,
    python_path_with,
)

OLDEST_PYTHON = (3, 10)
_PREFIXES = ("ALTAY_KVFIX_", "ZENIT_ALTAY_", "RADIANCE_KV_")
_RAY_WORKER = "Ray worker"
_SIMILAR = 0.85
"""From this likeness on, another name is taken for a typing error of one of ours."""
_TIMEOUT_SECONDS = 60
_IMPORT_TIMEOUT_SECONDS = 300

_PROBE = Path(__file__).with_name("probe.py").read_text()

# The child runs the same text. A built-in is all that a spawned child of "python -c" can find.
_SPAWN = """
import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=exec, args=(PROBE, GLOBALS))
child.start()
child.join()
"""

# Ray's workers have their environment from `ray start`, or from the driver where it starts Ray:
# like vLLM's driver, this one joins the cluster of RAY_ADDRESS or one on this machine, if any.
_RAY = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0)
def probe(text, values):
    import os, tempfile
    handle, path = tempfile.mkstemp()
    os.close(handle)
    try:
        exec(text, dict(values, OUT=path))
        with open(path) as file:
            return file.read()
    finally:
        os.unlink(path)

with open(GLOBALS["OUT"], "w") as file:
    file.write(ray.get(probe.remote(PROBE, GLOBALS)))
ray.shutdown()
"""


@dataclass(frozen=True)
class Interpreter:
    """One process that was started and asked."""

    name: str
    hooked: bool
    """Whether ``import vllm`` would be hooked there."""
    reasons: list[str]
    """Why it would not."""
    facts: dict[str, Any]
    """What it said of itself; empty where it said nothing."""


@dataclass(frozen=True)
class Setting:
    field: str
    variable: str
    value: str
    """What is in effect."""
    source: str
    """``environment``, ``default``, or ``malformed`` where the environment's value is not used."""


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples: altay-kvfix doctor; altay-kvfix doctor --full --python '/usr/bin/python3 "
        "-I'; altay-kvfix run -- altay-kvfix doctor"
    )(doctor)


def doctor(
    python: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="The interpreter, with its flags; by default the one of the vllm command, "
            "or this one.",
        ),
    ] = None,
    ray: Annotated[
        bool | None,
        typer.Option(help="Ask a Ray worker too; by default where Ray is installed."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also import vLLM there, and look at its planner's functions."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Tell whether a vLLM process started from here would be hooked, and if not, why not.

    Starts an interpreter, a child of it, and a Ray worker where Ray is installed, as vLLM would,
    with this shell's environment. Exits with 0 only when all of them are armed, wrapt works,
    vLLM's planner is known, and no setting is malformed.
    """
    interpreter = shlex.split(python) if python else default_interpreter()
    if not interpreter or shutil.which(interpreter[0]) is None:
        raise Failure(f"--python {python!r}: there is no such command", WRONG_INPUT)
    values = Settings.from_environ(os.environ)
    interpreters = _ask_all(interpreter, ray, full)
    facts = interpreters[0].facts
    vllm_folder = facts.get("vllm_folder")
    planner_problem = unknown_planner(Path(vllm_folder)) if vllm_folder else None
    problems = []
    if facts and not vllm_folder:
        problems.append(f"vLLM is not installed for {facts['executable']}")
    if planner_problem:
        problems.append(f"this vLLM's planner is not known: {planner_problem}")
    problems += [str(error) for error in values.errors]
    hooked = not problems and all(i.hooked for i in interpreters)
    report = {
        "hooked": hooked,
        "version": __version__,
        "folder": str(FOLDER),
        "interpreters": [asdict(i) for i in interpreters],
        "vllm": {
            "folder": vllm_folder,
            "version": vllm_version(Path(vllm_folder)) if vllm_folder else None,
            "planner_known": bool(vllm_folder) and planner_problem is None,
        },
        "wrapt": facts.get("wrapt"),
        "settings": [asdict(s) for s in settings_in_effect(os.environ)],
        "problems": problems,
        "warnings": [
            *_ray_warning(interpreters),
            *typing_errors(os.environ),
            *_path_warnings(os.environ),
            *_idle(values),
        ],
        "corrected": corrected_line(os.environ) if _is_correctable(interpreters[0]) else None,
    }
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(OK if hooked else NO)


# --- asking ------------------------------------------------------------------------------------


def default_interpreter() -> list[str]:
    """What runs the ``vllm`` command, with its flags; this interpreter where there is none."""
    script = shutil.which("vllm")
    if script is None:
        return [sys.executable]
    try:
        first, second = Path(script).read_bytes().split(b"\n")[:2]
    except (OSError, ValueError):
        return [sys.executable]
    # Where the interpreter's path is long, pip writes a shell script that executes it.
    found = re.match(rb"#!\s*(.*python.*)$", first) or re.match(
        rb"'''exec' (.*) \"\$0\" \"\$@\"$", second
    )
    words = shlex.split(found[1].decode()) if found else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words if words and shutil.which(words[0]) else [sys.executable]


def _ask_all(python: Sequence[str], ray: bool | None, full: bool) -> list[Interpreter]:
    with progress("starting interpreters") as show, tempfile.TemporaryDirectory() as scratch:
        show("fresh interpreter")
        asked = [_ask("fresh interpreter", python, _PROBE, scratch, full=full)]
        if not asked[0].facts:
            return asked
        show("spawned child")
        asked.append(_ask("spawned child", python, _SPAWN, scratch))
        has_ray = ray is None and _succeeds([*python, "-c", "import ray"])
        if ray or has_ray:
            show(_RAY_WORKER)
            asked.append(_ask(_RAY_WORKER, python, _RAY, scratch))
        return asked


def _ask(
    name: str, python: Sequence[str], script: str, scratch: str, *, full: bool = False
) -> Interpreter:
    out = os.path.join(scratch, name.replace(" ", "-"))
    values = {
        "OUT": out,
        "NAMES": ["PYTHONPATH", DISABLE_ENV_NAME],
        "MODULES": ["vllm", *reversed(PLANNER_MODULES)] if full else [],
        "FUNCTIONS": list(vllm_compat.PLANNER_FUNCTIONS),
    }
    # As "python -c", not as a script: a script's folder would be on its path.
    text = "\n".join(f"{k} = {v!r}" for k, v in values.items())
    if script is not _PROBE:
        text = f"PROBE = {_PROBE!r}\nGLOBALS = {values!r}"
    timeout = _IMPORT_TIMEOUT_SECONDS if full else _TIMEOUT_SECONDS
    with (
        tempfile.TemporaryFile() as log,
        process_group(
            [*python, "-c", f"{text}\n{script}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            process.wait(timeout)
            ending = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"no answer in {timeout} s"
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    try:
        facts = json.loads(Path(out).read_text())
    except (OSError, ValueError):
        last = said.splitlines()[-1] if said else "no output"
        return Interpreter(name, False, [f"it could not be asked: {ending}, {last}"], {})
    reasons = why_not(facts, full)
    return Interpreter(name, not reasons, reasons, facts)


def _succeeds(command: Sequence[str]) -> bool:
    with process_group(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            return process.wait(_TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False


# --- concluding --------------------------------------------------------------------------------


def why_not(facts: Mapping[str, Any], full: bool = False) -> list[str]:
    """Why ``import vllm`` would not be hooked in the process with these facts; empty if it would.

    Args:
        facts: What :mod:`probe` found.
        full: Whether vLLM has been imported there.
    """
    if not facts["armed"]:
        return [_why_not_armed(facts)]
    reasons = []
    if Settings.from_environ(facts["environment"]).disabled:
        reasons.append(f"{DISABLE_ENV_NAME} switches it off")
    if facts["wrapt_error"]:
        reasons.append(f"wrapt can't be imported: {facts['wrapt_error']}")
    elif facts["package_error"]:
        reasons.append(f"altay_kvfix can't be imported: {facts['package_error']}")
    elif full and facts["import_error"]:
        reasons.append(f"vLLM can't be imported: {facts['import_error']}")
    elif full:
        missing = [n for n in vllm_compat.PLANNER_FUNCTIONS if n not in facts["wrapped"]]
        if missing:
            reasons.append(f"vLLM is imported, but not wrapped there: {', '.join(missing)}")
    return reasons


def _why_not_armed(facts: Mapping[str, Any]) -> str:
    version = tuple(facts["version"])
    if version < OLDEST_PYTHON:
        return "Python {}.{} is too old, 3.10 is needed".format(*version)
    if facts["no_site"]:
        return "it was started with -S, which runs no sitecustomize"
    if facts["isolated"]:
        return "it was started with -I, which ignores PYTHONPATH"
    if facts["ignore_environment"]:
        return "it was started with -E, which ignores PYTHONPATH"
    environment = facts["environment"]
    switch = environment.get(DISABLE_ENV_NAME)
    if Settings.from_environ(environment).disabled:
        return f"{DISABLE_ENV_NAME}={switch} switches it off"
    python_path = environment.get("PYTHONPATH")
    if not python_path:
        if facts["variables"] < 3:
            return "its environment is empty, so there is no PYTHONPATH"
        return "PYTHONPATH is not set there"
    entries = python_path.split(os.pathsep)
    if any(_is_ours(entry, facts["directory"]) for entry in entries):
        shadow = facts["sitecustomize"]
        if shadow and not _is_ours(os.path.dirname(shadow), facts["directory"]):
            return f"shadowed by {shadow}, which comes first and does not run ours"
        return "its sitecustomize.py is found, but did not arm it"
    relative = [entry for entry in entries if entry and not os.path.isabs(entry)]
    for entry in relative:
        if str(FOLDER).endswith(os.sep + os.path.normpath(entry)):
            return f"relative path {entry!r} on PYTHONPATH, not found from {facts['directory']}"
    return f"no folder with altay-kvfix is on PYTHONPATH={python_path}"


def _is_ours(entry: str, directory: str) -> bool:
    folder = Path(directory, entry)
    return (folder / "altay_kvfix" / "hook.py").exists() and (folder / "sitecustomize.py").exists()


def vllm_version(folder: Path) -> str | None:
    """Of the vLLM in ``folder``, which is not imported; None where it does not say."""
    try:
        text = (folder / "_version.py").read_text()
    except OSError:
        return None
    found = re.search(r"""^(?:__version__|version)\s*=.*?['"]([^'"]+)['"]""", text, re.MULTILINE)
    return found[1] if found else None


def unknown_planner(folder: Path) -> str | None:
    """Why the planner of the vLLM in ``folder`` can't be hooked, or None. Imports nothing."""
    files = {n: folder.joinpath(*n.split(".")[1:]).with_suffix(".py") for n in PLANNER_MODULES}
    name = next((name for name, file in files.items() if file.exists()), None)
    if name is None:
        return f"there is no module {' or '.join(PLANNER_MODULES)}"
    try:
        tree = ast.parse(files[name].read_text())
    except (OSError, SyntaxError) as error:
        return f"{name} can't be read ({error})"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [f for f in vllm_compat.PLANNER_FUNCTIONS if f not in functions]
    return f"{name} has no {', '.join(missing)}" if missing else None


def settings_in_effect(environ: Mapping[str, str]) -> list[Setting]:
    """Every setting with its value and where that comes from."""
    values = Settings.from_environ(environ)
    malformed = {error.variable for error in values.errors}

    def source(variable: str) -> str:
        if variable in malformed:
            return "malformed"
        return "environment" if environ.get(variable, "").strip() else "default"

    return [
        Setting(field, variable, _shown(getattr(values, field)), source(variable))
        for field, variable in VARIABLES.items()
    ]


def _shown(value: Any) -> str:
    if isinstance(value, settings.Mode):
        return value.value
    if isinstance(value, LayoutPlan):
        return ",".join(map(str, value.family_counts)) + f":{value.group_size}"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def typing_errors(environ: Mapping[str, str]) -> list[str]:
    """Variables that nobody reads, but somebody meant for us."""
    known = list(VARIABLES.values())
    warnings = []
    for name in sorted(set(environ) - set(known)):
        close = difflib.get_close_matches(name.upper(), known, 1, _SIMILAR)
        if not close and name.upper().startswith(_PREFIXES):
            close = difflib.get_close_matches(name.upper(), known, 1, 0)
        if close:
            warnings.append(f"{name} is no setting of altay-kvfix; is {close[0]} meant?")
    return warnings


def _path_warnings(environ: Mapping[str, str]) -> list[str]:
    warnings = []
    for entry in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
        if not _is_ours(entry, os.getcwd()):
            continue
        if not os.path.isabs(entry):
            warnings.append(
                f"the relative path {entry!r} on PYTHONPATH works only for processes started here"
            )
        if not os.path.samefile(entry, FOLDER):
            warnings.append(f"{entry} on PYTHONPATH is another copy than this one, {FOLDER}")
    return warnings


def _ray_warning(interpreters: Sequence[Interpreter]) -> list[str]:
    driver, worker = interpreters[0], interpreters[-1]
    if worker.name == _RAY_WORKER and driver.hooked and worker.facts and not worker.hooked:
        return [
            "Ray's workers have the environment of `ray start`, not the driver's: set PYTHONPATH "
            "there, or in runtime_env"
        ]
    return []


def _idle(values: Settings) -> list[str]:
    if values.mode is settings.Mode.OFF and not values.search:
        return ["both the certified layout and the search are switched off: nothing will change"]
    return []


def _is_correctable(interpreter: Interpreter) -> bool:
    """Whether another PYTHONPATH would help; it does not against flags of the interpreter."""
    facts = interpreter.facts
    if interpreter.hooked or not facts or facts["armed"]:
        return False
    flags = facts["no_site"] or facts["isolated"] or facts["ignore_environment"]
    return not flags and tuple(facts["version"]) >= OLDEST_PYTHON


def corrected_line(environ: Mapping[str, str]) -> str:
    """What to set, so that our sitecustomize.py is the first one and runs the others."""
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [e for e in entries if e and not _is_ours(e, os.getcwd())]
    line = "export PYTHONPATH=" + shlex.quote(python_path_with(FOLDER, os.pathsep.join(others)))
    if Settings.from_environ(environ).disabled:
        return f"unset {DISABLE_ENV_NAME}; {line}"
    return line


# --- for a person ------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    out = console()
    table = new_table("process", "armed", "Python", "why not")
    for entry in report["interpreters"]:
        facts = entry["facts"]
        table.add_row(
            entry["name"],
            "yes" if entry["hooked"] else "NO",
            "{}.{}.{}".format(*facts["version"]) if facts else "",
            "; ".join(entry["reasons"]),
            style=None if entry["hooked"] else "bold red",
        )
    out.print(table)
    out.print()

    vllm = report["vllm"]
    known = "its planner is known" if vllm["planner_known"] else "its planner is NOT known"
    lines = [
        f"altay-kvfix  {report['version']}, {report['folder']}",
        f"vLLM         {vllm['version'] or 'version unknown'}, {known}, {vllm['folder']}"
        if vllm["folder"]
        else "vLLM         not found",
        f"wrapt        {report['wrapt'] or 'not found'}",
    ]
    facts = report["interpreters"][0]["facts"]
    if facts:
        lines.append(f"interpreter  {facts['executable']}")
        lines.append(f"sitecustomize ran first: {facts['sitecustomize'] or 'none'}")
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
    out.print()

    table = new_table("setting", "in effect", "from")
    for row in report["settings"]:
        table.add_row(
            row["variable"],
            row["value"],
            row["source"],
            style="bold red" if row["source"] == "malformed" else None,
        )
    out.print(table)
    out.print()

    for problem in report["problems"]:
        out.print(f"Problem: {problem}", markup=False, soft_wrap=True, style="red")
    for warning in report["warnings"]:
        out.print(f"Warning: {warning}", markup=False, soft_wrap=True)
    if report["corrected"]:
        out.print("To be set where vLLM is started:", soft_wrap=True)
        out.print(f"  {report['corrected']}", markup=False, soft_wrap=True)
        out.print(
            "Or: altay-kvfix run -- vllm serve ...  (behind a tool that puts itself first: "
            "TOOL altay-kvfix run -- vllm serve ...)",
            markup=False,
            soft_wrap=True,
        )
    if report["hooked"]:
        out.print("A vLLM process started here would be hooked.", style="bold green")
    elif all(entry["hooked"] for entry in report["interpreters"]):
        out.print("A vLLM process started here would NOT do what is wanted.", style="bold red")
    else:
        out.print("A vLLM process started here would NOT be hooked.", style="bold red")
