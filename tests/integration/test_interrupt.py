"""Ctrl-C at any moment of a command's life is exit code 130 without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from tests.integration.tiny_run import TIMEOUT_SECONDS

HELD = """
import atexit, importlib.abc, runpy, sys, threading, time

moment, sys.argv = sys.argv[1], ["drillyard", *sys.argv[2:]]


def hold():
    print("held", flush=True)
    # A signal just before a long sleep's system call would only be handled after it.
    for _ in range(6000):
        time.sleep(0.1)


class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == moment:
            hold()


sys.meta_path.insert(0, AtImport())
if moment == "atexit":
    atexit.register(hold)
runpy.run_module("drillyard", run_name="__main__", alter_sys=True)
"""
"""The command, held at the import of a module or at the interpreter's end."""


@pytest.mark.parametrize(
    "moment",
    [
        "drillyard.cli.main",
        "typer",
        "drillyard.cli.hardware",
        "drillyard.hardware.catalog",
        "atexit",
    ],
)
def test_an_interrupt_at_any_moment_is_130_without_a_traceback(moment: str) -> None:
    command = [sys.executable, "-c", HELD, moment, "hardware", "h100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "held\n":
        assert line, process.communicate()[1]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, errors) == (130, "")
