"""The import of vLLM and of its planner, in whatever way it happens (behaviours 22 to 29)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
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
    Ended,
    make_folder,
    pip_install,
    run,
)

REQUIRED = {"ZENIT_ALTAY_KV_LAYOUT": "required"}
PLANNER = "vllm.v1.core.kv_cache_utils"
NO_PLANNER = f"there is no module vllm.v1.core.kv_cache_planning or {PLANNER}"
PLAN = "import probe; print(probe.plan())"


def last_line(ended: Ended) -> str:
    return ended.err.splitlines()[-1]


@pytest.fixture
def own_fake(tmp_path: Path) -> Path:
    """The stand-in, to be changed by the test."""
    shutil.copytree(FAKE, tmp_path / "fake", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "fake"


def planner_file(fake: Path) -> Path:
    return fake.joinpath(*PLANNER.split(".")).with_suffix(".py")


def test_the_premise_the_stand_in_plans_as_vllm_does(folder: Path) -> None:
    assert run("-c", HOOKED, path=[FAKE]) == Ended(NOT_HOOKED)
    assert run("-c", PLAN, path=[FAKE]) == Ended(NATIVE)
    assert run("-c", PLAN, path=[folder, FAKE]) == Ended(COMPACT)


# --- threads -------------------------------------------------------------------------------------


def test_imported_by_several_threads_at_once(folder: Path, tmp_path: Path) -> None:
    """Each imports vLLM and, in another order, the modules that our hook needs itself."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.1); import wrapt, json, decimal")
    code = """
        import threading
        orders = [("slow", "vllm"), ("vllm", "slow"), ("wrapt", "vllm"), ("decimal", "probe"),
                  ("altay_kvfix", "vllm"), ("altay_kvfix.hook", "slow"), ("vllm", "wrapt")] * 3
        barrier = threading.Barrier(len(orders))
        def work(names):
            barrier.wait()
            for name in names:
                __import__(name)
        threads = [threading.Thread(target=work, args=(names,)) for names in orders]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import probe; print(probe.hooks(), probe.armed())
    """
    for _ in range(3):
        path = [folder, tmp_path, FAKE]
        assert run("-c", textwrap.dedent(code), path=path) == Ended("[1, 1, 1] 1\n")


# --- where vLLM lies -----------------------------------------------------------------------------


def test_installed_editable(folder: Path, pure_wrapt: Path, tmp_path: Path) -> None:
    """pip's way that matters here: a finder on sys.meta_path. The other is a path in a .pth."""
    project, python = tmp_path / "project", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(FAKE / "vllm", project / "elsewhere" / "vllm")
    (project / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools>=77']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'vllm'\nversion = '0.32.0'\n"
        "[tool.setuptools]\npackages = ['vllm', 'vllm.v1', 'vllm.v1.core']\n"
        "package-dir = {vllm = 'elsewhere/vllm'}\n"
    )
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip_install(tmp_path / "made", "-e", str(project), python=python)
    (tmp_path / "probe.py").symlink_to(FAKE / "probe.py")
    path = [tmp_path, pure_wrapt]
    finders = "import sys; print([f.__name__ for f in sys.meta_path if 'Editable' in repr(f)]); "
    code = finders + HOOKED
    assert run("-c", code, python=python, path=path) == Ended(f"['_EditableFinder']\n{NOT_HOOKED}")
    assert run("-c", code, python=python, path=[folder, *path]) == Ended(
        f"['_EditableFinder']\n{ONCE}"
    )


def test_in_a_zip_file(folder: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "fake"), "zip", FAKE)
    look = f"import importlib.util as u; [u.find_spec(n) for n in ('vllm', {PLANNER!r}) * 2]"
    env = {"ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH": str(tmp_path / "trace")}
    # All its modules share one loader: looked for twice, each calls back once.
    assert run("-c", f"{look}; {HOOKED}", path=[folder, archive], env=env) == Ended(ONCE)
    assert (tmp_path / "trace").read_text().count("install_new") == 1


