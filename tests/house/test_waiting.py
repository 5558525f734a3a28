"""Idle threads make room on a busy machine, and what the user set stays."""

import os
import subprocess
import sys

import pytest

from cast_engine.errors import wait_politely

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_what_the_user_set_stays(monkeypatch, given, count):
    for name in NAMES:
        monkeypatch.setenv(name, given.get(name, ""))  # so that what is set here is undone
        if name not in given:
            monkeypatch.delenv(name)
    wait_politely()
    assert os.environ.get("GOMP_SPINCOUNT") == count
    assert os.environ.get("OMP_WAIT_POLICY") == given.get("OMP_WAIT_POLICY")


@pytest.mark.parametrize("module", ["cast_engine.cli", "trainer.cli"])
def test_commands_do_it_before_torch_is_there(module):
    code = (
        f"import sys, os; import {module} as cli; assert 'torch' not in sys.modules; sys.argv = ['x', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "assert os.environ['GOMP_SPINCOUNT'] == '10000'"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
