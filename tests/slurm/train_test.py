# SPDX-License-Identifier: Apache-2.0
"""Two real DeepSpeed trainings on two nodes of a real Slurm, started by scripts/slurm/train.sbatch. Nodes lose their power at
random moments, one after the other, and Slurm requeues both jobs each time.

    train_test.py BIN [--failures N] [--seed N]

full: a task of a job array, which is also stopped once by USR1. All losses, also those of iterations that were trained
twice, equal the losses of an uninterrupted run bit for bit.
partial: with a store and an agent. After each restore the lost tokens in the report are compared with a count made here
from the token log and the versions in the report, and training resumes at the report's iteration.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/slurm"))

import cluster

why = cluster.why_not()
if why:
    print(f"skipped: {why}")
    sys.exit(77)

import train_model  # imports torch and DeepSpeed.
import ranks
from killed_training_test import FLAGS, Count

SCRIPTS = ROOT / "scripts/slurm"
PAUSE = 0.2


class Training:
    """A job on two nodes."""

    def __init__(self, slurm, folder, last, words, settings):
        self.slurm, self.folder = slurm, folder
        self.folder.mkdir()
        (folder / "settings.sh").write_text(settings + f"torchrun=('{sys.executable}' -m torch.distributed.run)\n")
        environment = {"TRAIN_SETTINGS": str(folder / "settings.sh"), "TRAIN_CHECKPOINT": str(folder / "ckpt"), "TRAIN_HOOKS": str(SCRIPTS),
                       "TRAIN_RANKS_PER_NODE": "1", "TRAIN_MAX_STALLED": "100", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self.job = slurm.submit(folder, "--nodes=2", "--cpus-per-task=2", "--mem=4G", "--gpus-per-node=0", *words,
                                SCRIPTS / "train.sbatch", sys.executable, ROOT / "tests/slurm/train_model.py", folder, last,
                                PAUSE, environment=environment)

    def said(self):
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("slurm-*.out"))

    def fail(self, text):
        sys.exit(f"{self.job}: {text}\n{self.said()[-8000:]}")

    def logged(self):
        path = self.folder / "losses.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def losses(self):
        lines = (self.folder / "losses.jsonl").read_text().splitlines()
        return [(entry["iteration"], entry["loss"]) for entry in map(json.loads, lines)]

    def until(self, what):
        """Waits until what() is true, as long as the job has not ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        def true_or_over():
            return what() or self.slurm.state(self.job).split()[0] in ended
        cluster.until(true_or_over)
        if not what():
            self.fail(f"the job ended: {self.slurm.state(self.job)}")

    def started(self):
        """Waits until the trainer has loaded its checkpoint. It then waits for `trains`."""
        self.until(lambda: (self.folder / "started").exists() and (self.folder / "started").read_text())

    def trains(self, iterations):
        """Lets the trainer begin, and waits until it has trained some iterations."""
        before = self.logged()
        (self.folder / "go").touch()
        self.until(lambda: self.logged() >= before + iterations)

    def requeued(self):
        """Waits until the job has left its nodes."""
        cluster.until(lambda: self.slurm.state(self.job).split()[0] in ("PENDING", "REQUEUED"))
        for name in ("started", "go"):
            (self.folder / name).unlink(missing_ok=True)

    def ends(self):
        state = self.slurm.ended(self.job)
        if state != "COMPLETED 0:0":
            self.fail(f"ended as {state}")
        return self.said()


class Full(Training):
    """Loads the checkpoints as DeepSpeed saved them."""

    def __init__(self, slurm, folder, last):
        super().__init__(slurm, folder, last, ["--array=3"], "")

    def stop(self):
        self.slurm.on(cluster.CONTROLLER, "scancel", "--batch", "--signal=USR1", f"{self.job}_3", check=True)
        self.requeued()
        if "the command stopped with exit code 75" not in self.said():
            self.fail("USR1 did not stop it")

    def check(self, wanted):
        """\\returns the text for the result"""
        said, losses = self.ends(), self.losses()
        wrong = [(iteration, loss, wanted[iteration]) for iteration, loss in losses if loss != wanted[iteration]]
        if wrong or {iteration for iteration, _ in losses} != set(wanted):
            self.fail(f"losses are not those of the uninterrupted run: {wrong or losses}")
        return (f"full: {len(losses)} losses equal, {len(losses) - len(wanted)} iterations trained twice, "
                f"{said.count('is not complete: loading')} incomplete checkpoints passed over")


