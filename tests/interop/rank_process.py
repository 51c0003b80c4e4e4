# SPDX-License-Identifier: Apache-2.0
"""The life of a rank that is a fork of a test's process."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback


def become(log, live):
    """Runs live() with the output of this process in the file `log`, and ends the process: with 0 unless live() raises. Never
    returns, and runs nothing that the parent has registered for its end. Processes that live() has started with multiprocessing are killed. SIGUSR1 prints where all
    threads are."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        live()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def wait_for_any():
    """Waits until a child has ended that leads a process group of its own, and kills what it has left in that group:
    its pid and status."""
    pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return pid, os.waitpid(pid, 0)[1]


def name_rank(rank, ranks):
    """Sets the variables that launchers set."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
