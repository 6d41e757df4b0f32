"""``altay-kvfix plan``: what each group size would give, before any GPU is rented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings import (
    DISABLE_ENV_NAME,
    PLAN_TOKENS_ENV_NAME,
    TRACE_ENV_NAME,
    Settings,
)
from . import chart, families
from .common import (
    CANNOT_TELL,
    FOLDER,
    OK,
    WRONG_INPUT,
    Failure,
    console,
    new_table,
    print_json,
    process_group,
    progress,
    python_path_with,
)

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BAR_CELLS = 24
_NARROW_BAR_CELLS = 12
_NARROW = 120
"""On a terminal with fewer columns some of the table is left out."""
_LOG_TAIL_LINES = 15

_MODEL = "With MODEL_DIR"
_FAMILIES = "With --family"


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples: altay-kvfix plan ./Qwen3-Next-80B --kv-memory 40GiB --plot sizes.svg; "
        "altay-kvfix plan ./MODEL --gpu-memory 80GiB --tensor-parallel-size 4; "
        "altay-kvfix plan --family full:16 --family gdn:48 --family sliding:5:window=2048:draft=5 "
        "--block-size 1648 --max-model-len 262144"
    )(plan)


def plan(
    model_dir: Annotated[
        Path | None, typer.Argument(help="A folder with the model's config.json; no weights.")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:LAYERS", help=f"Instead of a model. {families.SYNTAX}."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens; by default the model's own.")
    ] = None,
    request_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Length of the requests to optimise for, as {PLAN_TOKENS_ENV_NAME}; by default "
            "max_model_len.",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For the KV cache on each GPU, e.g. 40GiB.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of each GPU. What is left of it for the KV cache is estimated."
        ),
    ] = None,
    utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the GPU memory that vLLM may use.")
    ] = 0.9,
    weights: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of all weights, where --gpu-memory is given."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block; vLLM may raise it.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one step.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option(help="By default as vLLM decides for the model.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, rich_help_panel=_MODEL)] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, rich_help_panel=_MODEL)] = 1,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="As in vLLM, e.g. fp8.", rich_help_panel=_MODEL)
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='As in vLLM: \'{"method": "mtp", "num_speculative_tokens": 2}\'.',
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the model's own code.", rich_help_panel=_MODEL
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show vLLM's log on stderr.", rich_help_panel=_MODEL),
    ] = False,
    speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Drafted in one step.", rich_help_panel=_FAMILIES)
    ] = 0,
    kv_heads: Annotated[
        int, typer.Option(min=1, help="KV heads on a GPU.", rich_help_panel=_FAMILIES)
    ] = 2,
    head_size: Annotated[int, typer.Option(min=1, rich_help_panel=_FAMILIES)] = 256,
    kv_bytes: Annotated[
        int, typer.Option(min=1, help="Of a KV cache element.", rich_help_panel=_FAMILIES)
    ] = 2,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it, as .svg or .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show what each KV cache group size would give a model, and which one is chosen and why.

    The installed vLLM builds the model's layers without weights and without a GPU, and plans them
    with altay-kvfix in place; the settings are read from the environment, as by an engine. Without
    MODEL_DIR the model is given by its families, and vLLM is not needed.
    """
    if (model_dir is None) == (not family):
        raise Failure("give either MODEL_DIR or --family (see --help)", WRONG_INPUT)
    if plot is not None:
        chart.check(plot)
    memory = _size("--kv-memory", kv_memory)
    gpu_bytes = _size("--gpu-memory", gpu_memory)
    weight_bytes = _size("--weights", weights)
    if memory is not None and gpu_bytes is not None:
        raise Failure("give either --kv-memory or --gpu-memory", WRONG_INPUT)
    environment = dict(os.environ)
    if request_tokens is not None:
        environment[PLAN_TOKENS_ENV_NAME] = str(request_tokens)

    if family:
        if block_size is None or max_model_len is None:
            raise Failure("--family needs --block-size and --max-model-len", WRONG_INPUT)
        if gpu_bytes is not None:
            raise Failure("--family needs --kv-memory instead of --gpu-memory", WRONG_INPUT)
        shapes = families.Shapes(
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens or 8192,
            speculative_tokens=speculative_tokens,
            prefix_caching=prefix_caching is not False,
            page_bytes=block_size * kv_heads * 2 * head_size * kv_bytes,
        )
        table = families.plan_families(
            [families.parse_family(text) for text in family],
            shapes,
            Settings.from_environ(environment),
            memory,
            max_num_seqs or 1,
        )
        # Through JSON, so that what is printed and drawn is the same with and without a model.
        report = json.loads(json.dumps({"model": None, "notes": [], **asdict(table)}))
        title = " + ".join(f"{row['layers']} {row['kind']}" for row in report["families"])
    else:
        assert model_dir is not None
        if not (model_dir / "config.json").is_file():
            raise Failure(f"{model_dir} is no model folder: it has no config.json", WRONG_INPUT)
        arguments = {
            "max_model_len": max_model_len,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": prefix_caching,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "kv_cache_dtype": kv_cache_dtype,
            "speculative_config": _json_object("--speculative-config", speculative_config),
            "trust_remote_code": trust_remote_code or None,
        }
        report = _ask_vllm(
            {
                "model": str(model_dir.resolve()),
                "engine_arguments": {k: v for k, v in arguments.items() if v is not None},
                "kv_memory": memory,
                "gpu_memory": None if gpu_bytes is None else int(gpu_bytes * utilization),
                "weights": weight_bytes,
            },
            environment,
            verbose,
        )
        title = model_dir.resolve().name

    if Settings.from_environ(os.environ).disabled:
        report["notes"].append(
            f"{DISABLE_ENV_NAME} is set here: an engine started from this shell would keep "
            "vLLM's own layout"
        )
    if as_json:
        print_json(report)
    else:
        _print(report, title)
    if plot is not None:
        if not report["sizes"]:
            raise Failure("--plot: there are no group sizes to draw, see the reason", CANNOT_TELL)
        chart.draw(report, title, plot)
    raise typer.Exit(OK)


