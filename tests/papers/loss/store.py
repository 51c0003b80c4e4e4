# SPDX-License-Identifier: Apache-2.0
"""The store of partial checkpoints of one run: the commands that save into it and restore from it."""

import json
import pathlib
import shutil
import subprocess
import time

TIMEOUT = 600  # seconds that a command may take on a busy machine


class Store:
    """A store, and with `levels` 2 an agent that keeps snapshots in memory. Token counts are logged for both."""

    def __init__(self, programs, folder, policy):
        """
        \\param programs folder of pec-save and pec-restore
        \\param folder empty folder of the run
        \\param policy keys policy, k, k_persist, levels and memory: of two levels, "kept" or "lost" at a fault
        """
        self.programs, self.folder, self.policy = pathlib.Path(programs), folder, policy
        self.tokens = folder / "tokens.jsonl"
        self.tokens.touch()
        self.flags = ["--policy", policy["policy"], "--k", policy["k"], "--tokens", self.tokens]
        self.agent = None
        if policy["levels"] == 2:
            self.flags += ["--k-persist", policy["k_persist"]]
            self.start_agent()

    def run(self, name, *words):
        """Runs a command, and raises with its messages if it fails. \\returns the result of its JSON report"""
        report = self.folder / "report.json"
        argv = [self.programs / name, *words, "-q", f"--json={report}"]
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, argv))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(report.read_text())["result"]

    def start_agent(self):
        watched, socket = self.folder / "watched", self.folder / "agent.sock"
        watched.mkdir(exist_ok=True)
        socket.unlink(missing_ok=True)
        argv = [self.programs / "pec-save", "agent", watched, self.folder / "store", "--listen", f"unix:{socket}",
                "-q", *self.flags]
        self.agent = subprocess.Popen(list(map(str, argv)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        end = time.monotonic() + TIMEOUT
        while not socket.exists():
            if self.agent.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the agent does not start")
            time.sleep(0.01)

    def ask_agent(self, request):
        self.run("pec-save", "tell", f"unix:{self.folder / 'agent.sock'}", request)

    def end_agent(self, request):
        """Lets the agent save its snapshots and end (request "stop"), or kills it with its memory (None)."""
        if self.agent is None:
            return
        if request:
            self.ask_agent(request)
        else:
            self.agent.kill()
        self.agent.wait(TIMEOUT)
        self.agent = None

    def log(self, tokens, first, last):
        """Appends the token counts of the iterations after `first` up to `last`."""
        with open(self.tokens, "a", encoding="utf-8") as log:
            for iteration in range(first + 1, last + 1):
                log.write(json.dumps({"iteration": iteration, "tokens": tokens[iteration]}) + "\n")

    def save(self, checkpoint):
        """Saves a part of a DeepSpeed checkpoint, a folder global_stepN."""
        if self.agent is None:
            self.run("pec-save", checkpoint, self.folder / "store", *self.flags)
            return
        # As a trainer writes it: files first, with times of now, then `latest`.
        watched = self.folder / "watched"
        shutil.rmtree(watched / checkpoint.name, ignore_errors=True)
        shutil.copytree(checkpoint, watched / checkpoint.name, copy_function=shutil.copy)
        (watched / "latest").write_text(checkpoint.name)
        self.ask_agent("snapshot")
        self.ask_agent("flush")  # no snapshot is replaced before it is in the store
        for old in watched.glob("global_step*"):
            if old.name != checkpoint.name:
                shutil.rmtree(old)

    def restore(self):
        """Restores after a fault. \\returns the folder that DeepSpeed loads, and the result of the report"""
        agents = []
        lost = self.agent is not None and self.policy["memory"] == "lost"
        if lost:
            self.end_agent(None)
        elif self.agent is not None:
            agents = ["--agents", f"unix:{self.folder / 'agent.sock'}"]
        out = self.folder / "out"
        result = self.run("pec-restore", self.folder / "store", out, "--force", "--restart", "--trim-tokens",
                          self.tokens, *agents)
        if lost:
            self.start_agent()
        return out, result

    def lost_by_the_run(self, checkpoint):
        """Saves all of the last checkpoint, from which a restore loses nothing more.
        \\returns the loss in the report of such a restore: of all faults, relative to the tokens of the whole run"""
        self.end_agent("stop")
        self.run("pec-save", checkpoint, self.folder / "store", "--policy", "full", "--tokens", self.tokens)
        result = self.run("pec-restore", self.folder / "store", self.folder / "end", "--dry-run", "--read-only")
        if any(result["loss"]["lost"]):
            raise RuntimeError(f"a full checkpoint loses tokens: {result['loss']}")
        return result["loss"]
