"""Other software that lives in every process, and every wrapt (behaviours 30 to 33)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import (
    COMPACT,
    FAKE,
    HOOKED,
    NATIVE,
    NOT_ACTIVE,
    NOT_HOOKED,
    ONCE,
    ROOT,
    Ended,
    installed,
    pip_install,
    run,
)

REQUIRED = {"ZENIT_ALTAY_KV_LAYOUT": "required"}
PLAN = "import probe; print(probe.plan())"

# Nothing of what they collect is sent anywhere.
DDTRACE = {
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_STARTUP_LOGS": "false",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:1",
    # It patches parts of vLLM that the stand-in does not have.
    "DD_TRACE_VLLM_ENABLED": "false",
}
OPENTELEMETRY = {f"OTEL_{what}_EXPORTER": "none" for what in ("TRACES", "METRICS", "LOGS")}
ELASTIC = {"ELASTIC_APM_ENABLED": "false"}


def site_packages(python: Path) -> Path:
    [folder] = python.parent.parent.joinpath("lib").glob("python*/site-packages")
    return folder


def launched(peers: Path, launcher: str, code: str, path: list[Path], env: dict[str, str]) -> Ended:
    """Run code through one of the peers' own commands, such as ``ddtrace-run``."""
    command, *arguments = launcher.split()
    return run(
        peers.with_name(command), *arguments, peers, "-c", code, python=None, path=path, env=env
    )


# --- tracers -------------------------------------------------------------------------------------

DDTRACE_WORKS = "import sqlite3; print(getattr(sqlite3, '_datadog_patch', False)); "


@pytest.mark.parametrize("order", ["ours first", "theirs first", "their command"])
def test_ddtrace(folder: Path, peers: Path, order: str) -> None:
    code, bootstrap = DDTRACE_WORKS + HOOKED, site_packages(peers) / "ddtrace" / "bootstrap"
    alone = run("-c", code, python=peers, path=[bootstrap, FAKE], env=DDTRACE)
    assert alone == Ended("True\n" + NOT_HOOKED)
    if order == "their command":
        ended = launched(peers, "ddtrace-run", code, [folder, FAKE], DDTRACE)
    else:
        both = [folder, bootstrap] if order == "ours first" else [bootstrap, folder]
        ended = run("-c", code, python=peers, path=[*both, FAKE], env=DDTRACE)
    assert ended == Ended("True\n" + ONCE)


@pytest.mark.parametrize("when", ["before", "after"])
def test_ddtrace_imported_by_the_program(folder: Path, peers: Path, when: str) -> None:
    steps = ["import ddtrace.auto", HOOKED]
    code = "; ".join(steps if when == "before" else ["import vllm", *steps])
    assert run("-c", code, python=peers, path=[folder, FAKE], env=DDTRACE) == Ended(ONCE)
    again = f"{code}; import importlib, sys; importlib.reload(sys.modules[probe.PLANNER]); {HOOKED}"
    assert run("-c", again, python=peers, path=[folder, FAKE], env=DDTRACE) == Ended(ONCE * 2)


NEWRELIC_WORKS = "import sqlite3; print('newrelic' in type(sqlite3.connect).__module__); "


@pytest.mark.parametrize("order", ["ours first", "theirs first", "their command"])
def test_newrelic(folder: Path, peers: Path, order: str) -> None:
    code, bootstrap = NEWRELIC_WORKS + HOOKED, site_packages(peers) / "newrelic" / "bootstrap"
    env = {"NEW_RELIC_DEVELOPER_MODE": "true", "NEW_RELIC_LOG_LEVEL": "error"}
    started_by_hand = env | {
        "NEW_RELIC_PYTHON_PREFIX": str(peers.parent.parent),
        "NEW_RELIC_PYTHON_VERSION": "{}.{}".format(*sys.version_info),
    }
    alone = run("-c", code, python=peers, path=[bootstrap, FAKE], env=started_by_hand)
    assert alone == Ended("True\n" + NOT_HOOKED)
    if order == "their command":
        ended = launched(peers, "newrelic-admin run-program", code, [folder, FAKE], env)
    else:
        both = [folder, bootstrap] if order == "ours first" else [bootstrap, folder]
        ended = run("-c", code, python=peers, path=[*both, FAKE], env=started_by_hand)
    assert ended == Ended("True\n" + ONCE)


