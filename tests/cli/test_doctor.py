from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY, clean_environment

from altay_kvfix.cli import doctor
from altay_kvfix.settings import VARIABLES

pytest.importorskip("vllm", reason="the doctor looks for vLLM: make test installs it")

INTERPRETERS = ["fresh interpreter", "spawned child"]
REPO = str(REPOSITORY)


def reasons(answer):
    """Interpreter -> why it is not hooked."""
    return {i["name"]: "; ".join(i["reasons"]) for i in answer.report["interpreters"]}


# --- armed -------------------------------------------------------------------------------------


def test_hooked(cli):
    answer = cli("doctor", "--json", PYTHONPATH=REPO)
    assert answer.exit_code == 0, answer.stdout
    report = answer.report
    assert report["hooked"] is True
    assert [i["name"] for i in report["interpreters"]] == INTERPRETERS
    assert all(i["hooked"] and i["facts"]["armed"] == [REPO] for i in report["interpreters"])
    assert len({i["facts"]["pid"] for i in report["interpreters"]}) == 2
    assert report["problems"] == report["warnings"] == []
    assert report["corrected"] is None

    import vllm
    import wrapt

    assert report["vllm"]["version"] == vllm.__version__
    assert report["vllm"]["planner_known"] is True
    assert report["wrapt"] == wrapt.__version__


def test_full_imports_vllm_and_finds_its_planner_wrapped(cli):
    answer = cli("doctor", "--json", "--full", PYTHONPATH=REPO)
    assert answer.exit_code == 0, answer.stdout
    wrapped = answer.report["interpreters"][0]["facts"]["wrapped"]
    assert "get_kv_cache_groups" in wrapped


def test_for_a_person(cli):
    answer = cli("doctor", PYTHONPATH=REPO)
    assert "A vLLM process started here would be hooked." in answer.stdout
    for variable in VARIABLES.values():
        assert variable in answer.stdout
    assert "spawned child ..." in answer.stderr


def test_through_run(cli):
    """As behind a tool that sets PYTHONPATH itself."""
    main = [sys.executable, "-m", "altay_kvfix"]
    assert cli("run", "--", *main, "doctor").exit_code == 0


# --- not armed, and why not --------------------------------------------------------------------


def test_no_python_path(cli):
    answer = cli("doctor", "--json")
    assert answer.exit_code == 1
    assert answer.report["hooked"] is False
    assert reasons(answer) == dict.fromkeys(INTERPRETERS, "PYTHONPATH is not set there")
    assert answer.report["corrected"] == f"export PYTHONPATH={REPO}"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_flags(cli, flag):
    answer = cli("doctor", "--json", "--python", f"{sys.executable} {flag}", PYTHONPATH=REPO)
    assert answer.exit_code == 1
    assert all(f"started with {flag}" in reason for reason in reasons(answer).values())
    assert answer.report["corrected"] is None


def test_empty_environment(cli):
    answer = cli("doctor", "--json", "--python", f"env -i {sys.executable}", PYTHONPATH=REPO)
    assert answer.exit_code == 1
    assert "its environment is empty" in reasons(answer)["fresh interpreter"]


def test_child_without_the_environment(cli):
    """What a launcher does that cleans up: the first process is armed, and its child is not."""
    environment = {"variables": 20, "environment": {}, "armed": [], "directory": "/"}
    flags = dict.fromkeys(["no_site", "isolated", "ignore_environment"], False)
    facts = {**environment, **flags, "version": [3, 11, 7], "sitecustomize": None}
    assert doctor.why_not(facts) == ["PYTHONPATH is not set there"]


def test_relative_path(cli, tmp_path):
    answer = cli("doctor", "--json", PYTHONPATH=REPOSITORY.name)
    assert answer.exit_code == 1
    assert f"relative path '{REPOSITORY.name}'" in reasons(answer)["fresh interpreter"]
    assert str(tmp_path) in reasons(answer)["fresh interpreter"]

    answer = cli("doctor", "--json", cwd=REPOSITORY.parent, PYTHONPATH=REPOSITORY.name)
    assert answer.exit_code == 0
    assert any("works only for processes started here" in w for w in answer.report["warnings"])


def test_shadowed(cli, tmp_path):
    """Another tool's sitecustomize comes first and runs no other."""
    shadow = tmp_path / "tool"
    shadow.mkdir()
    (shadow / "sitecustomize.py").write_text("")
    answer = cli("doctor", "--json", PYTHONPATH=f"{shadow}:{REPO}")
    assert answer.exit_code == 1
    assert f"shadowed by {shadow}/sitecustomize.py" in reasons(answer)["fresh interpreter"]

    # The corrected line works, and keeps the tool.
    corrected = answer.report["corrected"]
    assert corrected == f"export PYTHONPATH={REPO}:{shadow}"
    again = cli("doctor", "--json", PYTHONPATH=corrected.removeprefix("export PYTHONPATH="))
    assert again.exit_code == 0


