# SPDX-License-Identifier: Apache-2.0
"""The processes of an elastic run outside of its trainers: the launcher of a node, and the controller: docs/elastic.md."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ._node_memory import NodeMemory

MEMORY = "SHARDWRIGHT_NODE_MEMORY"  # socket file of the node's memory
NODE = "SHARDWRIGHT_NODE"  # name of the node, new at each start of its launcher
CONTROLLER = "SHARDWRIGHT_CONTROLLER"  # HOST:PORT
JOB = "SHARDWRIGHT_JOB"  # --rdzv-id of torchrun
STALLED = 30  # seconds without a step after which a node joins without being called
POLL = 0.2  # seconds between two looks at the controller
RETRIES, LASTING = 20, 60  # failed meetings in a row until a launcher ends; seconds after which a failure counts as the first
BACKEND = "shardwright"  # name of the rendezvous below in torchrun

USAGE = """Usage: python -m shardwright.elastic controller HOST:PORT
       python -m shardwright.elastic node [--name NAME] TORCHRUN-ARGUMENTS

controller  runs the rendezvous store of the nodes. It must outlive them. It has no authentication.
node        runs torchrun with these arguments, and keeps the states of the node's ranks in memory. Required among them:
            --nnodes MIN:MAX --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id JOB --rdzv-conf is_host=0
            If the job is running, the node waits until the trainers admit it.

Documentation: elastic.md in shardwright.DOCS
"""


class _Keys:
    """Keys of a job at the controller."""

    def __init__(self, address: str, job: str) -> None:
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=datetime.timedelta(seconds=30))
        self._store = dist.PrefixStore(f"shardwright/{job}", store)

    def get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, count: int) -> int:
        return self._store.add(key, count)


class Steps:
    """Rank 0's reports to the controller. wait: seconds between the first node that wants to join and the call to all of them."""

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._first: float | None = None
        self._keys = _Keys(os.environ[CONTROLLER], os.environ[JOB])

    def made(self, iteration: int, boundary: bool) -> None:
        """Records a step. boundary: nodes may join after it."""
        self._keys.set("step", f"{iteration} {time.time()}")
        if not boundary:
            return
        waiting = self._keys.add("waiting", 0)
        if str(waiting) == (self._keys.get("called") or "0"):
            self._first = None
            return
        if self._first is None:
            self._first = time.monotonic()
        if time.monotonic() - self._first >= self._wait:
            self._keys.set("called", str(waiting))
            self._first = None

    def done(self) -> None:
        """Records the end of the run: nodes that wait end."""
        self._keys.set("done", "1")


def _await_call(keys: _Keys) -> bool:
    """Waits until the trainers of a running job call this node. Returns false if the job is done."""
    step = keys.get("step")
    if step == "":
        return True
    number, since = keys.add("waiting", 1), time.monotonic()
    while not keys.get("done"):
        if int(keys.get("called") or 0) >= number:
            return True
        now = keys.get("step")
        if now != step:
            step, since = now, time.monotonic()
        if time.monotonic() - since > STALLED:  # the trainers are being restarted, or wait for more nodes
            return True
        time.sleep(POLL)
    return False


def _rendezvous(params: Any) -> Any:
    """Creates torchrun's rendezvous c10d. A launcher that leaves it does not close it for the other nodes, as torchrun's own does
    after an error."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)

    def leave() -> bool:
        handler._stop_heartbeats()  # the other nodes then take this one for lost
        return True

    handler.shutdown = leave  # type: ignore[method-assign]
    handler.get_backend = lambda: BACKEND  # type: ignore[method-assign]
    return handler


def _node(words: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    named = len(words) > 1 and words[0] == "--name"
    name, rest = (words[1], list(words[2:])) if named else (socket.gethostname(), list(words))
    given = run.parse_args(rest)
    if given.rdzv_backend != "c10d" or not given.rdzv_endpoint or given.rdzv_id == "none":
        print(f"--rdzv-backend c10d, --rdzv-endpoint and --rdzv-id are required\n{USAGE}", file=sys.stderr)
        return 2
    folder = tempfile.mkdtemp(prefix="shardwright-node-")
    try:
        path = os.path.join(folder, "memory.sock")
        memory = NodeMemory(path)  # noqa: F841: lives as long as this process
        # Every round gets a new store: torchrun's shared one has addresses of dead processes, and launchers that have counted
        # different numbers of restarts use different keys in it.
        os.environ.update({MEMORY: path, NODE: f"{name}-{uuid.uuid4().hex[:8]}", CONTROLLER: given.rdzv_endpoint,
                           JOB: given.rdzv_id, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        keys = _Keys(given.rdzv_endpoint, given.rdzv_id)
        if not _await_call(keys):
            print(f"{given.rdzv_id}: the job is done", file=sys.stderr)
            return 0
        rendezvous_handler_registry.register(BACKEND, _rendezvous)
        failures = 0
        while True:
            given, began = run.parse_args(rest), time.monotonic()
            given.rdzv_backend = BACKEND
            try:
                run.run(given)
                return 0
            except ChildFailedError as error:  # more than --max-restarts
                print(error, file=sys.stderr)
                return 1
            except SignalException as error:
                return 128 + error.sigval
            except Exception as error:  # a node was lost while the others met: the states in memory are still there
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                failures = failures + 1 if time.monotonic() - began < LASTING else 1
                if keys.get("done") or failures > RETRIES:
                    return 1
                time.sleep(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _controller(address: str) -> int:
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(f"listening at {host}:{store.port}", flush=True)
    signal.pause()
    return 0


def main(words: Sequence[str]) -> int:
    """Runs a command of `python -m shardwright.elastic` and returns its exit code. Local."""
    words = list(words)
    if len(words) == 2 and words[0] == "controller" and words[1].rpartition(":")[2].isdigit():
        return _controller(words[1])
    if words and words[0] == "node":
        return _node(words[1:])
    print(USAGE, end="", file=sys.stdout if words in (["-h"], ["--help"]) else sys.stderr)
    return 0 if words in (["-h"], ["--help"]) else 2
