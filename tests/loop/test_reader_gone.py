"""`cast-engine ... | head -1` ends without a word."""

import os
import subprocess
import sys

import pytest

from cast_engine.errors import ExitCode, handle_errors
from tests.loop.commands import ENVIRONMENT, MODULES, ROOT


def unread(*args) -> tuple[int, str]:
    """Run a command whose standard output nobody reads; return exit code and standard error."""
    program, *rest = map(str, args)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", MODULES[program], *rest]
    environment = {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("cast-engine", "--help"),
        ("cast-engine", "run", "--help"),
        ("cast-train", "--help"),
        ("cast-engine", "csg", "--show", "two red circles"),
    ],
    ids=str,
)
def test_what_is_only_shown(args):
    assert unread(*args) == (ExitCode.READER_GONE, "")


@pytest.mark.parametrize("command", ["status", "verify", "compare"])
def test_what_is_said_of_a_run(finished, command):
    assert unread("cast-engine", command, finished) == (ExitCode.READER_GONE, "")


def test_the_table_of_a_run_that_is_finished(job, finished):
    code, err = unread("cast-engine", "run", job, "--out", finished)
    assert code == ExitCode.READER_GONE
    assert "nothing to do" in err
    assert "Traceback" not in err


def test_a_pipe_of_our_own_that_breaks_is_a_bug(capsys):
    with pytest.raises(SystemExit) as caught, handle_errors():
        raise BrokenPipeError
    assert caught.value.code == ExitCode.BUG
    assert "Traceback" in capsys.readouterr().err
