"""What an interpreter's start costs with the hook on PYTHONPATH, and what `import vllm` costs.

    python benchmarks/startup.py [--rounds N] [--imports N]

Every kind of start is measured once per round, so that whatever else the machine does hits all of
them alike. A start's extra cost is the median, over the rounds, of its difference to a start with
an empty sitecustomize.py in the same round. Beside ours: the bootstraps of other software that
runs in every process, from an environment under .cache that requirements/peers.txt fills.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".cache" / "peers"
REQUIREMENTS = ROOT / "requirements" / "peers.txt"

BOOTSTRAPS = {
    "ddtrace": "ddtrace/bootstrap",
    "newrelic": "newrelic/bootstrap",
    "opentelemetry-instrument": "opentelemetry/instrumentation/auto_instrumentation",
    "elasticapm-run": "elasticapm/instrumentation/wrapper",
}
# They start as in production and send nothing anywhere.
PEER_SETTINGS = {
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_STARTUP_LOGS": "false",
    "NEW_RELIC_DEVELOPER_MODE": "true",
    "NEW_RELIC_LOG_LEVEL": "error",
    "NEW_RELIC_PYTHON_PREFIX": str(PEERS),
    "NEW_RELIC_PYTHON_VERSION": "{}.{}".format(*sys.version_info),
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "ELASTIC_APM_ENABLED": "true",
    "ELASTIC_APM_DISABLE_SEND": "true",
}
# Bootstraps that cost a hundred times ours need no more rounds than this to be told apart.
PEER_ROUNDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of an interpreter's start.")
    parser.add_argument("--rounds", type=int, default=400, help="starts of each kind")
    parser.add_argument("--imports", type=int, default=10, help="imports of vLLM of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folders = make_folders(Path(directory))
        print(f"{machine()}\n")
        python = peers_python()
        report_starts(python or Path(sys.executable), folders, arguments.rounds, bool(python))
        if importlib.util.find_spec("vllm") is None:
            print("\nimport vllm: not measured, vLLM is not installed in this environment")
        else:
            report_imports(folders, arguments.imports)


def make_folders(directory: Path) -> dict[str, Path]:
    """An empty sitecustomize.py, and ours: with bytecode and without."""
    for name in ("empty", "ours", "ours, no .pyc"):
        (directory / name).mkdir()
        if name == "empty":
            (directory / name / "sitecustomize.py").write_text("")
        else:
            shutil.copy(ROOT / "sitecustomize.py", directory / name)
            shutil.copytree(
                ROOT / "altay_kvfix",
                directory / name / "altay_kvfix",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    return {path.name: path for path in directory.iterdir()}


def report_starts(python: Path, folders: Mapping[str, Path], rounds: int, peers: bool) -> None:
    for name in ("empty", "ours"):
        subprocess.run([python, "-m", "compileall", "-q", folders[name]], check=True)
    path = dict(folders)
    if peers:
        [site_packages] = PEERS.glob("lib/python*/site-packages")
        path |= {name: site_packages / bootstrap for name, bootstrap in BOOTSTRAPS.items()}

    def start(name: str) -> Took:
        settings = PEER_SETTINGS if name in BOOTSTRAPS else {}
        if name.endswith("no .pyc"):
            settings = {"PYTHONDONTWRITEBYTECODE": "1"}
        return time_of(python, "pass", {"PYTHONPATH": str(path[name])} | settings)

    all_took = interleaved(path, start, lambda name: PEER_ROUNDS if name in BOOTSTRAPS else rounds)
    took = {name: [one.elapsed for one in times] for name, times in all_took.items()}
    print(f"Start of {platform.python_implementation()} {platform.python_version()}, milliseconds")
    print(f"{'sitecustomize':<26}{'starts':>8}{'median':>10}{'extra':>10}")
    for name in sorted(took, key=lambda name: statistics.median(took[name])):
        extra = statistics.median(a - b for a, b in zip(took[name], took["empty"], strict=False))
        median = statistics.median(took[name])
        shown = "" if name == "empty" else f"{extra * 1e3:10.2f}"
        print(f"{name:<26}{len(took[name]):>8}{median * 1e3:10.2f}{shown}")
    if not peers:
        print("Other software's bootstraps: not measured, requirements/peers.txt can't be had")


def report_imports(folders: Mapping[str, Path], rounds: int) -> None:
    python = Path(sys.executable)
    subprocess.run([python, "-m", "compileall", "-q", folders["ours"]], check=True)

    def load(name: str) -> Took:
        return time_of(python, "import vllm", {"PYTHONPATH": str(folders[name])})

    for name in ("empty", "ours"):
        load(name)  # the first one reads the files from the disk
    took = interleaved(("empty", "ours"), load, lambda name: rounds)
    print(f"\nimport vllm, seconds, {rounds} of each")
    print(f"{'sitecustomize':<26}{'least':>10}{'median':>10}{'median CPU':>12}")
    figures = {}
    for name, times in took.items():
        elapsed = [one.elapsed for one in times]
        cpu = statistics.median(one.cpu for one in times)
        figures[name] = (min(elapsed), statistics.median(elapsed), cpu)
        print("{:<26}{:10.3f}{:10.3f}{:12.3f}".format(name, *figures[name]))
    ratios = (ours / empty for ours, empty in zip(figures["ours"], figures["empty"], strict=True))
    print("{:<26}{:10.3f}{:10.3f}{:12.3f}".format("ratio", *ratios))
    ours, vllm = imported(python, folders["ours"])
    print(f"altay_kvfix and wrapt take {ours * 1e3:.1f} ms of it: {ours / vllm:.2%}")


def imported(python: Path, folder: Path) -> tuple[float, float]:
    """Seconds of our package with what it imports, and of vllm, as the interpreter counts them."""
    command = [python, "-X", "importtime", "-c", "import vllm"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    log = subprocess.run(command, env=environment, capture_output=True, text=True).stderr
    microseconds = {
        name.strip(): int(cumulative)
        for _, cumulative, name in (
            line.partition(":")[2].split("|") for line in log.splitlines() if line.count("|") == 2
        )
        if cumulative.strip().isdigit()
    }
    # The second is no part of the first: the package imports its hook when it is told to install.
    ours = microseconds["altay_kvfix"] + microseconds["altay_kvfix.hook"]
    return ours / 1e6, microseconds["vllm"] / 1e6


def interleaved(
    names: Mapping[str, Path] | tuple[str, ...],
    measure: Callable[[str], Took],
    rounds_of: Callable[[str], int],
) -> dict[str, list[Took]]:
    """Measure every name once per round, each round in another order."""
    took: dict[str, list[Took]] = {name: [] for name in names}
    order = list(names)
    for number in range(max(map(rounds_of, names))):
        order.append(order.pop(0))
        for name in order:
            if number < rounds_of(name):
                took[name].append(measure(name))
    return took


class Took(NamedTuple):
    elapsed: float
    """Seconds from before the interpreter is started until it has ended."""
    cpu: float
    """Seconds of processor time, which other processes disturb less."""


def time_of(python: Path, code: str, variables: Mapping[str, str]) -> Took:
    inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    started = time.perf_counter()
    process = os.posix_spawn(
        python,
        [str(python), "-c", code],
        inherited | variables,
        # vLLM logs what it finds of accelerators.
        file_actions=[(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(process, 0)
    elapsed = time.perf_counter() - started
    if status:
        raise RuntimeError(f"{python} -c {code!r} ended with status {status}")
    return Took(elapsed, used.ru_utime + used.ru_stime)


def peers_python() -> Path | None:
    """The interpreter of the peers' environment, made where it is missing."""
    python, stamp = PEERS / "bin" / "python", PEERS / "installed.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return python
    venv.create(PEERS, with_pip=True, clear=True)
    if subprocess.run([python, "-m", "pip", "install", "-q", "-r", REQUIREMENTS]).returncode:
        return None
    stamp.write_text(REQUIREMENTS.read_text())
    return python


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, load {load}"


if __name__ == "__main__":
    main()
