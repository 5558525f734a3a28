"""Asking for help costs no import of anything heavy."""

import time

import pytest

from tests.loop.commands import spawn


@pytest.mark.parametrize("args", [("cast-engine",), ("cast-train",), ("cast-engine", "run")])
def test_help_takes_less_than_a_second(args):
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        result = spawn(*args, "--help")
        seconds.append(time.monotonic() - started)
        assert result.code == 0, result.err
        assert "Usage:" in result.out
    assert min(seconds) < 1
