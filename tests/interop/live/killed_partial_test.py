# SPDX-License-Identifier: Apache-2.0
"""A real training run with DeepSpeed on two ranks, with snapshots out of the trainer (PartialCheckpoints) as its only
checkpoints, is killed with SIGKILL at random moments, starts again each time, and ends. After every start the reported
lost tokens are compared with a count made here from the token log and the versions of the experts.

    killed_partial_test.py BIN PACKAGE [--kills N] [--seed N]

In every third round the agent is killed too, as if the node were lost with its memory.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time

import live  # first: it makes the modules of the other tests importable
sys.path.insert(0, str(live.HERE.parent / "pec"))
import commands
import torch
from killed_training_test import CASE, Count, Run, complete, make_engine, train_step

PARTIAL = CASE | {"width": 48}


def train(folder, _load, last, pause):
    """Collective. One iteration a time, each with a snapshot."""
    import shardwright
    engine = make_engine(complete(PARTIAL))
    pec = shardwright.PartialCheckpoints(engine, folder / "store", k=3, command=str(folder / "bin/pec-save"),
                                         flags=["--k-persist", "1", "--policy", "load-aware"],
                                         tokens=folder / "tokens.jsonl")
    loaded = pec.load(threads=1)
    start = engine.global_steps
    if torch.distributed.get_rank() == 0:
        if loaded.restored["iteration"] is not None:
            (folder / "report.part").write_text(json.dumps(loaded.restored))
            (folder / "report.part").rename(folder / "report.json")
        (folder / "started").write_text(str(start))
        (folder / "agent").write_text(pec.agent)
    for iteration in range(start + 1, last + 1):
        train_step(engine, complete(PARTIAL), iteration)
        pec.step()
        time.sleep(pause)
    return pec.close()


class PartialRun(Run):
    """The trainer restores by itself: its report is verified after each round."""

    trains = staticmethod(train)

    def __init__(self, programs, folder, seed):
        self.folder, self.random, self.count = folder, random.Random(seed), Count()
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        (folder / "bin").symlink_to(programs)
        self.lost, self.faults, self.resumes, self.history, self.agent_gone = 0, 0, [], [], False

    def judge(self):
        """The lost tokens of the last start, if it came to a restore."""
        path = self.folder / "report.json"
        if not path.exists():
            return
        result = json.loads(path.read_text())
        path.unlink()
        resume, loss, tokens = result["iteration"], result["loss"], self.log()
        self.history.append((resume, loss["faults"], sorted(result["versions"].values()), result["bytes"]))
        if not set(range(1, resume + 1)) <= set(tokens):
            sys.exit(f"token log after a restore of {resume}: {sorted(tokens)}")
        # A kill may have come after a restore and before its report: then nothing was trained in between, and tokens
        # that it has lost are not lost again. It was of the same state, unless the agent is gone since: then that state
        # is unknown, but it lost no more than this one.
        known = loss["faults"] == self.faults + 1 or not self.agent_gone
        self.agent_gone = False
        while self.faults < loss["faults"]:
            mine = self.count.fault(tokens, resume, result["versions"])
            self.faults += 1
            self.lost += sum(map(sum, mine))
        if known and (loss["lost_by_expert"] != mine or loss["lost"] != [sum(layer) for layer in mine]):
            sys.exit(f"lost tokens of the restore: {loss}\ncounted: {mine}\nrestores: {self.history}")
        self.resumes.append(resume)

    def end_agent(self):
        live.kill(live.agent_pid((self.folder / "agent").read_text()))
        self.agent_gone = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    scratch = commands.Scratch()
    run = PartialRun(UCP.folder, scratch.path, given.seed)
    last, kills = 3 * given.kills + 4, 0
    try:
        while True:
            # Also while it starts, before the first iteration.
            when = (run.random.randrange(0, 4), run.random.uniform(0, 0.6))
            ended = run.train(None, last, when if kills < given.kills else None)
            run.judge()
            if ended:
                break
            kills += 1
            if kills % 3 == 0 and (scratch.path / "agent").exists():
                run.end_agent()
        if kills < given.kills:
            sys.exit(f"the training ended after {kills} of {given.kills} kills")
        UCP.run("pec-save", "check", scratch.path / "store", "-q")
        UCP.run("pec-restore", scratch.path / "store", scratch.path / "out", "--dry-run", f"--json={scratch.path}/last.json")
        result = json.loads((scratch.path / "last.json").read_text())["result"]
        if result["iteration"] != last:
            sys.exit(f"the last snapshot is of iteration {result['iteration']}, training ended at {last}")
        print(f"killed {kills} times, went on from {run.resumes}, ended at {last}; {run.lost} tokens lost as counted")
    finally:
        try:
            run.end_agent()
        except Exception:  # it has ended
            pass
        scratch.close()


if __name__ == "__main__":
    UCP = live.start()
    main()
