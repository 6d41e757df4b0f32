"""Processes that start other processes (behaviours 17 to 21)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import ARMED, FAKE, HOOKED, ONCE, Ended, environment, run

# --- Python's own --------------------------------------------------------------------------------

MULTIPROCESSING = """
    import multiprocessing, sys

    def hooks(_=None):
        import probe
        return probe.hooks()

    def tell():
        print(hooks(), flush=True)

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        child = context.Process(target=tell)
        child.start()
        child.join()
        with context.Pool(2) as pool:
            print(*pool.map(hooks, range(4)), sep="\\n", flush=True)
        print(child.exitcode, "vllm" in sys.modules)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(folder: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MULTIPROCESSING))
    assert run(script, method, path=[folder, FAKE]) == Ended(ONCE * 5 + "0 False\n")
    assert run(script, method, path=[FAKE]).out.startswith("[0, 0, 0]\n")


def test_forked_with_vllm_loaded(folder: Path) -> None:
    code = f"import probe, os; probe.hooks(); os.fork() and os.wait(); {HOOKED}"
    assert run("-u", "-c", code, path=[folder, FAKE]) == Ended(ONCE * 2)


def test_a_grandchild(folder: Path) -> None:
    inner = "subprocess.run([sys.executable, '-c', {!r}], check=True)"
    code = "import subprocess, sys; " + inner.format(
        "import subprocess, sys; " + inner.format(HOOKED)
    )
    assert run("-c", code, path=[folder, FAKE]) == Ended(ONCE)


def test_a_module_and_a_script(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__main__.py").write_text(HOOKED)
    path = [folder, tmp_path, FAKE]
    assert run("-m", "tool", path=path) == Ended(ONCE)
    assert run(tmp_path / "tool", path=path) == Ended(ONCE)
    assert run(tmp_path / "tool" / "__main__.py", path=path) == Ended(ONCE)
    script = tmp_path / "console-script"
    script.write_text(f"#!{sys.executable}\n{HOOKED}\n")
    script.chmod(0o755)
    assert run(script, python=None, path=path) == Ended(ONCE)


def test_an_empty_environment_leaves_us_out(folder: Path) -> None:
    child = "subprocess.run([sys.executable, '-c', {!r}], env={{}}, check=True)"
    tell = "import sys; print(sum(hasattr(f, 'altay_kvfix') for f in sys.meta_path))"
    code = f"import subprocess, sys; {ARMED}; {child.format(tell)}"
    assert run("-u", "-c", code, path=[folder, FAKE]) == Ended("1\n0\n")


# --- launchers -----------------------------------------------------------------------------------


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torchrun is a part of torch, which is not installed")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, pathlib, probe\n"
        f"pathlib.Path(r'{tmp_path}', 'rank' + os.environ['RANK']).write_text("
        f"str(probe.hooks()))\n"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run(*launch, script, path=[folder, FAKE], env={"OMP_NUM_THREADS": "1"})
    assert (ended.code, ended.out) == (0, "")
    assert "altay" not in ended.err
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [ONCE.strip()] * 2


APPLICATION = """
    import os, pathlib, probe

    told = pathlib.Path(os.environ["TOLD"], str(os.getpid()))
    told.with_suffix(".part").write_text(str(probe.hooks()))
    told.with_suffix(".part").rename(told.with_suffix(".told"))

    async def app(scope, receive, send): ...
"""


def test_uvicorn_workers(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    (tmp_path / "application.py").write_text(textwrap.dedent(APPLICATION))
    command = [sys.executable, "-m", "uvicorn", "application:app", "--workers=2", "--port=0"]
    command += ["--host=127.0.0.1", "--lifespan=off"]
    path = [folder, tmp_path, FAKE]
    with started(command, tmp_path, environment(path, TOLD=str(tmp_path))):
        told = _wait_for(lambda: sorted(tmp_path.glob("*.told")), 2)
        assert [file.read_text() for file in told] == [ONCE.strip()] * 2


@contextlib.contextmanager
def started(command: list[str], cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a server in a process group of its own, and end all of it."""
    with (cwd / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=log, stderr=log, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(look, count: int, seconds: float = 30):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while len(found := look()) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# --- Ray -----------------------------------------------------------------------------------------

RAY = """
    import os, sys
    import ray

    runtime_env = {"env_vars": {"PYTHONPATH": sys.argv[1]}} if len(sys.argv) > 1 else None
    ray.init(address="auto", runtime_env=runtime_env, log_to_driver=False, logging_level="error")

    @ray.remote
    def task():
        import probe
        return probe.hooks()

    @ray.remote
    class Actor:
        def hooks(self):
            import probe
            return probe.hooks()

    print(ray.get(task.remote(), timeout=60), ray.get(Actor.remote().hooks.remote(), timeout=60))
"""


class Cluster:
    """A Ray cluster of this machine alone, that listens on the loopback interface."""

    def __init__(self, python: Path, directory: Path, variables: dict[str, str]) -> None:
        self._ray = python.with_name("ray")
        self._python = python
        self._environment = variables | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        self._script = directory / "driver.py"
        self._script.write_text(textwrap.dedent(RAY))
        self._directory = directory

    def __enter__(self) -> Cluster:
        log = self._directory / "ray.log"
        options = ["--head", "--node-ip-address=127.0.0.1", "--port=0", "--num-cpus=2"]
        options += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
        options += ["--object-store-memory=80000000", f"--temp-dir={self._directory / 'r'}"]
        self._running = contextlib.ExitStack()
        self._process = self._running.enter_context(
            started([str(self._ray), "start", *options], self._directory, self._environment)
        )
        log = self._directory / "log"
        up = _wait_for(lambda: ["up"] if "Ray runtime started" in log.read_text() else [], 1, 60)
        if not up:
            self._running.close()
            pytest.skip(f"no Ray cluster starts here: {log.read_text()[-300:]}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def drive(self, *arguments: str, path: list[Path]) -> Ended:
        env = {"RAY_USAGE_STATS_ENABLED": "0"}
        return run(self._script, *arguments, python=self._python, path=path, env=env, timeout=180)


def test_ray(folder: Path, peers: Path, tmp_path: Path) -> None:
    """What decides is the environment of ``ray start``, or the job's ``runtime_env``."""
    both, none = f"{ONCE.strip()} {ONCE}", "[0, 0, 0] [0, 0, 0]\n"
    with Cluster(peers, tmp_path, environment([FAKE])) as cluster:
        # The premise: the driver's own environment does not reach the workers.
        assert cluster.drive(path=[folder, FAKE]).out == none
        ended = cluster.drive(os.pathsep.join(map(str, [folder, FAKE])), path=[FAKE])
        assert (ended.out, ended.code) == (both, 0)
    with Cluster(peers, tmp_path, environment([folder, FAKE])) as cluster:
        ended = cluster.drive(path=[FAKE])
        assert (ended.out, ended.code) == (both, 0)
