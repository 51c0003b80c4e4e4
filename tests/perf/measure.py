# SPDX-License-Identifier: Apache-2.0
"""Runs commands and measures their time, memory and bytes."""

import os
import pathlib
import shutil
import statistics
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


def moved_bytes():
    """Bytes read and written by this process and by the children that it has waited for, and theirs. Pipes count, mapped
    files do not."""
    counts = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def spread(values, digits=2):
    """The median and the range, as "1.24 (1.16-1.41)"."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def trainer_environment(python):
    """For programs that use DeepSpeed on the CPU, with the commands next to its Python."""
    # Some virtual machines promise AMX tiles, and oneDNN's kernels with them trap.
    return dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", ONEDNN_MAX_CPU_ISA="AVX512_CORE",
                PATH=os.path.dirname(python) + ":" + os.environ["PATH"])


def run_trainer(python, *words):
    """Runs a program that uses DeepSpeed on the CPU; its output, with messages of all ranks."""
    done = subprocess.run(words, env=trainer_environment(python), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        sys.exit(f"{words}: status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def clear(*paths):
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