def test_as_a_namespace(folder: Path, bare: Path, pure_wrapt: Path, own_fake: Path) -> None:
    (own_fake / "vllm" / "__init__.py").unlink()
    code = HOOKED + "; import vllm; print(list(vllm.__path__), type(vllm.__loader__).__name__)"
    path = [own_fake, pure_wrapt]
    without_us = run("-c", code, python=bare, path=path)
    assert without_us.out.startswith(NOT_HOOKED)
    assert run("-c", code, python=bare, path=[folder, *path]) == Ended(
        without_us.out.replace(NOT_HOOKED, ONCE)
    )


def test_a_directory_that_happens_to_have_the_name(
    folder: Path, bare: Path, pure_wrapt: Path, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    probing = "import importlib.util as u; print(u.find_spec('vllm') is None)"
    path = [folder, tmp_path, pure_wrapt]
    assert run("-c", probing, python=bare, path=path) == Ended("False\n")
    ended = run("-c", "import vllm", python=bare, path=path)
    assert ended == Ended("", f"{NOT_ACTIVE}vLLM unknown: {NO_PLANNER}\n")


@pytest.mark.parametrize("kind", ["slots", "class", "no exec_module"])
def test_a_loader_that_can_not_be_watched(folder: Path, tmp_path: Path, kind: str) -> None:
    definition = {
        "slots": "class Loader:\n    __slots__ = ()\n",
        "class": "class Loader:\n",
        "no exec_module": "class Loader:\n",
    }[kind]
    method = "load_module" if kind == "no exec_module" else "exec_module"
    (tmp_path / "odd.py").write_text(
        "import importlib.machinery, importlib.util, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"{definition}"
        "    @staticmethod\n    def create_module(spec): return None\n"
        f"    @staticmethod\n    def {method}(module):\n"
        "        if isinstance(module, str): module = sys.modules.setdefault(\n"
        "            module, importlib.util.module_from_spec(importlib.util.spec_from_loader(\n"
        "                module, None)))\n"
        "        module.__version__ = 'odd'; return module\n"
        "class Finder:\n"
        "    @staticmethod\n    def find_spec(name, path, target=None):\n"
        "        if name == 'vllm': return importlib.machinery.ModuleSpec(name, "
        f"{'Loader' if kind == 'class' else 'Loader()'})\n"
        "sys.meta_path.insert(1, Finder)\n"
    )
    code = "import odd, vllm; print(vllm.__version__)"
    assert run("-c", code, path=[tmp_path]) == Ended("odd\n")
    ended = run("-c", code, path=[folder, tmp_path])
    assert (ended.out, ended.code) == ("odd\n", 0)
    [line] = ended.err.splitlines()
    assert line.startswith(NOT_ACTIVE + "ImportError(\"can't watch ")
    refused = run("-c", code, path=[folder, tmp_path], env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert last_line(refused).startswith("ImportError: can't watch ")


def test_a_loader_is_given_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    """ddtrace's, for one, keeps an attribute of its own where we put ours for one execution."""
    (tmp_path / "odd.py").write_text(
        "import sys\n"
        "class Loader:\n"
        "    def __init__(self, real):\n"
        "        self.real, self.create_module, self.runs = real, real.create_module, 0\n"
        "        self.exec_module = self.execute\n"
        "    def execute(self, module):\n"
        "        self.runs += 1\n"
        "        self.real.exec_module(module)\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'vllm':\n"
        "            spec = sys.meta_path[-1].find_spec(name, path)\n"
        "            spec.loader = Loader(spec.loader)\n"
        "            return spec\n"
        "sys.meta_path.insert(1, Finder)\n"
    )
    code = (
        f"import odd; {HOOKED}; import vllm; loader = vllm.__loader__; print(type(loader), "
        "loader.runs, loader.exec_module == loader.execute, loader is vllm.__spec__.loader)"
    )
    shown = "<class 'odd.Loader'> 1 True True\n"
    assert run("-c", code, path=[tmp_path, FAKE]) == Ended(NOT_HOOKED + shown)
    assert run("-c", code, path=[folder, tmp_path, FAKE]) == Ended(ONCE + shown)


def test_a_finder_that_asks_us_while_we_ask_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "delegating.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        for finder in sys.meta_path:\n"
        "            if finder is not cls and (spec := finder.find_spec(name, path, target)):\n"
        "                return spec\n"
    )
    for index in (0, 1):
        code = f"import sys, delegating as d; sys.meta_path.insert({index}, d.Finder); {HOOKED}"
        assert run("-c", code, path=[folder, tmp_path, FAKE]) == Ended(ONCE)


def test_a_finder_without_find_spec_does_no_harm(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "import sys\n"
        "class Old:\n"
        "    def find_module(self, name, path=None): return None\n"
        "sys.meta_path[:0] = [Old()]\n"
    )
    flags = ("-W", "ignore")
    assert run(*flags, "-c", "import old;" + HOOKED, path=[folder, tmp_path, FAKE]) == Ended(ONCE)


# --- again ---------------------------------------------------------------------------------------

RELOAD = "import importlib, sys; importlib.reload(sys.modules[{0!r}])"
DELETE = (
    "import sys; [sys.modules.pop(n) for n in list(sys.modules) if (n + '.').startswith({0!r} '.')]"
)


@pytest.mark.parametrize("way", [RELOAD, DELETE], ids=["reload", "delete"])
@pytest.mark.parametrize("what", ["vllm", "vllm.v1.core", PLANNER])
def test_loaded_again_it_is_patched_again_once(folder: Path, what: str, way: str) -> None:
    again = way.format(what)
    code = f"{HOOKED}; {again}; {HOOKED}; {again}; {HOOKED}; print(probe.plan())"
    assert run("-c", code, path=[FAKE]) == Ended(NOT_HOOKED * 3 + NATIVE)
    assert run("-c", code, path=[folder, FAKE]) == Ended(ONCE * 3 + COMPACT)


def test_a_reload_reaches_whoever_holds_the_old_function(folder: Path) -> None:
    """vllm.v1.engine.core imports get_kv_cache_configs by name, and keeps it."""
    code = f"""
        import probe; probe.hooks()
        from {PLANNER} import get_kv_cache_configs
        {RELOAD.format(PLANNER)}
        sys.modules[{PLANNER!r}].get_kv_cache_configs = get_kv_cache_configs
        print(probe.plan())
    """
    assert run("-c", textwrap.dedent(code), path=[folder, FAKE]) == Ended(COMPACT)


@pytest.mark.parametrize("arm", ["sitecustomize", "package", "both"])
def test_installed_by_a_models_own_package(folder: Path, tmp_path: Path, arm: str) -> None:
    """Before vLLM, after its planner, and where the start-up hook never ran."""
    install = "import altay_kvfix as a; print(a.install_altay72_compact_kv_layout())"
    path, flags = [folder, FAKE], []
    if arm == "package":
        # With its sitecustomize left behind.
        (tmp_path / "vendored").mkdir()
        (tmp_path / "vendored" / "altay_kvfix").symlink_to(folder / "altay_kvfix")
        path = [tmp_path / "vendored", FAKE]
    early = f"{install}; {HOOKED}; {install}"
    assert run(*flags, "-c", early, path=path) == Ended(f"True\n{ONCE}False\n")
    late = f"import probe; print(probe.hooks()); {install}; {HOOKED}"
    expected = f"{NOT_HOOKED}True\n{ONCE}" if arm == "package" else f"{ONCE}False\n{ONCE}"
    assert run(*flags, "-c", late, path=path) == Ended(expected)


# --- what a module shows of itself ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm", PLANNER])
def test_the_module_shows_nothing_of_us(folder: Path, name: str) -> None:
    code = f"""
        import hashlib, importlib, importlib.resources, inspect, probe, sys
        probe.hooks()
        m = importlib.import_module({name!r})
        print(m.__spec__, m.__file__, m.__loader__ is m.__spec__.loader, type(m.__loader__))
        print(sorted(vars(m.__loader__)), sorted(vars(m)), m.__spec__.cached)
        print(hashlib.sha256(inspect.getsource(m).encode()).hexdigest())
        if hasattr(m, "__path__"):
            print([p.name for p in sorted(importlib.resources.files(m).iterdir())])
        for function in probe.FUNCTIONS:
            f = getattr(m, function, None)
            print(f and (inspect.getsource(f), inspect.signature(f), f.__name__, f.__qualname__,
                         f.__module__, f.__doc__, callable(f), inspect.isfunction(f)))
    """
    code = textwrap.dedent(code).replace("hash(", "")
    without_us = run("-c", code, path=[FAKE])
    assert without_us.code == 0
    assert _without_addresses(run("-c", code, path=[folder, FAKE])) == _without_addresses(
        without_us
    )


def _without_addresses(ended: Ended) -> list[str]:
    return [part.partition(">")[2] for part in (ended.out + ended.err).split(" object at 0x")]


def test_wrapped_functions_can_be_pickled(folder: Path) -> None:
    code = f"""
        import copy, pickle, probe; probe.hooks()
        from {PLANNER} import get_kv_cache_groups as f
        print(pickle.loads(pickle.dumps(f)) is f, copy.deepcopy(f) is f, copy.copy(f) is f)
    """
    code = textwrap.dedent(code)
    assert run("-c", code, path=[FAKE]) == Ended("True True True\n")
    assert run("-c", code, path=[folder, FAKE]) == Ended("True True True\n")


# --- when something is wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["altay_kvfix/__init__.py", "altay_kvfix/hook.py"])
def test_our_own_failure_never_fails_the_import(tmp_path: Path, broken: str) -> None:
    folder = make_folder(tmp_path / "folder")
    with (folder / broken).open("a") as file:
        file.write("\nraise AssertionError('a bug of ours')\n")
    ended = run("-c", HOOKED, path=[folder, FAKE])
    assert (ended.out, ended.code) == (NOT_HOOKED, 0)
    [line] = ended.err.splitlines()
    assert line.startswith(NOT_ACTIVE) and "a bug of ours" in line
    for mode in ("required", "strict", "mistyped"):
        env = {"ZENIT_ALTAY_KV_LAYOUT": mode}
        refused = run("-c", HOOKED, path=[folder, FAKE], env=env)
        assert (refused.out, refused.code) == ("", 1)
        assert "a bug of ours" in last_line(refused)
    for mode in ("off", "legacy", " Attention_Exact "):
        env = {"ZENIT_ALTAY_KV_LAYOUT": mode}
        assert run("-c", HOOKED, path=[folder, FAKE], env=env) == ended


def test_a_bug_while_patching_is_logged_and_vllm_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder")
    with (folder / "altay_kvfix" / "vllm_compat.py").open("a") as file:
        file.write(
            "\ndef check_planner_functions(planner): raise AssertionError('a bug of ours')\n"
        )
    ended = run("-c", PLAN, path=[folder, FAKE])
    assert (ended.out, ended.code) == (NATIVE, 0)
    assert ended.err.startswith(
        "altay-kvfix: failed, vLLM 0.32.0 keeps its own KV cache layout: "
        "AssertionError('a bug of ours')\n"
    )
    assert last_line(ended) == "AssertionError: a bug of ours"
    refused = run("-c", PLAN, path=[folder, FAKE], env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert last_line(refused) == "AssertionError: a bug of ours"


def test_the_imports_own_failure_stays_what_it_was(folder: Path, own_fake: Path) -> None:
    (own_fake / "vllm" / "__init__.py").write_text("raise OSError('no such device')")
    code = """
        import sys
        for attempt in 1, 2:
            try:
                import vllm
            except OSError as error:
                print(error, "vllm" in sys.modules)
        open(sys.argv[1], "w").write("__version__ = '0.32.0'")
        import probe; print(probe.hooks())
    """
    arguments = ("-B", "-c", textwrap.dedent(code), own_fake / "vllm" / "__init__.py")
    assert run(*arguments, path=[folder, own_fake]) == Ended("no such device False\n" * 2 + ONCE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("del get_kv_cache_groups", f"{PLANNER}.get_kv_cache_groups"),
        (
            "renamed = _get_kv_cache_groups_uniform_page_size\n"
            "del _get_kv_cache_groups_uniform_page_size",
            f"{PLANNER}._get_kv_cache_groups_uniform_page_size",
        ),
    ],
)
def test_a_release_without_the_function(
    folder: Path, own_fake: Path, change: str, reason: str
) -> None:
    with planner_file(own_fake).open("a") as planner:
        planner.write(f"\n{change}\n")
    code = f"import {PLANNER}; print('runs')"
    ended = run("-c", code, path=[folder, own_fake])
    assert ended == Ended("runs\n", f"{NOT_ACTIVE}vLLM 0.32.0: there is no function {reason}\n")
    refused = run("-c", code, path=[folder, own_fake], env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    expected = f"=required, but vLLM 0.32.0: there is no function {reason}"
    assert last_line(refused).endswith(expected)


def test_a_release_with_its_planner_elsewhere(folder: Path, own_fake: Path) -> None:
    planner_file(own_fake).rename(planner_file(own_fake).with_name("renamed.py"))
    reason = f"vLLM 0.32.0: {NO_PLANNER}"
    code = "import vllm.v1.core.renamed; print('runs')"
    assert run("-c", code, path=[folder, own_fake]) == Ended("runs\n", f"{NOT_ACTIVE}{reason}\n")
    refused = run("-c", code, path=[folder, own_fake], env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert last_line(refused).endswith(f"=required, but {reason}")


def test_where_it_is_required_a_second_attempt_fails_again(folder: Path, own_fake: Path) -> None:
    """Somebody may take a failed import of vLLM for an accident, and try again."""
    planner_file(own_fake).unlink()
    code = """
        for attempt in 1, 2:
            try:
                import vllm
            except RuntimeError as error:
                print(type(error).__name__)
    """
    ended = run("-c", textwrap.dedent(code), path=[folder, own_fake], env=REQUIRED)
    assert ended == Ended("KVLayoutError\n" * 2)


# --- somebody else's functions -------------------------------------------------------------------

THEIRS = """
    import functools
    import vllm.v1.core.kv_cache_utils as planner

    def group(config, specs): return planner.create_kv_cache_group_specs(specs, [list(specs)])
    def divide(specs): return planner.create_kv_cache_group_specs(specs, [list(specs)])
    native = planner.get_kv_cache_configs
    def configs(*args): return native(*args)

    def traced(function):
        @functools.wraps(function)
        def call(*args): return function(*args)
        return call

    def traced_silently(function): return lambda *args: function(*args)
"""
REPLACED = {
    "get_kv_cache_groups": ("planner.get_kv_cache_groups = group", "plugin.group", "[70]\n"),
    "_get_kv_cache_groups_uniform_page_size": (
        "planner._get_kv_cache_groups_uniform_page_size = divide",
        "plugin.divide",
        "[70]\n",
    ),
    "get_kv_cache_configs": ("planner.get_kv_cache_configs = configs", "plugin.configs", NATIVE),
}
INSTALL = "import altay_kvfix as a; a.install_altay72_compact_kv_layout()"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "plugin.py").write_text(textwrap.dedent(THEIRS))
    return tmp_path


@pytest.mark.parametrize("when", ["after us", "before us"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_function_that_is_somebody_elses(
    folder: Path, plugin: Path, tmp_path: Path, name: str, when: str
) -> None:
    """As vllm-ascend does: one line, theirs is used, and an error where the layout is required."""
    replace, theirs, planned = REPLACED[name]
    path = [folder, plugin, FAKE]
    steps = ["from plugin import *", replace]
    if when == "before us":
        (tmp_path / "vendored").mkdir()
        (tmp_path / "vendored" / "altay_kvfix").symlink_to(folder / "altay_kvfix")
        path[0] = tmp_path / "vendored"
        steps.append(INSTALL)
    code = "; ".join([*steps, "import probe; print(probe.plan()); print(probe.plan())"])
    assert run("-c", "; ".join([steps[0], replace, PLAN]), path=path[1:]) == Ended(planned)
    reason = f"vLLM 0.32.0: {PLANNER}.{name} was replaced by {theirs}"
    assert run("-c", code, path=path) == Ended(planned * 2, f"{NOT_ACTIVE}{reason}\n")
    refused = run("-c", code, path=path, env=REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert last_line(refused) == (
        "altay_kvfix.report.KVLayoutError: altay-kvfix: "
        f"ZENIT_ALTAY_KV_LAYOUT=required, but {reason}"
    )


@pytest.mark.parametrize("name", REPLACED)
def test_a_wrapper_that_shows_what_it_wraps_is_company(
    folder: Path, plugin: Path, name: str
) -> None:
    """Tracing must not cost the layout, whichever of us came first."""
    code = f"from plugin import *; planner.{name} = traced(planner.{name}); {PLAN}"
    assert run("-c", code, path=[folder, plugin, FAKE]) == Ended(COMPACT)
    first = f"from plugin import *; planner.{name} = traced(planner.{name}); {INSTALL}; {PLAN}"
    env = {"PYTHONPATH": f"{plugin}:{FAKE}", "KVFIX": str(folder)}
    late = f"import os, sys; sys.path.append(os.environ['KVFIX']); {first}"
    assert run("-c", late, env=env) == Ended(COMPACT)


def test_a_wrapper_that_hides_what_it_wraps_is_not(folder: Path, plugin: Path) -> None:
    code = (
        "from plugin import *; "
        f"planner.get_kv_cache_groups = traced_silently(planner.get_kv_cache_groups); {PLAN}"
    )
    assert run("-c", code, path=[folder, plugin, FAKE]) == Ended(
        NATIVE,
        f"{NOT_ACTIVE}vLLM 0.32.0: {PLANNER}.get_kv_cache_groups was replaced by "
        "plugin.traced_silently.<locals>.<lambda>\n",
    )


def test_a_wrapper_that_pretends_to_call_what_it_wraps(folder: Path, plugin: Path) -> None:
    """It is believed, and then the inner function was not called: its own answer stays."""
    code = (
        "from plugin import *; "
        f"planner.get_kv_cache_groups = functools.wraps(planner.get_kv_cache_groups)"
        "(lambda config, specs: [*divide({k: v for k, v in specs.items() if 'full' in k}), "
        "*divide({k: v for k, v in specs.items() if 'gdn' in k})]); "
        f"{INSTALL}; {PLAN}"
    )
    late = f"import os, sys; sys.path.append(os.environ['KVFIX']); {code}"
    env = {"PYTHONPATH": f"{plugin}:{FAKE}", "KVFIX": str(folder)}
    ended = run("-c", late, env=env)
    assert (ended.out, ended.code) == ("[16, 54]\n", 0)
    [line] = ended.err.splitlines()
    assert "_get_kv_cache_groups_uniform_page_size was called 0 times" in line
    refused = run("-c", late, env=env | REQUIRED)
    assert (refused.out, refused.code) == ("", 1)
    assert "_get_kv_cache_groups_uniform_page_size was called 0 times" in last_line(refused)


def test_what_it_logs_is_not_lost_when_we_stand_aside(folder: Path, plugin: Path) -> None:
    code = """
        import logging
        from plugin import *
        def theirs(config, specs):
            logging.getLogger(planner.__name__).warning("grouped by theirs")
            return group(config, specs)
        planner.get_kv_cache_groups = theirs
        import probe; print(probe.plan())
    """
    ended = run("-c", textwrap.dedent(code), path=[folder, plugin, FAKE])
    assert ended.out == "[70]\n"
    assert ended.err.splitlines()[1:] == ["grouped by theirs"]
