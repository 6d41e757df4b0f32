"""``plan --plot``: capacity and groups by group size, as a picture (matplotlib, extra ``plot``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .common import CANNOT_TELL, WRONG_INPUT, Failure

FORMATS = (".svg", ".png")


def check(file: Path) -> None:
    """Raises :class:`Failure` where ``file`` can't be drawn: before any long work."""
    if file.suffix not in FORMATS:
        raise Failure(f"--plot {file}: allowed: a file that ends in .svg or .png", WRONG_INPUT)
    if not file.absolute().parent.is_dir():
        raise Failure(f"--plot {file}: there is no folder {file.absolute().parent}", WRONG_INPUT)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Failure(
            "--plot needs matplotlib: pip install 'altay-kvfix[plot]'", CANNOT_TELL
        ) from error


def draw(report: dict[str, Any], title: str, file: Path) -> None:
    """Draw the sizes of a report of ``plan``: what they hold as bars, their groups as dots.

    Args:
        report: As printed with ``--json``.
    """
    import matplotlib

    matplotlib.use("Agg")
    # The same picture for the same numbers, byte for byte.
    matplotlib.rcParams["svg.hashsalt"] = "altay-kvfix"
    from matplotlib import pyplot

    sizes = report["sizes"]
    places = range(len(sizes))
    colours = [
        "#2e7d32" if s["is_chosen"] else "#555555" if s["is_native"] else
        "#dddddd" if s["dropped"] else "#90b4d8" for s in sizes
    ]  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(max(6, 0.45 * len(sizes) + 2), 4), layout="constrained")
    axes.bar(places, [1 + s["gain"] for s in sizes], color=colours)
    axes.axhline(1 + report["bound"], color="black", linewidth=0.8)
    axes.set_xticks(places, [str(s["size"]) for s in sizes])
    axes.set_xlabel("group size (green: chosen, dark: vLLM's own, pale: not allowed)")
    axes.set_ylabel("tokens, multiple of vLLM's own; line: bound")
    axes.set_title(title, fontsize="medium")
    groups = axes.twinx()
    groups.plot(places, [s["groups"] for s in sizes], "o", color="#c75b12", markersize=4)
    groups.set_ylabel("groups (dots)", color="#c75b12")
    groups.set_ylim(bottom=0)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