def _ask_vllm(question: dict[str, Any], environment: dict[str, str], verbose: bool) -> Any:
    """Have :mod:`vllm_model` answer in a process of its own.

    Raises:
        Failure: with its reason, or with the end of vLLM's log where it died without one.
    """
    # This process decides whether it plans, not the variables of the shell; and evidence is about
    # engines.
    environment = {
        k: v for k, v in environment.items() if k not in (DISABLE_ENV_NAME, TRACE_ENV_NAME)
    }
    environment |= {
        "PYTHONPATH": python_path_with(FOLDER, environment.get("PYTHONPATH")),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "altay_kvfix.cli.vllm_model"]
    answer: dict[str, Any] = {}
    with (
        progress("planning with vLLM") as show,
        tempfile.TemporaryFile() as log,
        process_group(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else log,
        ) as process,
    ):
        assert process.stdin and process.stdout
        with process.stdin:
            json.dump(question, process.stdin)
        for line in process.stdout:
            answer = json.loads(line)
            if "step" in answer:
                show(answer["step"])
        if "report" in answer:
            return answer["report"]
        if "error" in answer:
            raise Failure(answer["error"], WRONG_INPUT if answer["wrong_input"] else CANNOT_TELL)
        process.wait()
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    raise Failure("\n".join([f"vLLM ended with exit code {process.returncode}:", *tail]))


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise Failure(
            f"{option} {text!r} is not valid; allowed: a number of bytes, or with a unit such as "
            "40GiB or 40GB",
            WRONG_INPUT,
        )
    return int(float(found[1]) * _UNITS[found[2]])


