"""What a person with a foot in the same container can't do through us."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from interpreters import COMPACT, FAKE, Ended, run

from altay_kvfix import settings

PLAN = "import probe; print(probe.plan())"


def traced(folder: Path, trace: Path | str, **env: str) -> Ended:
    variables = {"ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH": str(trace)}
    return run("-c", PLAN, path=[folder, FAKE], env=variables | env)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_new_trace_is_for_its_owner_alone(folder: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert traced(folder, tmp_path / "trace") == Ended(COMPACT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_a_trace_that_is_there_is_appended_to_as_it_is(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("{}\n")
    trace.chmod(0o640)
    assert traced(folder, trace) == traced(folder, trace) == Ended(COMPACT)
    assert stat.S_IMODE(trace.stat().st_mode) == 0o640
    events = [json.loads(line).get("event") for line in trace.read_text().splitlines()]
    assert events == [None, *["install_new", "top_level_active"] * 2]


@pytest.mark.parametrize("target", ["there", "missing"])
def test_a_trace_is_not_written_through_a_symbolic_link(
    folder: Path, tmp_path: Path, target: str
) -> None:
    victim = tmp_path / "victim"
    if target == "there":
        victim.write_text("precious")
    (tmp_path / "trace").symlink_to(victim)
    ended = traced(folder, tmp_path / "trace")
    assert (ended.out, ended.code) == (COMPACT, 0)
    [line] = ended.err.splitlines()
    assert line.startswith("altay-kvfix: the trace can't be written: ")
    assert (victim.read_text() if victim.exists() else None) == (
        "precious" if target == "there" else None
    )


def test_a_pipe_nobody_reads_does_not_hang_the_engine(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    ended = traced(folder, tmp_path / "trace")
    assert (ended.out, ended.code) == (COMPACT, 0)
    assert len(ended.err.splitlines()) == 1


BAIT = "open('read', 'w').write('read'); raise SystemExit('code of the working directory was run')"


def test_nothing_is_read_from_the_working_directory(folder: Path, tmp_path: Path) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    for name in ("sitecustomize", "wrapt", "altay_kvfix", "vllm", "json", "dataclasses"):
        (work / f"{name}.py").write_text(BAIT)
    for name in ("pyproject.toml", "altay_kvfix.cfg", ".env", "altay_kvfix.json"):
        (work / name).write_text("ZENIT_ALTAY_KV_LAYOUT=off")
    # A script's own folder is where Python looks first, not the working directory.
    (elsewhere / "script.py").write_text(PLAN)
    assert run(elsewhere / "script.py", path=[folder, FAKE], cwd=work) == Ended(COMPACT)
    assert not (work / "read").exists()
    premise = run("-c", "import wrapt", path=[folder, FAKE], cwd=work)
    assert "code of the working directory was run" in premise.err


SETTINGS = [value for name, value in vars(settings).items() if name.endswith("_ENV_NAME")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_is_evaluated(folder: Path, tmp_path: Path, setting: str) -> None:
    done = tmp_path / "done"
    values = [
        f"__import__('os').mkdir({str(done)!r})",
        f"[os.mkdir({str(done)!r}) for os in [__import__('os')]][0]",
        f"$(mkdir {done})",
        f"`mkdir {done}`",
        f"!!python/object/apply:os.mkdir [{done}]",
    ]
    for value in values:
        run("-c", PLAN, path=[folder, FAKE], env={setting: value})
        assert not done.exists()
