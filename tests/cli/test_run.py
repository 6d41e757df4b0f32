from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from command_line import REPOSITORY, clean_environment, command

SHOW_PATH = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"{REPOSITORY}"),
        ("", f"{REPOSITORY}"),
        ("/a:/b", f"{REPOSITORY}:/a:/b"),
        ("/a::relative", f"{REPOSITORY}:/a::relative"),
        (f"/a:{REPOSITORY}:/b", f"{REPOSITORY}:/a:/b"),
    ],
)
def test_folder_is_first_and_entries_are_kept(cli, before, after):
    variables = {} if before is None else {"PYTHONPATH": before}
    answer = cli("run", "--", *SHOW_PATH, **variables)
    assert (answer.exit_code, answer.stdout, answer.stderr) == (0, f"{after}\n", "")


def test_command_is_armed(cli):
    look = "import sys; print([f.altay_kvfix for f in sys.meta_path if hasattr(f, 'altay_kvfix')])"
    assert cli("run", sys.executable, "-c", look).stdout == f"[{str(REPOSITORY)!r}]\n"


def test_options_of_the_command_are_its_own(cli):
    show = "import sys; print(sys.argv[1:])"
    answer = cli("run", sys.executable, "-c", show, "serve", "--json", "--help", "--", "-x")
    assert answer.stdout == "['serve', '--json', '--help', '--', '-x']\n"


@pytest.mark.parametrize("code", [0, 1, 3, 137])
def test_exit_code(cli, code):
    assert cli("run", "--", "sh", "-c", f"exit {code}").exit_code == code


def test_same_process_and_signals():
    """The process id is ours, a signal sent to it reaches the command, and kills it as such."""
    process = subprocess.Popen(
        command("run", "--", "sh", "-c", "echo $$; exec sleep 60"),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_signals_are_not_ignored_or_handled(cli):
    """Python ignores SIGPIPE for itself; a command behind `head` must end by it."""
    show = "grep -E 'Sig(Ign|Cgt|Blk)' /proc/self/status"
    plain = subprocess.run(["sh", "-c", show], capture_output=True, text=True).stdout
    assert cli("run", "--", "sh", "-c", show).stdout == plain


def test_ignored_signal_stays_ignored():
    script = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"
    done = subprocess.run(
        command("run", "--", sys.executable, "-c", script),
        env=clean_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n"


def test_command_not_found(cli):
    answer = cli("run", "--", "no-such-command")
    assert (answer.exit_code, answer.stdout) == (127, "")
    assert answer.stderr == "altay-kvfix: no-such-command is not found\n"


def test_command_not_executable(cli, tmp_path):
    (tmp_path / "file").write_text("text")
    answer = cli("run", "--", tmp_path / "file")
    assert answer.exit_code == 126
    assert "Permission denied" in answer.stderr


def test_nothing_to_start(cli):
    answer = cli("run")
    assert answer.exit_code == 2
    assert "example: altay-kvfix run -- vllm serve" in answer.stderr


def test_json_starts_nothing(cli, tmp_path):
    answer = cli("run", "--json", "--", "touch", tmp_path / "file", PYTHONPATH="/a")
    assert answer.report == {
        "command": ["touch", str(tmp_path / "file")],
        "environment": {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}/a"},
    }
    assert not (tmp_path / "file").exists()
