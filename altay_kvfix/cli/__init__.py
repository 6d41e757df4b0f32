"""The command line: ``altay-kvfix`` and ``python -m altay_kvfix``.

Nothing here is loaded in a vLLM process. It needs typer and rich (the extra ``cli``), which every
vLLM environment has.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(
            f"altay-kvfix: the command line needs {error.name}: pip install 'altay-kvfix[cli]'\n"
        )
        sys.exit(3)
    from .app import run_app

    run_app()
