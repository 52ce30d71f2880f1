"""Ctrl-C where Python by itself would lose it, abort, or wait: in processes of the command line."""

import signal
import subprocess
import sys
import time

PATIENCE = 60

COMMAND = """
import signal, sys, threading, time
from jaxinfer import __main__, cli

def command(prog_name):
{body}

cli.app = command
__main__.main()
"""

LOST = """
    class Lost:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Lost()
    time.sleep(1000)
"""

THREAD = """
    threading.Thread(target=time.sleep, args=(1000,)).start()
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        time.sleep(0.1)
        print("cleaned up")
"""

EXTENSION = """
import enum, signal, sys

made = enum.EnumType.__call__

def interrupted_once(self, *args, **options):
    if sys.modules.get("jaxlib.mlir._mlir_libs") and enum.EnumType.__call__ is interrupted_once:
        enum.EnumType.__call__ = made
        print("interrupted while an extension makes", args[0], flush=True)
        signal.raise_signal(signal.SIGINT)
    return made(self, *args, **options)

enum.EnumType.__call__ = interrupted_once

from jaxinfer.__main__ import main

sys.argv[1:] = ["info", "examples/demo_model"]
main()
"""


def run(script):
    """Run a script; its output, errors, and whether it ended as if by SIGINT."""
    command = [sys.executable, "-c", script]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    return done.stdout, done.stderr, done.returncode


def test_one_that_is_lost_in_a_callback_comes_again():
    assert run(COMMAND.format(body=LOST)) == ("", "interrupted\n", -signal.SIGINT)


def test_threads_that_go_on_hold_up_nothing_once_all_is_cleaned_up():
    assert run(COMMAND.format(body=THREAD)) == ("cleaned up\n", "interrupted\n", 128 + signal.SIGINT)


def test_one_in_an_extension_that_is_being_imported_waits_for_it():
    """A KeyboardInterrupt there aborts the process: nanobind does so."""
    out, err, status = run(EXTENSION)
    assert out.startswith("interrupted while an extension makes ")
    assert (err, status) == ("interrupted\n", -signal.SIGINT)
