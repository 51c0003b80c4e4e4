# SPDX-License-Identifier: Apache-2.0
"""Nodes of an elastic run, simulated on one machine: each is a launcher with its own memory and training processes."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

import rank_process

HERE = pathlib.Path(__file__).resolve().parent
MARK = "SW_TEST_NODE"  # variable in the environment of all processes of a node
RENDEZVOUS = "is_host=0,join_timeout=600,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=10,read_timeout=60"


def processes_of(mark):
    """The processes of a node."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


class Cluster:
    """A controller and nodes. Leaving the context kills all of them.

    folder: scratch folder, with the folder of the run and the logs. bin, package: folders of the commands and of the Python package.
    """

    def __init__(self, folder, bin, package, steps, *flags, nodes="2:4"):
        self.folder, self.run = folder, folder / "run"
        self._bin, self._steps, self._flags, self._nnodes = bin, steps, flags, nodes
        self.losses = folder / "losses.jsonl"
        self._environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                             "TMPDIR": str(folder)}
        self.launchers = {}  # {name: process id}
        self._port = None

    def __enter__(self):
        self.run.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._start("controller", ["controller", f"127.0.0.1:{self._port}"], False)
        wait(lambda: "listening" in self.log("controller"), 120, lambda: self.log("controller"))
        return self

    def __exit__(self, *_):
        for name in list(self.launchers):
            self.kill(name)

    def _start(self, name, words, program):
        """program: as users start it. Otherwise a fork of this process, which has imported everything."""
        path, environment = self.folder / f"{name}.log", {**self._environment, MARK: f"{self.folder}/{name}"}
        if program:
            with path.open("w") as log:
                self.launchers[name] = os.posix_spawn(
                    sys.executable, [sys.executable, "-m", "shardwright.elastic", *words], environment,
                    file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)])
            return

        def live():
            from shardwright._elastic_node import main
            os.environ.update(environment)
            os.chdir(self.folder)
            if main(words) != 0:
                raise SystemExit(1)

        path.touch()
        pid = os.fork()
        if pid == 0:
            rank_process.become(path, live)
        self.launchers[name] = pid

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start(self, name, program=False):
        """Starts a node."""
        self._start(name, ["node", "--name", name, "--nnodes", self._nnodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "job", "--rdzv-conf", RENDEZVOUS, "--max-restarts",
                           "1000", "--local-addr", "127.0.0.1", str(HERE / "train.py"), str(self.run), str(self._steps), "--losses",
                           str(self.losses), "--command", str(self._bin / "moe-replace"), *self._flags], program)

    def kill(self, name):
        """Kills all processes of a node at once, with its memory. Returns the time."""
        killed = time.time()
        while True:
            launcher = self.launchers.pop(name, None)
            # The launcher first: it must not start further processes. A fork has the environment of this process in /proc.
            found = [*([] if launcher is None else [launcher]), *processes_of(f"{self.folder}/{name}")]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if launcher is not None:
                os.waitpid(launcher, 0)
            elif not found:
                return killed
            time.sleep(0.01)

    def lines(self, path):
        """The whole lines of a file, as objects."""
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def restarts(self):
        return self.lines(self.run / "restarts.jsonl")

    def made(self):
        """The number of steps that were made, those that were made again included."""
        return len(self.lines(self.losses))

    def last_step(self):
        return max((line["step"] for line in self.lines(self.losses)), default=-1)

    def logs(self):
        """The ends of all logs, for a failed test."""
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def wait(self, condition, seconds):
        wait(condition, seconds, self.logs)

    def hide_checkpoints(self):
        """Moves all checkpoints away."""
        for path in self.run.glob("step-*"):
            shutil.move(path, self.folder / f"hidden-{path.name}")

    def show_checkpoints(self):
        for path in self.folder.glob("hidden-*"):
            shutil.move(path, self.run / path.name.removeprefix("hidden-"))


def wait(condition, seconds, report):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"nothing after {seconds} s\n{report()}")
        time.sleep(0.05)
