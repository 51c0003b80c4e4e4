# SPDX-License-Identifier: Apache-2.0
"""A real training run with DeepSpeed continues for long while its processes, its agent and the agent that keeps copies
on another node are killed at random moments, alone or together; the hooks of scripts/slurm start it again each time.

    soak_test.py BIN [--minutes M] [--seed N]

After each kill: the restore goes back to no earlier iteration than the newest that an agent still alive has answered for,
or that the store has; lost tokens of its report are those that are counted here (killed_training_test.py); the same is
restored into another layout, and ucp-load finds all tensors of the two equal. Every agent's memory and open files, looked
at after each round, are those of its first rounds. At the end the store passes its check.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import killed_training_test as killed

TARGETS = ("ep=1", "ep=4,dp=4", "dp=1,ep=1", "zero=1", "dp=4", "ep=4,dp=8,zero=1")
# Rounds of an agent's life that define its limits: its pools are full by then.
WARM = 3
MEMORY_SLACK = 8 << 20
FILES_SLACK = 4


def train(folder, load, last, pause):
    """As killed_training_test, and notes each iteration that the agent has answered for. Collective."""
    real = killed.subprocess.run

    def noted(words, **options):
        done = real(words, **options)
        if pathlib.Path(words[0]).name == "pec-save-hook.sh":
            newest = (folder / "ckpt" / "latest").read_text().strip()
            (folder / "taken").write_text(newest.removeprefix("global_step"))
        return done

    killed.subprocess.run = noted
    return killed.train(folder, load, last, pause)


class Life:
    """Memory and open files of one agent, as long as it lives."""

    def __init__(self, name, pid):
        self.name, self.pid, self.seen = name, pid, []

    def look(self):
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) << 10
        self.seen.append((resident, len(os.listdir(f"/proc/{self.pid}/fd"))))

    def judge(self, lives):
        """Exits if the agent takes more than `lives` in their first rounds. \\returns True if it lived long enough to
        compare"""
        if len(self.seen) < 2 * WARM:
            return False
        memory, files = (max(one[i] for life in lives for one in life.seen[:WARM]) for i in (0, 1))
        late_memory, late_files = (max(one[i] for one in self.seen[-WARM:]) for i in (0, 1))
        if late_memory > memory * 1.1 + MEMORY_SLACK:
            sys.exit(f"{self.name}: {memory} bytes in first {WARM} rounds, {late_memory} in the last of {len(self.seen)}")
        if late_files > files + FILES_SLACK:
            sys.exit(f"{self.name}: {files} open files in first {WARM} rounds, {late_files} in the last of {len(self.seen)}")
        return True


class Soak(killed.Run):
    trains = staticmethod(train)

    def __init__(self, programs, folder, seed):
        super().__init__(programs, folder, seed)
        self.lives, self.ended, self.judged, self.layouts = {}, [], 0, 0
        self.kills = {"trainer": 0, "agent": 0, "peer": 0}

    def sockets(self):
        return {"agent": self.folder / "sock", "peer": self.folder / "peer"}

    def start(self):
        """Both agents, where they do not run; the peer first, so that the other finds it. What a lost agent has not saved
        its peer saves, by its own flags, so that they are the same."""
        sockets = self.sockets()
        flags = (self.folder / "ckpt", self.folder / "store", *killed.FLAGS, "--tokens", self.folder / "tokens.jsonl")
        self.hook("pec-agent.sh", "start", sockets["peer"], *flags, "--copies-only")
        self.hook("pec-agent.sh", "start", sockets["agent"], *flags, "--name", "own",
                  "--peer", f"unix:{sockets['peer']}")
        for name, socket in sockets.items():
            pid = int(pathlib.Path(f"{socket}.pid").read_text())
            if name not in self.lives or self.lives[name].pid != pid:
                self.lives[name] = Life(name, pid)

    def kill(self, name):
        life = self.lives.pop(name)
        os.kill(life.pid, signal.SIGKILL)
        stat = pathlib.Path(f"/proc/{life.pid}/stat")
        while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        self.judge(life)
        self.kills[name] += 1

    def judge(self, life):
        """A peer that saves in the place of a lost agent takes what agents take, from then on."""
        self.ended.append(life)
        self.judged += life.judge([life] if life.name == "agent" else [*self.ended, *self.lives.values()])

    def look(self):
        for life in self.lives.values():
            life.look()

    def in_store(self):
        """The newest iteration that the store has, 0 without one."""
        done = subprocess.run(["pec-save", "list", self.folder / "store", "-q", "--json"], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            return 0
        checkpoints = json.loads(done.stdout)["result"]["checkpoints"]
        return max((one["iteration"] for one in checkpoints if not one["abandoned"]), default=0)

    def agents(self):
        return [word for socket in self.sockets().values() for word in ("--agents", f"unix:{socket}")]

    def hook(self, name, *words):
        more = ("--agents", f"unix:{self.folder / 'peer'}") if name == "pec-restore-hook.sh" else ()
        return super().hook(name, *words, *more)

    def restore_elsewhere(self, resume):
        """The same state in another layout holds the same tensors."""
        target, other = self.random.choice(TARGETS), self.folder / "other"
        words = ["pec-restore", self.folder / "store", other, "--force", "-q", "--read-only", "--at", str(resume), "--target", target,
                 *self.agents(), "--lost-nodes", "unreachable"]
        for words in (words, ["ucp-load", "--check", self.folder / "out", other, "-q"]):
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=killed.SLOWEST, check=False)
            if done.returncode != 0:
                sys.exit(f"iteration {resume} to {target}: {words[0]} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        self.layouts += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-soak-"))
    run = Soak(given.bin, folder, given.seed)
    end = time.monotonic() + 60 * given.minutes
    least = 0
    try:
        while True:
            load, resume = run.restore()
            if resume < least:
                sys.exit(f"restored was iteration {resume}, {least} was there (killed {run.kills})")
            if load:
                run.restore_elsewhere(resume)
            run.look()  # with nothing under way: a restore waits until all is saved
            over = time.monotonic() > end
            run.start()
            (folder / "taken").write_text(str(resume))
            when = None if over else (run.random.randrange(0, 6), run.random.uniform(0, 0.6))
            run.train(load, resume + 3 if over else 1 << 30, when)
            started = folder / "started"
            if started.exists() and started.read_text() not in ("", str(resume)):
                sys.exit(f"DeepSpeed went on from {started.read_text()}, restored was {resume}")
            if over:
                break
            run.kills["trainer"] += 1
            # Acknowledged snapshots are in the agent's memory; a peer may not have them yet.
            least = int((folder / "taken").read_text() or 0)
            if run.random.random() < 0.15:
                run.kill("agent")
                least = run.in_store()
            if run.random.random() < 0.1:
                run.kill("peer")
        for life in run.lives.values():
            run.judge(life)
        for socket in (run.sockets()["agent"], run.sockets()["peer"]):
            run.hook("pec-agent.sh", "stop", socket)
        subprocess.run(["pec-save", "check", folder / "store", "-q"], check=True, stdout=subprocess.DEVNULL)
        load, last = run.restore()
        if last != resume + 3:
            sys.exit(f"the last snapshot is of iteration {last}, training ended at {resume + 3}")
        print(f"{given.minutes:g} minutes, killed {run.kills}, {len(run.resumes)} restores, ended at iteration {last}; {run.layouts} "
              f"restores into other layouts equal; {run.lost} tokens lost as counted; bytes {run.sources}; "
              f"{run.judged} lives of agents without growth")
    finally:
        for socket in run.sockets().values():
            try:
                os.kill(int(pathlib.Path(f"{socket}.pid").read_text()), signal.SIGKILL)
            except (OSError, ValueError):
                pass
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