def _json_object(option: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise Failure(f"{option} {text!r} is no JSON object: {error}", WRONG_INPUT) from error
    return value


# --- for a person ------------------------------------------------------------------------------


def _print(report: dict[str, Any], title: str) -> None:
    out = console()
    facts = [
        f"requests of {report['request_tokens']:,} tokens, max_model_len "
        f"{report['max_model_len']:,}"
    ]
    if report["block_size"]:
        facts.append(f"blocks of {report['block_size']:,} tokens")
    if report["kv_memory_bytes"]:
        facts.append(f"KV cache {report['kv_memory_bytes'] / 2**30:.1f} GiB per GPU")
    if report["model"]:
        facts.append(f"{report['architecture']}, KV cache {report['kv_cache_dtype']}")
        facts.append(f"vLLM {report['vllm_version']} ({report['platform']})")
        sizes = report["tensor_parallel_size"], report["pipeline_parallel_size"]
        if sizes != (1, 1):
            facts.append("tensor parallel {}, pipeline parallel {}".format(*sizes))
    out.print(title, style="bold", markup=False)
    out.print("; ".join(facts), markup=False)
    out.print()
    if report["sizes"]:
        _print_sizes(report)
        out.print()
    _print_decision(report)
    for warning in report["warnings"]:
        out.print(f"Warning: {warning}", markup=False, soft_wrap=True)
    for note in report["notes"]:
        out.print(f"Note: {note}", markup=False, soft_wrap=True)


def _print_sizes(report: dict[str, Any]) -> None:
    out = console()
    families_table = new_table(
        "family", "layers", "of the drafter", "blocks per request and group",
        numbers=("layers", "of the drafter", "blocks per request and group"),
    )  # fmt: skip
    for row in report["families"]:
        families_table.add_row(
            row["kind"],
            str(row["layers"]),
            str(row["draft_layers"] or ""),
            f"{row['blocks_per_request']:,}",
        )
    out.print(families_table)
    out.print()

    narrow = out.width < _NARROW
    has_memory = any(row["tokens"] is not None for row in report["sizes"])
    columns = ["", "size", "groups", "padding", "where", "blocks"]
    columns += ["tokens", "requests"] if has_memory else []
    columns += ["KiB/token", "gain", "held"]
    if narrow:
        columns = [c for c in columns if c not in ("where", "requests", "KiB/token")]
    texts = ("where", "held")
    table = new_table(*columns, numbers=[c for c in columns if c and c not in texts])
    table.columns[0].no_wrap = True
    widest = max(1 + row["gain"] for row in report["sizes"])
    bar_cells = _NARROW_BAR_CELLS if narrow else _BAR_CELLS
    remarks = []
    for row in report["sizes"]:
        where = ", ".join(
            f"{n} {family['kind']}"
            for n, family in zip(row["padding_by_family"], report["families"], strict=True)
            if n
        )
        mark = "->" if row["is_chosen"] else "vLLM" if row["is_native"] else ""
        if row["is_chosen"] and row["is_native"]:
            mark = "-> vLLM"
        cells = {
            "": mark,
            "size": str(row["size"]),
            "groups": str(row["groups"]),
            "padding": str(row["padding"]),
            "where": where,
            "blocks": f"{row['blocks_per_request']:,}",
            "KiB/token": f"{row['bytes_per_token'] / 1024:.1f}",
            "gain": f"{row['gain']:+.1%}",
            "held": "█" * round(bar_cells * (1 + row["gain"]) / widest),
        }
        if has_memory:
            cells |= {"tokens": f"{row['tokens']:,}", "requests": f"{row['concurrency']:.2f}"}
        style = "bold green" if row["is_chosen"] else "dim" if row["dropped"] else None
        table.add_row(*(cells[column] for column in columns), style=style)
        if row["dropped"]:
            remarks.append((row["size"], row["dropped"]))
    out.print(table)
    out.print()
    out.print("blocks, KiB/token: of one request. held: tokens, beside the best size's.")
    if narrow:
        out.print("A terminal of 120 columns also shows where the padding lands.")
    out.print(f"No layout can gain more than {report['bound']:+.1%}.")
    reasons: dict[str, list[tuple[int, str]]] = {}
    for size, reason in remarks:
        # What differs between sizes is in the table; one line per kind of reason is enough.
        kind = re.sub(r"[\d.,]+%?", "", reason)
        reasons.setdefault(kind, []).append((size, reason))
    for same in reasons.values():
        sizes = ", ".join(str(size) for size, _ in same)
        size, reason = same[0]
        which = f" (size {size})" if len(same) > 1 else ""
        out.print(f"Not allowed: size {sizes}: {reason}{which}", soft_wrap=True)


def _print_decision(report: dict[str, Any]) -> None:
    out = console()
    chosen = next((row for row in report["sizes"] if row["is_chosen"]), None)
    heads = {
        "apply": f"Chosen ({report['rule']}): ",
        "native": "vLLM's own layout is kept: ",
        "fallback": "vLLM's own layout is kept, although another one was wanted: ",
        "refuse": "The engine would refuse to start: ",
    }
    head = heads[report["outcome"]]
    if report["outcome"] == "apply" and chosen:
        head += f"group size {chosen['size']}, {chosen['groups']} groups, {chosen['gain']:+.1%}; "
    out.print(head + report["reason"], style="bold", markup=False, soft_wrap=True)
