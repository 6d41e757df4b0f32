"""``altay-kvfix verify TRACE``: read the evidence of a run, and prove what it is asked to prove."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import NO, OK, WRONG_INPUT, Failure, console, new_table, print_json

_APPLIED = ("top_level_active", "private_uniform_active")
_EVENTS = (*_APPLIED, "native", "fallback", "refused", "install_new", "install_reused")


class Requirement(str, Enum):
    COMPACT = "compact"
    """The certified layout."""
    SEARCH = "search"
    """A layout that the capacity search chose, or an operator forced."""
    ANY = "any"
    """One of the two."""


_RULES = {
    Requirement.COMPACT: ("certified",),
    Requirement.SEARCH: ("search", "forced"),
    Requirement.ANY: ("certified", "search", "forced"),
}


@dataclass
class Evidence:
    """The rows of a trace."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    torn: bool = False
    """Whether the last line is incomplete: the process that wrote it was ended."""


@dataclass(frozen=True)
class Verdict:
    engines: list[int]
    """Process ids of the engines, whose plans count."""
    problems: list[str]
    """Why the trace does not prove what is required; none when it does."""


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Example, for 4 data-parallel replicas: "
        "altay-kvfix verify /tmp/kv.jsonl --require compact --engines 4"
    )(verify)


def verify(
    trace: Annotated[Path, typer.Argument(help="What ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH named.")],
    require: Annotated[
        Requirement,
        typer.Option(
            help="The layout that every engine must use: the certified one (compact), one that "
            "the search chose or an operator forced (search), or either (any)."
        ),
    ] = Requirement.ANY,
    groups: Annotated[
        str | None,
        typer.Option(metavar="8,8,...", help="Layers in each group, in any order."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, help="How many engines must have planned.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Prove from the trace of a run which layout its engines use.

    Exits with 1 and the reason when what is required is absent or contradicted: an engine that
    uses another layout than the others, a fallback, a refusal. Give every run a file of its own.
    """
    expected = _parse_groups(groups) if groups is not None else None
    evidence = read(trace)
    verdict = judge(evidence.rows, require, expected, engines)
    if as_json:
        print_json(
            {
                "trace": str(trace),
                "torn_last_line": evidence.torn,
                "require": require.value,
                "proven": not verdict.problems,
                **asdict(verdict),
                "rows": evidence.rows,
            }
        )
    else:
        _print(evidence, verdict, require)
    raise typer.Exit(NO if verdict.problems else OK)


def read(trace: Path) -> Evidence:
    """The rows of ``trace``; none where no process has written the file.

    Raises:
        Failure: the file can't be read, or has a line before the last that is no row.
    """
    try:
        lines = trace.read_bytes().split(b"\n")
    except FileNotFoundError:
        return Evidence()
    except OSError as error:
        raise Failure(f"{trace} can't be read: {error.strerror}", WRONG_INPUT) from error
    evidence = Evidence()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or row.get("event") not in _EVENTS or "pid" not in row:
                raise ValueError
        except ValueError as error:
            if number == len(lines):
                evidence.torn = True
                break
            raise Failure(f"{trace}, line {number}: not a row of a trace", WRONG_INPUT) from error
        evidence.rows.append(row)
    return evidence


def judge(
    rows: Sequence[dict[str, Any]],
    require: Requirement,
    groups: Sequence[int] | None = None,
    engines: int | None = None,
) -> Verdict:
    """Whether ``rows`` prove that every engine uses what is required.

    Args:
        groups: Layers in each group, in any order.
        engines: How many engines must have planned.
    """
    problems = [
        f"{_who(row)} reports a {row['event']}: {row.get('reason')}"
        for row in rows
        if row["event"] in ("fallback", "refused")
    ]
    plans = engine_plans(rows)
    if not plans:
        problems.append("no engine reports a layout" if rows else "the trace is empty or not there")
    for row in plans:
        rule = row.get("rule")
        if row["event"] == "native":
            problems.append(f"{_who(row)} keeps vLLM's own layout: {row.get('reason')}")
        elif row["event"] in _APPLIED and rule not in _RULES[require]:
            problems.append(f"{_who(row)} uses a layout of rule {rule}, not {require.value}")
        if groups is not None and sorted(row["group_lengths"]) != sorted(groups):
            problems.append(
                f"{_who(row)} has groups of {row['group_lengths']} layers, not {list(groups)}"
            )
    layouts = Counter(tuple(row["group_lengths"]) for row in plans)
    if len(layouts) > 1:
        counts = "; ".join(f"{list(lengths)} in {n}" for lengths, n in layouts.items())
        problems.append(f"the engines do not use the same layout: {counts}")
    if engines is not None and len(plans) != engines:
        problems.append(f"{len(plans)} engines planned, not {engines}")
    return Verdict([row["pid"] for row in plans], problems)


def engine_plans(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last plan of each engine process.

    Workers plan a cache that they throw away after profiling. They do not know the memory, so
    where any row has tokens, the rows without are theirs.
    """
    plans = [row for row in rows if "group_lengths" in row]
    if any(row.get("tokens") is not None for row in plans):
        plans = [row for row in plans if row.get("tokens") is not None]
    return list({row["pid"]: row for row in plans}.values())


def _who(row: dict[str, Any]) -> str:
    return f"{row.get('process', 'process')} ({row['pid']})"


def _parse_groups(text: str) -> list[int]:
    try:
        groups = [int(part) for part in text.split(",")]
        if min(groups) < 1:
            raise ValueError
    except ValueError as error:
        raise Failure(
            f"--groups {text!r} is not valid; allowed: whole numbers >= 1, such as 8,8,7",
            WRONG_INPUT,
        ) from error
    return groups


def _print(evidence: Evidence, verdict: Verdict, require: Requirement) -> None:
    out = console()
    table = new_table(
        "process", "pid", "event", "rule", "group lengths", "padding", "tokens", "reason",
        numbers=("pid", "padding", "tokens"),
    )  # fmt: skip
    for row in evidence.rows:
        tokens = row.get("tokens")
        table.add_row(
            *(
                str(cell if cell is not None else "")
                for cell in (
                    row.get("process"),
                    row["pid"],
                    row["event"],
                    row.get("rule"),
                    ",".join(map(str, row.get("group_lengths") or [])),
                    row.get("padding_slots"),
                    f"{tokens:,}" if tokens is not None else None,
                    row.get("reason"),
                )
            )
        )
    if evidence.rows:
        out.print(table)
        out.print()
    if evidence.torn:
        out.print("The last line is torn and was left out: its process was ended while writing.")
    if verdict.problems:
        out.print(f"NOT PROVEN ({require.value}):", style="bold red")
        for problem in verdict.problems:
            out.print(f"  - {problem}", markup=False, soft_wrap=True)
    else:
        pids = ", ".join(map(str, verdict.engines))
        out.print(f"PROVEN ({require.value}), engine processes: {pids}", style="bold green")
