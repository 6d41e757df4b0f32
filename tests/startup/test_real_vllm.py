"""What only the real vLLM can show: who holds the functions, its own subprocesses, a tracer."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
from interpreters import FAKE, Ended, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)

SETTINGS = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module ``probe`` and without the stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.py").symlink_to(FAKE / "probe.py")
    return folder


def run_vllm(code: str, path: list[Path], **env: str) -> Ended:
    return run("-c", textwrap.dedent(code), path=path, env=SETTINGS | env, timeout=180)


def lines_logged(ended: Ended) -> list[str]:
    """What went to stderr, without times and process ids."""
    return [re.sub(r"\d+", "0", line) for line in ended.err.splitlines()]


HOLDERS = """
    import importlib, inspect, sys
    import vllm.v1.engine.core
    import probe

    planner = sys.modules[probe.PLANNER]

    def holders():
        native = [inspect.unwrap(getattr(planner, name)) for name in probe.FUNCTIONS]
        return sorted(
            (module.__name__, name)
            for module in list(sys.modules.values())
            for name, value in list(getattr(module, "__dict__", {}).items())
            if any(value is function for function in native)
        )
"""


LATE = (
    HOLDERS
    + """
    print(holders())
    import altay_kvfix; altay_kvfix.install_altay72_compact_kv_layout()
    print(holders(), probe.hooks())
"""
)

# The last lines: vLLM pickles a function to ``python -m ...registry``, whose output is captured.
EARLY = (
    HOLDERS
    + """
    print(holders(), probe.hooks())
    importlib.reload(planner)
    print(holders(), probe.hooks())
    print([inspect.getsource(getattr(planner, name))[:20] for name in probe.FUNCTIONS])
    print(planner.__spec__, planner.__loader__ is planner.__spec__.loader)

    from vllm.model_executor.models.registry import _run_in_subprocess

    def ask():
        import probe
        return probe.armed(), probe.hooks()

    print("registry:", _run_in_subprocess(ask))
"""
)

PLANNER = "vllm.v1.core.kv_cache_utils"
RAW = [
    (PLANNER, "_get_kv_cache_groups_uniform_page_size"),
    (PLANNER, "get_kv_cache_configs"),
    (PLANNER, "get_kv_cache_groups"),
    # The engine imports it by its name.
    ("vllm.v1.engine.core", "get_kv_cache_configs"),
]


@pytest.fixture(scope="module")
def early(folder: Path, probe: Path) -> tuple[Ended, Ended]:
    """The same program without us and with us."""
    return run_vllm(EARLY, [probe]), run_vllm(EARLY, [folder, probe])


def test_no_module_holds_an_unwrapped_copy(early: tuple[Ended, Ended]) -> None:
    alone, ours = early
    assert (alone.code, ours.code) == (0, 0)
    assert alone.out.splitlines()[0] == f"{RAW} [0, 0, 0]"
    # The second time after a reload.
    assert ours.out.splitlines()[:2] == ["[] [1, 1, 1]"] * 2


def test_no_module_holds_one_where_a_models_package_installs_late(
    folder: Path, probe: Path, tmp_path: Path
) -> None:
    (tmp_path / "altay_kvfix").symlink_to(folder / "altay_kvfix")
    ended = run_vllm(LATE, [tmp_path, probe])
    assert (ended.out, ended.code) == (f"{RAW}\n[] [1, 1, 1]\n", 0)


def test_the_model_registrys_subprocess(early: tuple[Ended, Ended]) -> None:
    registry = [ended.out.splitlines()[-1] for ended in early]
    assert registry == ["registry: (0, [0, 0, 0])", "registry: (1, [1, 1, 1])"]


def test_vllm_shows_and_says_the_same(early: tuple[Ended, Ended]) -> None:
    alone, ours = early
    shown = [
        [re.sub(r"0x[0-9a-f]+", "", line) for line in ended.out.splitlines()[2:-1]]
        for ended in early
    ]
    assert len(shown[0]) == 2
    assert shown[1] == shown[0]
    assert lines_logged(ours) == lines_logged(alone)
