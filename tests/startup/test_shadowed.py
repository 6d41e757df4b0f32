"""The sitecustomize that ours shadows runs as if ours were not there (behaviours 1 to 7)."""

from __future__ import annotations

import compileall
import os
import shutil
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import ARMED, FAKE, Ended, make_folder, run

SAYS_ITS_NAME = "print('ran as', __name__)"


def test_only_the_first_sitecustomize_on_the_path_runs_without_us(
    shadowed: Callable[..., Path],
) -> None:
    first, second = shadowed("print('first')", "first"), shadowed("print('second')", "second")
    assert run("-c", "", path=[first, second]) == Ended("first\n")


def test_runs_once_under_its_own_name(folder: Path, shadowed: Callable[..., Path]) -> None:
    theirs = shadowed(SAYS_ITS_NAME)
    code = "import sys, sitecustomize as s; print(s.__file__, s is sys.modules['sitecustomize'])"
    assert run("-c", code, path=[folder, theirs]) == Ended(
        f"ran as sitecustomize\n{theirs / 'sitecustomize.py'} True\n"
    )
    assert run("-c", ARMED, path=[folder, theirs, FAKE]) == Ended("ran as sitecustomize\n1\n")


def test_in_front_of_us_it_runs_alone(folder: Path, shadowed: Callable[..., Path]) -> None:
    theirs = shadowed(SAYS_ITS_NAME)
    assert run("-c", ARMED, path=[theirs, folder, FAKE]) == Ended("ran as sitecustomize\n0\n")