def test_switched_off(cli):
    answer = cli("doctor", "--json", PYTHONPATH=REPO, ALTAY_KVFIX_DISABLE="yes")
    assert answer.exit_code == 1
    assert "ALTAY_KVFIX_DISABLE=yes switches it off" in reasons(answer)["spawned child"]
    assert answer.report["corrected"].startswith("unset ALTAY_KVFIX_DISABLE; ")


def test_python_too_old():
    facts = {"armed": [], "version": [3, 9, 2]}
    assert doctor.why_not(facts) == ["Python 3.9 is too old, 3.10 is needed"]


@pytest.mark.parametrize(
    ("module", "error"), [("raise ImportError('no wrapt')", "no wrapt"), ("1/0", "division")]
)
def test_wrapt_missing_or_broken(cli, tmp_path, module, error):
    (tmp_path / "wrapt.py").write_text(module)
    answer = cli("doctor", "--json", PYTHONPATH=f"{REPO}:{tmp_path}")
    assert answer.exit_code == 1
    assert "wrapt can't be imported" in reasons(answer)["fresh interpreter"]
    assert error in reasons(answer)["fresh interpreter"]


def test_interpreter_that_does_not_answer(cli):
    answer = cli("doctor", "--json", "--python", "false", PYTHONPATH=REPO)
    assert answer.exit_code == 1
    assert "it could not be asked: exit code 1" in reasons(answer)["fresh interpreter"]


def test_no_such_interpreter(cli):
    answer = cli("doctor", "--python", "no-such-python")
    assert answer.exit_code == 2
    assert "no-such-python" in answer.stderr


def test_no_vllm(cli, tmp_path):
    """A virtual environment with nothing in it but wrapt, on PYTHONPATH."""
    import wrapt

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (tmp_path / "wrapt").symlink_to(Path(wrapt.__file__).parent)
    python = venv / "bin" / "python"
    answer = cli("doctor", "--json", "--python", python, PYTHONPATH=f"{REPO}:{tmp_path}")
    assert answer.exit_code == 1
    assert all(i["hooked"] for i in answer.report["interpreters"])
    assert answer.report["problems"] == [f"vLLM is not installed for {python}"]


