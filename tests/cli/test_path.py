from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from command_line import REPOSITORY, clean_environment


def test_folder_is_printed_alone(cli):
    answer = cli("path")
    assert (answer.exit_code, answer.stdout, answer.stderr) == (0, f"{REPOSITORY}\n", "")


def test_json(cli):
    assert cli("path", "--json").report == {"path": str(REPOSITORY), "others": []}


def test_warns_of_a_folder_that_is_shared(tmp_path: Path):
    shutil.copytree(REPOSITORY / "altay_kvfix", tmp_path / "altay_kvfix")
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "wrapt-2.5.2.dist-info").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "altay_kvfix", "path"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{tmp_path}\n"
    assert "1 other packages live in this folder" in done.stderr