@pytest.fixture(params=["package", "pyc", "zip"])
def disguised(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A sitecustomize that is no plain source file."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    source = theirs / "sitecustomize.py"
    source.write_text(SAYS_ITS_NAME)
    if request.param == "package":
        (theirs / "sitecustomize").mkdir()
        source.rename(theirs / "sitecustomize" / "__init__.py")
    elif request.param == "pyc":
        compileall.compile_file(source, quiet=1, legacy=True)
        source.unlink()
    else:
        with zipfile.ZipFile(tmp_path / "theirs.zip", "w") as archive:
            archive.write(source, "sitecustomize.py")
        return tmp_path / "theirs.zip"
    return theirs


def test_runs_whatever_it_is_packed_in(folder: Path, disguised: Path) -> None:
    assert run("-c", "", path=[disguised]) == Ended("ran as sitecustomize\n")
    assert run("-c", ARMED, path=[folder, disguised, FAKE]) == Ended("ran as sitecustomize\n1\n")


def test_a_bare_directory_of_that_name_changes_nothing(
    folder: Path, tmp_path: Path, shadowed: Callable[..., Path]
) -> None:
    (tmp_path / "bare" / "sitecustomize").mkdir(parents=True)
    theirs = shadowed(SAYS_ITS_NAME)
    path = [tmp_path / "bare", folder, tmp_path / "bare", theirs, FAKE]
    assert run("-c", ARMED, path=path) == Ended("ran as sitecustomize\n1\n")


@pytest.mark.parametrize("where", ["site-packages", "the standard library's folder"])
def test_an_installed_one_runs(folder: Path, tmp_path: Path, where: str) -> None:
    """conda and Homebrew keep theirs in site-packages, Debian in the standard library's folder."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    [site_packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    path: list[Path] = []
    if where != "site-packages":
        # On Debian it stands behind PYTHONPATH and before site-packages, as this does.
        site_packages = tmp_path / "lib"
        site_packages.mkdir()
        path = [site_packages]
    (site_packages / "sitecustomize.py").write_text(SAYS_ITS_NAME)
    assert run("-c", "", python=python, path=path) == Ended("ran as sitecustomize\n")
    ours = run("-c", ARMED, python=python, path=[folder, *path, FAKE])
    assert ours == Ended("ran as sitecustomize\n1\n")


def test_debians_own_runs(folder: Path, tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if python is None or run("-c", "import sitecustomize", python=python).code:
        pytest.skip("no system Python with a sitecustomize of its own: needs Debian or Ubuntu")
    # Debian's file starts Ubuntu's crash reporter where there is one.
    (tmp_path / "apport_python_hook.py").write_text("def install(): print('reporting')")
    assert run("-c", "", python=python, path=[tmp_path]) == Ended("reporting\n")
    ours = run("-c", ARMED, python=python, path=[folder, tmp_path, FAKE])
    assert ours == Ended("reporting\n1\n")


@pytest.mark.skip(reason="conda and Homebrew have no package for this machine's installers")
def test_condas_and_homebrews_own_run() -> None: ...


def test_what_it_does_to_sys_path_stays_done(folder: Path, shadowed: Callable[..., Path]) -> None:
    theirs = shadowed("import sys; sys.path.insert(1, '/theirs'); sys.path.append('/last')")
    code = "import sys; print([p for p in sys.path if p in ('/theirs', '/last', %r)])"
    # sys.path[0] is put there after sitecustomize has run.
    assert run("-c", code % str(folder), path=[folder, theirs]) == Ended(
        f"['/theirs', {str(folder)!r}, '/last']\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('broken')",
        "raise ImportError('no such thing', name='sitecustomize')",
        "import no_such_module",
        "this is no Python",
    ],
)
def test_if_it_raises_the_message_is_the_same(
    folder: Path, shadowed: Callable[..., Path], code: str
) -> None:
    theirs = shadowed(code)
    alone = run("-c", "print(1)", path=[theirs])
    assert (alone.out, alone.code) == ("1\n", 0)
    assert run("-c", "print(1)", path=[folder, theirs]) == alone
    assert run("-c", ARMED, path=[folder, theirs, FAKE]).out == "1\n"


def test_if_it_exits_so_does_the_interpreter(folder: Path, shadowed: Callable[..., Path]) -> None:
    theirs = shadowed("import sys; sys.exit(7)")
    alone, ours = run("-c", "", path=[theirs]), run("-c", "", path=[folder, theirs])
    assert ours.code == alone.code != 0
    assert ours.out == alone.out == ""
    # CPython shows the frames in between, of which one is ours.
    assert ours.err.splitlines()[-1] == alone.err.splitlines()[-1] == "SystemExit: 7"


@pytest.mark.parametrize("form", ["twice", "trailing slash", "symbolic link", "dotted"])
def test_the_folder_given_more_than_once_arms_once(
    folder: Path, tmp_path: Path, shadowed: Callable[..., Path], form: str
) -> None:
    theirs = shadowed(SAYS_ITS_NAME)
    (tmp_path / "link").symlink_to(folder)
    again = {
        "twice": str(folder),
        "trailing slash": f"{folder}/",
        "symbolic link": str(tmp_path / "link"),
        "dotted": f"{folder}/../{folder.name}",
    }[form]
    for path in ([folder, again, theirs, FAKE], [again, folder, theirs, folder, FAKE]):
        assert run("-c", ARMED, path=path) == Ended("ran as sitecustomize\n1\n")


def test_two_copies_arm_once(folder: Path, tmp_path: Path, shadowed: Callable[..., Path]) -> None:
    copy = make_folder(tmp_path / "copy")
    path = [folder, copy, shadowed(SAYS_ITS_NAME), FAKE]
    assert run("-c", ARMED, path=path) == Ended("ran as sitecustomize\n1\n")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "again",
    [
        "import sitecustomize",
        "import sitecustomize, importlib; importlib.reload(sitecustomize)",
        "import sys; del sys.modules['sitecustomize']; import sitecustomize",
        "import runpy; runpy.run_path({file!r}, run_name='sitecustomize')",
    ],
)
def test_imported_again_arms_once(tmp_path: Path, alone: bool, again: str) -> None:
    folder = make_folder(tmp_path / "folder")
    if not alone:
        (folder / "something_else").mkdir()
    code = f"{again.format(file=str(folder / 'sitecustomize.py'))}; {ARMED}"
    assert run("-c", code, path=[folder, FAKE]) == Ended("1\n")


CHAINS = {
    "takes itself off the path": (
        "import os, sys\n"
        "print('chains')\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['sitecustomize']\n"
        "import sitecustomize\n"
    ),
    "looks everywhere else": (
        "import os, sys\n"
        "from importlib.machinery import PathFinder\n"
        "print('chains')\n"
        "path = [p for p in sys.path if p != os.path.dirname(__file__)]\n"
        "spec = PathFinder.find_spec('sitecustomize', path)\n"
        "spec and spec.loader.load_module('sitecustomize')\n"
    ),
}


@pytest.mark.parametrize("disabled", [False, True], ids=["armed", "disabled"])
@pytest.mark.parametrize("ours_alone", [True, False])
@pytest.mark.parametrize("way", CHAINS)
def test_beside_others_that_chain_each_runs_once(
    tmp_path: Path, shadowed: Callable[..., Path], way: str, ours_alone: bool, disabled: bool
) -> None:
    """They come upon us while we run them, or before we did."""
    folder = make_folder(tmp_path / "folder")
    if not ours_alone:
        (folder / "something_else").mkdir()
    theirs, last = shadowed(CHAINS[way]), shadowed("print('last')", "last")
    env = {"ALTAY_KVFIX_DISABLE": "1"} if disabled else {}
    flags = ("-W", "ignore")  # load_module() is deprecated
    assert run(*flags, "-c", "", path=[theirs, last]) == Ended("chains\nlast\n")
    for path in ([theirs, folder, last, FAKE], [folder, theirs, last, FAKE]):
        ended = run(*flags, "-c", ARMED, path=path, env=env)
        if way == "looks everywhere else" and not ours_alone and path[0] == folder:
            # It is still on the path where it finds us, as what would run next: nothing does.
            assert ended == Ended(f"chains\n{int(not disabled)}\n")
        else:
            assert ended == Ended(f"chains\nlast\n{int(not disabled)}\n")


def test_a_finder_that_leads_back_to_us(
    folder: Path, tmp_path: Path, shadowed: Callable[..., Path]
) -> None:
    """As an editable install of this package puts one on sys.meta_path."""
    venv.create(tmp_path / "venv", with_pip=False)
    [site_packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "editable.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'sitecustomize':\n"
        "            return importlib.util.spec_from_file_location(\n"
        f"                name, {str(folder / 'sitecustomize.py')!r})\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    (site_packages / "editable.pth").write_text("import editable")
    python = tmp_path / "venv" / "bin" / "python"
    for path in ([FAKE], [folder, FAKE]):
        assert run("-c", ARMED, python=python, path=path) == Ended("1\n")
    path = [folder, shadowed(SAYS_ITS_NAME), FAKE]
    assert run("-c", ARMED, python=python, path=path) == Ended("ran as sitecustomize\n1\n")


def test_an_entry_of_sys_path_that_is_no_path_does_no_harm(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    [site_packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "odd.pth").write_text("import sys; sys.path[:0] = [None, b'bytes', 3]")
    python = tmp_path / "venv" / "bin" / "python"
    assert run("-c", ARMED, python=python, path=[folder, FAKE]) == Ended("1\n")


def test_the_caller_starts_interpreters_as_intended() -> None:
    """Nothing of the environment that runs these tests reaches the interpreters they start."""
    variables = run("-c", "import os; print(*sorted(v for v in os.environ if 'PY' in v))")
    assert variables == Ended("\n")
    assert os.path.realpath(sys.executable) == os.path.realpath(
        run("-c", "import sys; print(sys.executable)").out.strip()
    )