@pytest.mark.parametrize(
    ("launcher", "bootstrap", "env"),
    [
        (
            "opentelemetry-instrument",
            "opentelemetry/instrumentation/auto_instrumentation",
            OPENTELEMETRY,
        ),
        ("elasticapm-run", "elasticapm/instrumentation/wrapper", ELASTIC),
    ],
)
def test_a_bootstrap_that_does_not_chain(
    folder: Path, peers: Path, launcher: str, bootstrap: str, env: dict[str, str]
) -> None:
    """It stands in front and runs alone: nothing of ours is there. Behind us, both run."""
    code = HOOKED + "; import sys; print(sys.modules['sitecustomize'].__file__)"
    theirs = site_packages(peers) / bootstrap
    alone = f"{NOT_HOOKED}{theirs / 'sitecustomize.py'}\n"
    assert launched(peers, launcher, code, [FAKE], env) == Ended(alone)
    assert launched(peers, launcher, code, [folder, FAKE], env) == Ended(alone)
    # What the doctor command advises: the launcher's folder on PYTHONPATH, behind ours.
    ended = run("-c", code, python=peers, path=[folder, theirs, FAKE], env=env)
    assert ended == Ended(f"{ONCE}{theirs / 'sitecustomize.py'}\n")


def test_coverage_measures_every_process(folder: Path, peers: Path, tmp_path: Path) -> None:
    settings = tmp_path / "coverage.cfg"
    settings.write_text(f"[run]\nparallel = true\ndata_file = {tmp_path}/data\n")
    [pth] = site_packages(peers).glob("*coverage*.pth")
    assert "process_startup" in pth.read_text()
    env = {"COVERAGE_PROCESS_START": str(settings)}
    assert run("-c", HOOKED, python=peers, path=[folder, FAKE], env=env) == Ended(ONCE)
    assert len(list(tmp_path.glob("data.*"))) == 1


def test_output_of_uv_is_identical(folder: Path, peers: Path) -> None:
    for arguments in (("pip", "list"), ("python", "find", str(peers))):
        command = [peers.with_name("uv"), *arguments, "--no-config"]
        env = {"VIRTUAL_ENV": str(peers.parent.parent), "UV_NO_CACHE": "1", "UV_OFFLINE": "1"}
        without_us = run(*command, python=None, env=env)
        assert without_us.code == 0
        assert run(*command, python=None, path=[folder], env=env) == without_us


# --- wrapt ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["1.16.0", "1.17.3", "2.0.1", "newest"])
def any_wrapt(request: pytest.FixtureRequest) -> Path:
    wanted = "wrapt" if request.param == "newest" else f"wrapt=={request.param}"
    return installed(f"wrapt-{request.param}", "--no-deps", wanted)


def test_every_wrapt_works(folder: Path, bare: Path, any_wrapt: Path) -> None:
    code = f"{HOOKED}; {PLAN}; import wrapt; print(wrapt.__file__)"
    expected = f"{ONCE}{COMPACT}{any_wrapt / 'wrapt' / '__init__.py'}\n"
    assert run("-c", code, python=bare, path=[folder, FAKE, any_wrapt]) == Ended(expected)


def test_every_wrapt_works_without_the_start_up_hook(
    folder: Path, bare: Path, any_wrapt: Path, tmp_path: Path
) -> None:
    (tmp_path / "altay_kvfix").symlink_to(folder / "altay_kvfix")
    install = "import altay_kvfix as a; print(a.install_altay72_compact_kv_layout())"
    for code in (f"{install}; {HOOKED}; {PLAN}", f"import vllm; {install}; {HOOKED}; {PLAN}"):
        ended = run("-c", code, python=bare, path=[tmp_path, FAKE, any_wrapt])
        assert ended == Ended("True\n" + ONCE + COMPACT)


