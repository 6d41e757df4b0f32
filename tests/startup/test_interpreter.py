"""Every mode of the interpreter, and every interpreter (behaviours 8 to 16)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import ARMED, FAKE, HOOKED, ONCE, ROOT, Ended, make_folder, run

ARMED_WITHOUT_PATH = (
    "import sys; print(sum(hasattr(finder, 'altay_kvfix') for finder in sys.meta_path))"
)


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_modes_that_leave_us_out(folder: Path, flag: str) -> None:
    assert run("-c", ARMED_WITHOUT_PATH, path=[folder]) == Ended("1\n")
    assert run(flag, "-c", ARMED_WITHOUT_PATH, path=[folder]) == Ended("0\n")


@pytest.mark.parametrize(
    "flags",
    [["-s"], ["-O"], ["-OO"], ["-B"], ["-bb"], ["-X", "dev"], ["-W", "error"], ["-u"], ["-q"]]
    + [["-P"]] * (sys.version_info >= (3, 11)),
    ids=" ".join,
)
def test_modes_that_change_nothing(folder: Path, flags: list[str]) -> None:
    assert run(*flags, "-c", ARMED, path=[folder, FAKE]) == Ended("1\n")


@pytest.mark.parametrize("flags", [["-OO"], ["-bb"]], ids=" ".join)
def test_modes_in_which_vllm_is_hooked_too(folder: Path, flags: list[str]) -> None:
    assert run(*flags, "-c", HOOKED, path=[folder, FAKE]) == Ended(ONCE)


def test_nothing_warns_when_vllm_is_imported(folder: Path) -> None:
    flags = ("-X", "dev", "-W", "error")
    code = "import sys, probe; print(probe.hooks())"
    assert run(*flags, "-c", code, path=[folder, FAKE]) == Ended(ONCE)


# --- standard streams ----------------------------------------------------------------------------


@pytest.mark.parametrize("redirected", ["2>&-", "1>&-", "<&-", "2>&- <&-"])
def test_closed_streams(folder: Path, tmp_path: Path, redirected: str) -> None:
    code = f"{ARMED.replace('print', 'result = ')}; open('result', 'w').write(str(result))"
    shell = f'exec "$0" -c "$1" {redirected}'
    ended = run(
        "sh", "-c", shell, sys.executable, code, python=None, path=[folder, FAKE], cwd=tmp_path
    )
    assert ended == Ended("")
    assert (tmp_path / "result").read_text() == "1"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing(folder: Path, tmp_path: Path, redirected: str) -> None:
    """Not even where there is something to say: wrapt is broken, and altay_kvfix itself."""
    for broken in ("wrapt", "altay_kvfix"):
        (tmp_path / broken).mkdir()
        (tmp_path / broken / broken).with_suffix(".py").write_text("raise RuntimeError('broken')")
        shell = f'exec "$0" -c "$1" {redirected}'
        path = [folder, tmp_path / broken, FAKE]
        code = "import vllm; print(vllm.__version__)"
        ended = run("sh", "-c", shell, sys.executable, code, python=None, path=path)
        assert ended.out == "0.32.0\n"


def test_no_argv_at_start_up(folder: Path, shadowed: Callable[..., Path]) -> None:
    """Python sets sys.argv late, and an application that embeds it may not set it at all."""
    theirs = shadowed("import sys; print(hasattr(sys, 'argv'))")
    alone = run("-c", "", path=[theirs])
    assert run("-c", "", path=[folder, theirs]) == alone
    without = shadowed("import sys; vars(sys).pop('argv', None)", "without")
    assert run("-c", ARMED, path=[without, folder, FAKE]).err == ""
    assert run("-c", ARMED, path=[folder, without, FAKE]) == Ended("1\n")


# --- sys.path ------------------------------------------------------------------------------------

SYS_PATH = "import sys; print(*sys.path, sep='\\n')"


@pytest.mark.parametrize("ours_alone", [True, False])
@pytest.mark.parametrize(
    "parts", ["{}:/a:/b", ":{}:/a", "/a:{}:", "/a::{}:/b", "/a:rel:{}", "{}", "/a:.:{}", "::{}::"]
)
def test_parts_of_pythonpath_are_kept(tmp_path: Path, parts: str, ours_alone: bool) -> None:
    """All of them in their order, the working directory where it was, ours at the end."""
    folder, empty = make_folder(tmp_path / "folder"), tmp_path / "empty"
    empty.mkdir()
    if not ours_alone:
        (folder / "something_else").mkdir()

    def sys_path(first: Path) -> list[str]:
        ended = run("-c", SYS_PATH, env={"PYTHONPATH": parts.format(first)}, cwd=tmp_path)
        assert (ended.err, ended.code) == ("", 0)
        return ended.out.splitlines()

    without_us, with_us = sys_path(empty), sys_path(folder)
    kept = [entry for entry in without_us if entry != str(empty)]
    if ours_alone:
        assert with_us == [*kept, str(folder)]
    else:
        assert with_us == [str(folder) if p == str(empty) else p for p in without_us]


@pytest.mark.parametrize("relative", [".", "", "../folder"])
def test_started_in_the_folder_itself(tmp_path: Path, relative: str) -> None:
    folder = make_folder(tmp_path / "folder")
    path = {"PYTHONPATH": f"{relative}:{FAKE}"}
    assert run("-c", HOOKED, env=path, cwd=folder) == Ended(ONCE)


def test_in_a_folder_shared_with_others_we_stay_where_we_were_put(tmp_path: Path) -> None:
    """Whoever put our files among theirs wants theirs to be found first."""
    folder = make_folder(tmp_path / "folder")
    (folder / "theirs.py").write_text("name = 'beside us'")
    (tmp_path / "container").mkdir()
    (tmp_path / "container" / "theirs.py").write_text("name = 'the container'")
    path = [folder, tmp_path / "container"]
    assert run("-c", "import theirs; print(theirs.name)", path=path) == Ended("beside us\n")


def test_a_wheel_works_as_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder")
    wheel = shutil.make_archive(str(tmp_path / "kvfix"), "zip", folder)
    assert run("-c", HOOKED, path=[wheel, FAKE]) == Ended(ONCE)


# --- what other programs read --------------------------------------------------------------------


def test_the_checkout_itself_is_a_folder() -> None:
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    assert run("-c", HOOKED, path=[ROOT, FAKE], env=env) == Ended(ONCE)


@pytest.mark.parametrize("code", ["print(1)", "import json; print(json.dumps({}))"])
def test_output_is_byte_identical(folder: Path, code: str) -> None:
    assert run("-c", code, path=[folder]) == run("-c", code) != Ended("")


def test_output_of_pip_is_identical(folder: Path) -> None:
    if run("-m", "pip", "--version").code:
        pytest.skip("this environment has no pip")
    for arguments in (["--version"], ["list", "--format=json", "--disable-pip-version-check"]):
        assert run("-m", "pip", *arguments, path=[folder]) == run("-m", "pip", *arguments)


def test_output_of_cmakes_probe_is_identical(folder: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.15)\nproject(probe NONE)\n"
        "find_package(Python REQUIRED COMPONENTS Interpreter)\n"
        "message(STATUS ${Python_VERSION} ${Python_SITELIB} ${Python_INTERPRETER_ID})\n"
    )

    def probe(*path: Path) -> Ended:
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        command = ["cmake", "-B", tmp_path / "build", "-S", tmp_path]
        return run(*command, f"-DPython_EXECUTABLE={sys.executable}", python=None, path=path)

    without_us = probe()
    assert f"Found Python: {sys.executable}" in without_us.out
    # The first run of cmake may take measurable time, which it reports.
    assert _without_times(probe(folder)) == _without_times(without_us)


def _without_times(ended: Ended) -> list[str]:
    return [line for line in ended.out.splitlines() if not line.endswith("s)")]


# --- files, rights, side effects -----------------------------------------------------------------


def test_start_up_writes_and_loads_nothing(tmp_path: Path) -> None:
    """No module but sitecustomize, no file (not even bytecode where that is off), no thread."""
    folder, empty = make_folder(tmp_path / "folder"), tmp_path / "empty"
    empty.mkdir()
    (empty / "sitecustomize.py").write_text("")
    code = (
        "import sys; modules = sorted(sys.modules); import _thread, os; "
        "print(modules, _thread._count(), len(os.listdir('/proc/self/task')), "
        "len(os.listdir('/proc/self/fd')))"
    )
    before = sorted(tmp_path.rglob("*"))
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    without = run("-c", code, env=env)
    with_us = run("-c", code, path=[folder], env=env, cwd=tmp_path)
    assert with_us == run("-c", code, path=[empty], env=env, cwd=tmp_path)
    modules, modules_with_us = (ended.out.partition("]")[0] for ended in (without, with_us))
    if "sitecustomize" not in modules:
        modules_with_us = modules_with_us.replace(", 'sitecustomize'", "")
    assert modules_with_us == modules
    assert sorted(tmp_path.rglob("*")) == before


def test_start_up_reaches_for_nothing(tmp_path: Path) -> None:
    """Seen by an audit hook of the interpreter's own: what is opened, connected and started."""
    folder = make_folder(tmp_path / "folder")
    venv_python = _venv_with_audit(tmp_path)
    ended = run("-c", "", python=venv_python, path=[folder], env={"PYTHONDONTWRITEBYTECODE": "1"})
    events = [line.split(" ", 1) for line in ended.err.splitlines()]
    assert {event for event, _ in events} <= {"open", "os.listdir", "import", "exec", "compile"}
    opened = {what for event, what in events if event == "open" and str(folder) in what}
    assert {Path(what).name for what in opened} <= {
        "sitecustomize.py",
        f"sitecustomize.{sys.implementation.cache_tag}.pyc",
    }