class Partial(Training):
    """Saves and restores partial expert checkpoints."""

    def __init__(self, slurm, folder, last):
        super().__init__(slurm, folder, last, [], f"store='{folder}/store'\ntokens='{folder}/tokens.jsonl'\n"
                         f"agent_flags=({' '.join(FLAGS)})\n")
        self.last, self.count, self.lost = last, Count(), 0

    def saved_by_trainer(self):
        """\\returns the iteration of the trainer's own checkpoint, which train.sbatch loads while the store has none"""
        latest = self.folder / "ckpt/latest"
        return int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0

    def restored(self):
        """Compares the report of the newest restore with a count."""
        report = json.loads(next(self.folder.glob("ckpt.report-*.json")).read_text())
        resume, result = report["iteration"], report["result"]
        found = (self.folder / "started").read_text()
        wanted = self.saved_by_trainer() if resume is None else resume
        if found != str(wanted):
            self.fail(f"restored was {resume}, DeepSpeed resumed at {found} instead of {wanted}")
        if resume is None:
            return
        lines = map(json.loads, (self.folder / "tokens.jsonl").read_text().splitlines())
        mine = self.count.fault({entry["iteration"]: entry["tokens"] for entry in lines}, resume, result["versions"])
        if result["loss"]["lost_by_expert"] != mine:
            self.fail(f"lost tokens of the report: {result['loss']}\ncounted: {mine}")
        self.lost += sum(map(sum, mine))

    def check(self):
        """\\returns the text for the result"""
        said, store = self.ends(), self.folder / "store"
        listed = json.loads(self.slurm.on("n1", "pec-save", "list", store, "--json", check=True).stdout)["result"]["checkpoints"]
        if listed[-1]["iteration"] != self.last:
            self.fail(f"the store ends at iteration {listed[-1]['iteration']}, training at {self.last}")
        self.slurm.on("n1", "pec-save", "check", store, "-q", check=True)
        if f"newest global_step{self.last}, agent wrote" not in said:
            self.fail("no summary")
        return f"partial: {self.lost} tokens lost as counted"


def run(slurm, work, failures, chance):
    last = 8 * failures + 8
    wanted = dict(enumerate(ranks.run(2, train_model.train, work, last, 0, None, None)[0], 1))
    full, partial = Full(slurm, work / "full run", last), Partial(slurm, work / "partial run", last)
    for failure in range(failures + 1):
        full.started()
        partial.started()
        partial.restored()
        if failure == failures:
            break
        full.trains(chance.randrange(1, 3))
        partial.trains(chance.randrange(1, 3))
        time.sleep(chance.uniform(0, 0.6))
        node = f"n{1 + failure % 2}"
        slurm.power_off(node)
        full.requeued()
        partial.requeued()
        slurm.power_on(node)
    partial.trains(0)
    full.trains(1)
    full.stop()
    full.started()
    full.trains(0)
    return f"{failures} power losses under 2 jobs, 1 stop; {full.check(wanted)}; {partial.check()}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--failures", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ["PATH"] = f"{given.bin}:{os.environ['PATH']}"
    (pathlib.Path.cwd() / "build").mkdir(exist_ok=True)
    # Not in /tmp or /dev/shm, which each node has for itself.
    work = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir=pathlib.Path.cwd() / "build"))
    slurm = None
    try:
        slurm = cluster.Cluster(work / "cluster", 2)
        print(run(slurm, work, given.failures, random.Random(given.seed)))
    finally:
        if slurm is not None:
            slurm.close()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