def test_every_wrapt_reloads_and_pickles(folder: Path, bare: Path, any_wrapt: Path) -> None:
    code = (
        f"import importlib, pickle, sys; {HOOKED}; "
        f"planner = importlib.reload(sys.modules[probe.PLANNER]); {HOOKED}; "
        "f = planner.get_kv_cache_groups; print(pickle.loads(pickle.dumps(f)) is f)"
    )
    ended = run("-c", code, python=bare, path=[folder, FAKE, any_wrapt])
    assert ended == Ended(ONCE * 2 + "True\n")


@pytest.mark.parametrize("order", ["before us", "after us"])
def test_somebody_elses_wrapt_hook_on_the_same_modules(
    folder: Path, bare: Path, any_wrapt: Path, order: str
) -> None:
    register = (
        "import wrapt; [wrapt.register_post_import_hook(lambda m: print('theirs', m.__name__), n) "
        "for n in ('vllm', 'vllm.v1.core.kv_cache_utils')]"
    )
    if order == "after us":
        register = f"import altay_kvfix.hook; {register}"
    ended = run("-c", f"{register}; {HOOKED}", python=bare, path=[folder, FAKE, any_wrapt])
    assert ended == Ended(f"theirs vllm\ntheirs vllm.v1.core.kv_cache_utils\n{ONCE}")


@pytest.mark.parametrize("wrapt", [None, "raise RuntimeError('broken')", "import 3", ""])
def test_wrapt_missing_or_broken(
    folder: Path, bare: Path, tmp_path: Path, wrapt: str | None
) -> None:
    if wrapt is not None:
        (tmp_path / "wrapt.py").write_text(wrapt)
    path = [folder, tmp_path, FAKE]
    ended = run("-c", PLAN, python=bare, path=path)
    assert (ended.out, ended.code) == (NATIVE, 0)
    [line] = ended.err.splitlines()
    assert line.startswith(NOT_ACTIVE + "wrapt can't be used (")
    refused = run("-c", PLAN, python=bare, path=path, env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert "=required, but wrapt can't be used (" in refused.err.splitlines()[-1]


# --- the installed folder ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a Dockerfile installs it: a wheel, and wrapt, in one folder."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in ("altay_kvfix", "sitecustomize.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    pip_install(folder, f"--target={folder}", str(source))
    return folder


def test_the_containers_wrapt_is_used_not_ours(bare: Path, target: Path, tmp_path: Path) -> None:
    older = installed("wrapt-1.16.0", "--no-deps", "wrapt==1.16.0")
    # The premise: our folder comes first and holds a newer one.
    code = "import wrapt; print(wrapt.__version__ != '1.16.0')"
    assert run("-S", "-c", code, python=bare, path=[target, older]) == Ended("True\n")
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (site_packages(python) / "wrapt.pth").write_text(str(older))
    code = f"{HOOKED}; import wrapt; print(wrapt.__version__)"
    assert run("-c", code, python=python, path=[target, FAKE]) == Ended(ONCE + "1.16.0\n")
    # Where the container has none, ours is there.
    assert run("-c", HOOKED, python=bare, path=[target, FAKE]) == Ended(ONCE)


def test_nothing_in_the_installed_folder_shadows_the_container(
    bare: Path, target: Path, tmp_path: Path
) -> None:
    importable = {path.stem for path in target.iterdir() if path.stem.isidentifier()}
    assert importable - {"__pycache__", "bin"} == {"altay_kvfix", "wrapt", "sitecustomize"}
    for name in ("altay_kvfix", "wrapt"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("print('ran')")
    code = "import altay_kvfix, wrapt; print(altay_kvfix.__file__, wrapt.__file__)"
    assert run("-c", code, python=bare, path=[target, tmp_path]) == Ended(
        f"ran\n{tmp_path / 'altay_kvfix.py'} {tmp_path / 'wrapt.py'}\n"
    )
