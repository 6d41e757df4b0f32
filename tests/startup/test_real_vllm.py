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


def test_no_module_holds_an_unwrapped_copy(folder: Path, probe: Path, tmp_path: Path) -> None:
    planner = "vllm.v1.core.kv_cache_utils"
    names = ("_get_kv_cache_groups_uniform_page_size", "get_kv_cache_configs")
    raw = [(planner, name) for name in (*names, "get_kv_cache_groups")]
    # The premise: the engine imports one of them by its name. Then the package is installed late.
    (tmp_path / "altay_kvfix").symlink_to(folder / "altay_kvfix")
    late = (
        HOLDERS
        + """
    print(holders())
    import altay_kvfix; altay_kvfix.install_altay72_compact_kv_layout()
    print(holders(), probe.hooks())
    """
    )
    without_start_up = run_vllm(late, [tmp_path, probe])
    held = [*raw, ("vllm.v1.engine.core", "get_kv_cache_configs")]
    assert without_start_up.out == f"{held}\n[] [1, 1, 1]\n"
    assert without_start_up.code == 0

    early = (
        HOLDERS
        + """
    print(holders(), probe.hooks())
    importlib.reload(planner)
    print(holders(), probe.hooks())
    print([inspect.getsource(getattr(planner, name))[:20] for name in probe.FUNCTIONS])
    print(planner.__spec__, planner.__loader__ is planner.__spec__.loader)
    """
    )
    alone, ours = run_vllm(early, [probe]), run_vllm(early, [folder, probe])
    assert ours.out.splitlines()[:2] == ["[] [1, 1, 1]"] * 2
    assert _without_addresses(ours) == _without_addresses(alone)
    assert lines_logged(ours) == lines_logged(alone)


def _without_addresses(ended: Ended) -> list[str]:
    return [re.sub(r"0x[0-9a-f]+", "", line) for line in ended.out.splitlines()[2:]]


def test_the_model_registrys_subprocess(folder: Path, probe: Path) -> None:
    """vLLM pickles a function to ``python -m ...registry`` and reads its answer from a file."""
    code = """
        from vllm.model_executor.models.registry import _run_in_subprocess

        def ask():
            import probe
            return probe.armed(), probe.hooks()

        print(_run_in_subprocess(ask))
    """
    alone, ours = run_vllm(code, [probe]), run_vllm(code, [folder, probe])
    assert (alone.out, alone.code) == ("(0, [0, 0, 0])\n", 0)
    assert (ours.out, ours.code) == ("(1, [1, 1, 1])\n", 0)
    assert lines_logged(ours) == lines_logged(alone)