def _venv_with_audit(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    [site_packages] = (tmp_path / "v" / "lib").glob("python*/site-packages")
    watched = ("open", "os.listdir", "socket", "subprocess", "os.", "_thread", "shutil", "import")
    (site_packages / "audit.pth").write_text(
        "import sys; sys.addaudithook(lambda event, args: "
        f"event.startswith({watched!r}) and print(event, args and args[0], file=sys.stderr))"
    )
    return tmp_path / "v" / "bin" / "python"


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_the_off_switch_leaves_the_import_system_untouched(
    folder: Path, shadowed: Callable[..., Path], value: str
) -> None:
    theirs = shadowed("print('ran')")
    code = "import sys; print(sys.meta_path); " + HOOKED
    switched_off = run("-c", code, path=[folder, theirs, FAKE], env={"ALTAY_KVFIX_DISABLE": value})
    without_us = run("-c", code, path=[theirs, FAKE])
    assert _without_addresses(switched_off) == _without_addresses(without_us)
    assert "[0, 0, 0]" in without_us.out


def _without_addresses(ended: Ended) -> str:
    return ended.out.partition("0x")[0] + ended.err


def test_switched_off_between_start_up_and_import(folder: Path) -> None:
    code = (
        f"import os, sys; os.environ['ALTAY_KVFIX_DISABLE'] = '1'; {HOOKED}; "
        "print('altay_kvfix' in sys.modules)"
    )
    assert run("-c", code, path=[folder, FAKE]) == Ended("[0, 0, 0]\nFalse\n")


def test_a_folder_nobody_can_write_to(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(folder.rglob("*"))
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root can write everywhere, and setpriv is not installed")
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents:
            if parent.owner() == "root" and parent != Path("/tmp") and "pytest" in parent.name:
                parent.chmod(0o755)
        anybody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        code = ARMED_WITHOUT_PATH
        python = shutil.which("python3", path="/usr/bin") or sys.executable
        ended = run(*anybody, python, "-c", code, python=None, path=[folder])
    else:
        ended = run("-c", ARMED_WITHOUT_PATH, path=[folder])
    assert ended == Ended("1\n")
    assert sorted(folder.rglob("*")) == before


# --- other Pythons -------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """An installed interpreter of that version: on PATH, or kept by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}")]
    found += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
    check = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        if run("-c", check, python=python).out == version:
            return python
    return None


@pytest.fixture(params=["2.7", "3.6", "3.7", "3.8", "3.9"])
def old_python(request: pytest.FixtureRequest) -> str:
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} here")
    return python


@pytest.fixture(params=["3.10", "3.11", "3.12", "3.13", "3.14"])
def new_python(request: pytest.FixtureRequest) -> str:
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} here")
    return python


