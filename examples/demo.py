"""The effect of altay-kvfix on a real engine, measured: `make demo`.

One tiny checkpoint with ALTAY's layers is run twice, once as vLLM plans it and once with
altay-kvfix, and asked the same. Takes about two minutes on two cores; no GPU, no downloads.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from engine_process import REPOSITORY, EngineRun, engine_environment, run_engine
from engine_run import PROGRESS_PREFIX
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_models import build_checkpoint

# Long enough for a prompt to need a second attention block; one request at a time, because
# requests that share a batch may round differently.
OPTIONS = ("--requests", 4, "--prompt-tokens", 1600, "--max-tokens", 32, "--max-num-seqs", 1)

LOG_TAIL_LINES = 30


class DemoFailure(Exception):
    """Why there is nothing to show."""


@dataclass(frozen=True)
class Layout:
    """KV cache groups by the number of layers in each."""

    group_lengths: list[int]

    @property
    def slots(self) -> int:
        return len(self.group_lengths) * max(self.group_lengths)

    @property
    def padding(self) -> int:
        return self.slots - sum(self.group_lengths)


def demonstrate(console: Console, directory: Path) -> None:
    with stage(console, "making a tiny ALTAY checkpoint"):
        model = build_checkpoint(directory / "model")
    native = measure(console, "native", model, directory, disable=True)
    compact = measure(console, "compact", model, directory, disable=False)

    row = compact.planning_row
    if row is None:
        raise DemoFailure(
            "altay-kvfix left no evidence: it was not loaded, or planned nothing\n"
            + excerpt(compact)
        )
    if row["event"] != "top_level_active":
        raise DemoFailure(
            f"the compact layout was not applied: {row['event']}, {row.get('reason')}\n"
            + excerpt(compact)
        )
    before, after = Layout(row["native_group_lengths"]), Layout(row["group_lengths"])
    for run, layout in ((native, before), (compact, after)):
        if run.group_count != len(layout.group_lengths):
            raise DemoFailure(
                f"the trace has {len(layout.group_lengths)} groups, the log of the engine has "
                f"{run.group_count}: {run.log_file}"
            )

    console.print(comparison(native, before, compact, after))
    console.print(f"Logs and traces: {directory}", highlight=False, soft_wrap=True)
    if answers(native) != answers(compact):
        raise DemoFailure(f"the answers differ; compare the result.json files in {directory}")


def measure(
    console: Console, name: str, model: Path, directory: Path, *, disable: bool
) -> EngineRun:
    with stage(console, f"running the engine, {name} layout") as show:

        def on_line(line: str) -> None:
            if line.startswith(PROGRESS_PREFIX):
                show(line.removeprefix(PROGRESS_PREFIX))

        run = run_engine(
            model,
            directory / name,
            *OPTIONS,
            environment=engine_environment(disable=disable),
            on_line=on_line,
        )
        if run.exit_code != 0 or run.result is None or run.kv_cache_tokens is None:
            raise DemoFailure(f"the engine failed, exit code {run.exit_code}\n{excerpt(run)}")
        return run


def comparison(native: EngineRun, before: Layout, compact: EngineRun, after: Layout) -> Table:
    assert native.result and native.kv_cache_tokens and compact.kv_cache_tokens
    gain = compact.kv_cache_tokens / native.kv_cache_tokens - 1
    asked, answered = answers(native), answers(compact)
    same = sum(a == b for a, b in zip(asked, answered, strict=True))

    table = Table(
        title=f"ALTAY's 54 GDN + 16 full-attention layers\nvLLM {native.result['vllm_version']} "
        f"on {native.result['device'].upper()} ({processor_name()})",
        title_justify="left",
    )
    table.add_column()
    table.add_column("native", justify="right")
    table.add_column("compact", justify="right")
    table.add_row("KV cache groups", str(len(before.group_lengths)), str(len(after.group_lengths)))
    table.add_row("slots", str(before.slots), str(after.slots))
    table.add_row("padding", str(before.padding), str(after.padding))
    table.add_row("KV cache tokens", f"{native.kv_cache_tokens:,}", f"{compact.kv_cache_tokens:,}")
    table.add_row("gain", "", f"{gain:+.1%}")
    table.add_row("identical answers", "", f"{same} of {len(asked)}")
    return table


def answers(run: EngineRun) -> list[list[int]]:
    """The token ids of every answer."""
    assert run.result
    return [answer["token_ids"] for batch in run.result["rounds"] for answer in batch]


def excerpt(run: EngineRun) -> str:
    """What the log says about altay-kvfix, and how it ends."""
    lines = run.log.splitlines()
    end = lines[-LOG_TAIL_LINES:]
    ours = [line for line in lines[:-LOG_TAIL_LINES] if "kvfix" in line]
    return "\n".join([*ours, "[...]", *end, f"The complete log: {run.log_file}"])


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@contextlib.contextmanager
def stage(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on and for how long; the function it gives tells a detail.

    A live line on a terminal, otherwise one plain line without details.
    """
    if not console.is_terminal:
        started = time.monotonic()
        console.print(f"{title} ... ", end="")
        console.file.flush()
        try:
            yield lambda detail: None
        except BaseException:
            console.print("failed")
            raise
        console.print(f"{time.monotonic() - started:.0f} s")
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=1, detail="")
        yield lambda detail: progress.update(task, detail=detail)
        progress.update(task, completed=1, detail="")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the effect of altay-kvfix.")
    parser.add_argument(
        "--directory",
        type=Path,
        default=REPOSITORY / ".cache/demo",
        help="for the model, logs, traces",
    )
    directory = parser.parse_args().directory.absolute()

    # As Ctrl-C does, so that no engine outlives the demo.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False)
    try:
        demonstrate(console, directory)
    except DemoFailure as failure:
        # The text is a log's: no markup in it.
        console.print(f"FAILED: {failure}", markup=False, style="red", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the engine has been stopped")
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
