"""Evidence: one JSON line per event, appended to ``ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH``.

Several processes write the same file. Each row is a single write to a descriptor opened with
O_APPEND, so rows of different processes do not mix.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def write(path: str, event: str, **fields: Any) -> None:
    """Append one row: ``event``, pid, process name, time (seconds since the epoch), ``fields``.

    The file is created with mode 0600. It is never opened through a symbolic link: in a shared
    directory, a link planted by somebody else would choose what this process appends to.

    Raises:
        OSError: the file can't be opened or written.
    """
    row = {
        "event": event,
        "pid": os.getpid(),
        "process": _process_name(),
        "time": time.time(),
        **fields,
    }
    line = (json.dumps(row) + "\n").encode()
    # O_NONBLOCK: a pipe that nobody reads must fail here, not hang the engine.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(f"only a part of the row could be written to {path}")
    finally:
        os.close(descriptor)


def _process_name() -> str:
    # Where nothing has imported multiprocessing, this is no child of it.
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing.current_process().name if multiprocessing else "MainProcess"
