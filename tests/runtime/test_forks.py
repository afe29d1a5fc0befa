"""The server of forks: what it tells of a process, and that clients that are killed do not end it."""

import os
import signal
import socket
import subprocess

import pytest

from tests import forks


def test_a_fork_has_its_arguments_environment_folder_and_exit_code(tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['WORD'], sys.argv[1:]); sys.stderr.write('x'); sys.exit(7)"
    done = forks.run("-c", code, "a", 3, folder=tmp_path, WORD="here")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path} here ['a', '3']\n", "x")


def test_a_fork_that_is_killed_says_by_which_signal_and_one_that_runs_says_nothing():
    process = forks.start("-c", "import time; time.sleep(600)")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    os.kill(process.pid, signal.SIGTERM)
    assert forks.wait(process) == -signal.SIGTERM


def test_clients_that_end_before_they_have_asked_do_not_end_the_server():
    forks.run("-c", "")
    for half in (b"", (100).to_bytes(8), (100).to_bytes(8) + b"[1"):
        with socket.socket(socket.AF_UNIX) as line, open(os.devnull) as nothing:
            line.connect(forks.serve())
            if half:
                socket.send_fds(line, [half], [nothing.fileno()])
    assert forks.run("-c", "print('still here')").stdout == "still here\n"


def test_descriptors_have_the_numbers_that_are_asked_for_even_high_and_crossing_ones(tmp_path):
    files = {number: tmp_path / str(number) for number in (0, 1, 2, 150, 151)}
    for number, path in files.items():
        path.write_text(str(number))
    opened = {number: os.open(path, os.O_RDWR) for number, path in files.items()}
    names = f"[os.path.basename(os.readlink(f'/proc/self/fd/{{n}}')) for n in {list(files)}]"
    code = f"import os; assert {names} == {list(map(str, files))}"
    process = forks.Process(["-c", code], str(tmp_path), os.environ, opened, job=True)
    for descriptor in opened.values():
        os.close(descriptor)
    assert forks.wait(process) == 0, files[2].read_text()