# --- which interpreter -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        "#!{python} -I\n",
        "#!/usr/bin/env -S {python} -I\n",
        "#!/bin/sh\n'''exec' {python} -I \"$0\" \"$@\"\n",
    ],
)
def test_the_one_of_the_vllm_command(tmp_path, monkeypatch, head):
    script = tmp_path / "vllm"
    script.write_text(head.format(python=sys.executable) + "import vllm\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.default_interpreter() == [sys.executable, "-I"]


def test_this_one_without_a_vllm_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.default_interpreter() == [sys.executable]


# --- Ray ---------------------------------------------------------------------------------------

# What of Ray's interface is used, with a worker whose environment is not the driver's.
STAND_IN = """
import json, os, pickle, subprocess, sys, textwrap, inspect

def init(**options):
    pass

def shutdown():
    pass

def remote(**options):
    class Task:
        def __init__(self, function):
            self.function = function
        def remote(self, text, values):
            worker = dict(os.environ, PYTHONPATH=os.environ.get("WORKER_PYTHONPATH", ""))
            values = dict(values, OUT=values["OUT"] + "-worker")
            code = "exec(%r, %r)" % (text, values)
            subprocess.run([sys.executable, "-c", code], env=worker, check=True)
            with open(values["OUT"]) as file:
                return file.read()
    return Task

def get(value):
    return value
"""


@pytest.mark.parametrize("reaches", [True, False])
def test_ray_worker(cli, tmp_path, reaches):
    (tmp_path / "ray.py").write_text(STAND_IN)
    answer = cli(
        *("doctor", "--json"),
        PYTHONPATH=f"{REPO}:{tmp_path}",
        WORKER_PYTHONPATH=REPO if reaches else "",
    )
    assert answer.exit_code == (0 if reaches else 1)
    worker = answer.report["interpreters"][2]
    assert (worker["name"], worker["hooked"]) == ("Ray worker", reaches)
    if not reaches:
        assert worker["reasons"] == ["PYTHONPATH is not set there"]
        assert "ray start" in answer.report["warnings"][0]


def test_no_ray_worker_where_it_is_not_wanted(cli, tmp_path):
    (tmp_path / "ray.py").write_text(STAND_IN)
    answer = cli("doctor", "--json", "--no-ray", PYTHONPATH=f"{REPO}:{tmp_path}")
    assert [i["name"] for i in answer.report["interpreters"]] == INTERPRETERS


# --- settings ----------------------------------------------------------------------------------


def test_every_setting_with_its_source(cli):
    report = cli(
        *("doctor", "--json"),
        PYTHONPATH=REPO,
        RADIANCE_KV_GROUP_MAX_GROUPS="1",
        ALTAY_KVFIX_GROUP_COST="0",
        ZENIT_ALTAY_KV_LAYOUT=" Strict ",
    ).report
    found = {s["variable"]: (s["value"], s["source"]) for s in report["settings"]}
    assert list(found) == list(VARIABLES.values())
    assert found["RADIANCE_KV_GROUP_MAX_GROUPS"] == ("1", "environment")
    assert found["ALTAY_KVFIX_GROUP_COST"] == ("0.0", "environment")
    assert found["ZENIT_ALTAY_KV_LAYOUT"] == ("required", "environment")
    assert found["ALTAY_KVFIX_FAMILY_COUNTS"] == ("16,54:8", "default")
    assert found["RADIANCE_KV_GROUP_OPT"] == ("yes", "default")


def test_malformed_value(cli):
    answer = cli("doctor", PYTHONPATH=REPO, RADIANCE_KV_GROUP_SIZE="x")
    assert answer.exit_code == 1
    assert "RADIANCE_KV_GROUP_SIZE='x' is not valid; allowed: a whole number >= 1" in answer.stdout
    assert "would NOT do what is wanted" in answer.stdout


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RADIANCE_KV_GROUPSIZE", "RADIANCE_KV_GROUP_SIZE"),
        ("ALTAY_KVFIX_DISABLED", "ALTAY_KVFIX_DISABLE"),
        ("ALTAYKVFIX_DISABLE", "ALTAY_KVFIX_DISABLE"),
        ("ZENIT_ALTAY_KV_LAYOT", "ZENIT_ALTAY_KV_LAYOUT"),
        ("altay_kvfix_group_cost", "ALTAY_KVFIX_GROUP_COST"),
        ("ALTAY_KVFIX_TRACE", None),
    ],
)
def test_typing_errors(name, meant):
    (warning,) = doctor.typing_errors({name: "1"})
    assert warning.startswith(f"{name} is no setting of altay-kvfix")
    assert meant is None or f"is {meant} meant?" in warning


def test_others_variables_are_none_of_our_business():
    others = {"VLLM_LOGGING_LEVEL", "PATH", "RADIANCE_HOME", "KV_GROUP", "LAYOUT"}
    known = dict.fromkeys(VARIABLES.values(), "1")
    assert doctor.typing_errors(dict.fromkeys(others, "1") | known) == []


def test_nothing_left_to_do(cli):
    off = {"ZENIT_ALTAY_KV_LAYOUT": "off", "RADIANCE_KV_GROUP_OPT": "0"}
    answer = cli("doctor", PYTHONPATH=REPO, **off)
    assert answer.exit_code == 0
    assert "nothing will change" in answer.stdout


def test_secrets_stay_where_they_are(cli):
    answer = cli("doctor", "--json", PYTHONPATH=REPO, API_KEY="very-secret")
    assert "very-secret" not in answer.stdout


# --- vLLM --------------------------------------------------------------------------------------


def fake_vllm(tmp_path: Path, planner: str | None) -> Path:
    core = tmp_path / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    for folder in (core, core.parent, core.parent.parent):
        (folder / "__init__.py").write_text("")
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '9.9.9'\n")
    if planner is not None:
        (core / "kv_cache_utils.py").write_text(planner)
    return tmp_path / "vllm"


@pytest.mark.parametrize("planner", [None, "def get_kv_cache_configs(): pass\n", "nonsense("])
def test_unknown_planner(cli, tmp_path, planner):
    fake_vllm(tmp_path, planner)
    answer = cli("doctor", "--json", PYTHONPATH=f"{REPO}:{tmp_path}")
    assert answer.exit_code == 1
    vllm = answer.report["vllm"]
    assert (vllm["version"], vllm["planner_known"]) == ("9.9.9", False)
    assert "this vLLM's planner is not known" in answer.report["problems"][0]


def test_another_copy_on_python_path(tmp_path, monkeypatch):
    (tmp_path / "altay_kvfix").mkdir()
    for name in ("altay_kvfix/hook.py", "sitecustomize.py"):
        (tmp_path / name).write_text("")
    warnings = doctor._path_warnings({"PYTHONPATH": str(tmp_path)})
    assert warnings == [f"{tmp_path} on PYTHONPATH is another copy than this one, {REPO}"]
    assert clean_environment().get("PYTHONPATH") is None
