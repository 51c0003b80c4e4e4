# SPDX-License-Identifier: Apache-2.0
"""Runs a script on ranks of this machine, as torchrun does, but forked after the imports: these take longer than all else.

    fork_ranks.py RANKS MODULES SCRIPT ARGUMENT...

MODULES, with commas between, are imported first. The exit status is 0 if that of every rank is; when one fails the
others, which may wait for it, are ended.
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import traceback


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_rank(rank, world, port, script, arguments):
    """Never returns. Does not run what the modules have registered for the end of the process they were imported in."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    world, modules, script, *arguments = sys.argv[1:]
    for module in modules.split(","):
        importlib.import_module(module)
    port = free_port()
    ranks = set()
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            run_rank(rank, int(world), port, script, arguments)
        ranks.add(child)
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status != 0 and not failed:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