def test_an_old_python_is_left_alone(folder: Path, old_python: str) -> None:
    code = "import sys; sys.stdout.write('%r\\n' % sys.meta_path)"
    expected = run("-c", code, python=old_python)
    # A Python this old has no better way to show a finder than by its address.
    assert _without_addresses(run("-c", code, python=old_python, path=[folder])) == (
        _without_addresses(expected)
    )
    assert run("-c", "print(1)", python=old_python, path=[folder]) == Ended("1\n")


def test_an_old_python_still_runs_what_we_shadow(
    folder: Path, old_python: str, shadowed: Callable[..., Path]
) -> None:
    if old_python == find_python("2.7"):
        pytest.skip("on Python 2.7 the hook does nothing at all")
    theirs = shadowed("import sys; sys.stdout.write('ran as %s\\n' % __name__)")
    assert run("-c", "", python=old_python, path=[theirs]) == Ended("ran as sitecustomize\n")
    assert run("-c", "", python=old_python, path=[folder, theirs]) == Ended(
        "ran as sitecustomize\n"
    )


def test_a_new_python_is_armed(folder: Path, new_python: str) -> None:
    assert run("-c", ARMED, python=new_python, path=[folder, FAKE]) == Ended("1\n")


def test_a_new_python_is_hooked(folder: Path, new_python: str, pure_wrapt: Path) -> None:
    path = [folder, FAKE, pure_wrapt]
    assert run("-c", HOOKED, python=new_python, path=path) == Ended(ONCE)
