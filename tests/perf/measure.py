# SPDX-License-Identifier: Apache-2.0
"""Runs commands and measures their time and memory."""

import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def timed(command, **options):
    """Runs a command; wall seconds and the largest resident set of a process of it, in MiB."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{command}: status {status}\n{errors.decode()[-2000:]}")
    return time.monotonic() - start, usage.ru_maxrss / 1024


def processor_seconds(command):
    """Processor seconds of a command, which other work on the processors changes less than the wall time."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{command}: status {status}")
    return usage.ru_utime + usage.ru_stime


def clear(*paths):
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
