from __future__ import annotations

import json
import multiprocessing
import os
import stat

import pytest

from altay_kvfix import trace


def write_many(path, number):
    for i in range(200):
        trace.write(path, "native", number=number, i=i, filler="x" * 500)


def test_rows_say_who_and_when(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.write(str(path), "native", reason="a reason")
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["event"] == "native" and row["reason"] == "a reason"
    assert row["pid"] == os.getpid() and row["process"] == "MainProcess"
    assert abs(row["time"] - path.stat().st_mtime) < 60


def test_rows_of_several_processes_do_not_mix(tmp_path):
    path = tmp_path / "trace.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(path), n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(row["number"], row["i"]) for row in rows} == {
        (n, i) for n in range(3) for i in range(200)
    }
    assert len(rows) == 600


def test_only_the_owner_may_read_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.write(str(path), "native")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_symbolic_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(OSError):
        trace.write(str(link), "native")
    assert not target.exists()


def test_a_pipe_that_nobody_reads_does_not_hang(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError):
        trace.write(str(path), "native")
