"""``python -m altay_kvfix``: see :mod:`altay_kvfix.cli`."""

from .cli import main

main()
