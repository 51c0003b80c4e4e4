# SPDX-License-Identifier: Apache-2.0
"""A real training run with DeepSpeed on two ranks is killed with SIGKILL at random moments, started
again by the hooks of scripts/slurm each time, and ends. After every restore the report's lost tokens
are compared with a count made here from the token log and the versions in the report; DeepSpeed must
continue from the report's iteration.

    killed_training_test.py BIN [--kills N] [--seed N]

In every third round the agent is killed too, as if the node were lost with its memory.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "interop" / "deepspeed"))

import ranks  # pylint: disable=wrong-import-position
import torch
from model import complete, make_engine, train_step

CASE = {"zero": 2, "experts": 8, "ep": 2, "width": 16, "batch": 16}
LAYERS, EXPERTS = 2, 8
HOOKS = ROOT / "scripts" / "slurm"
FLAGS = ["--k", "3", "--k-persist", "1", "--policy", "load-aware"]
SLOWEST = 2400  # seconds that a start, a snapshot or a step may take on a busy machine


def train(folder, load, last, pause):
    """Collective. One iteration a time: tokens, checkpoint, hook.
    \\returns the iteration that it continued from"""
    engine = make_engine(complete(CASE))
    counts = {}
    for index, block in enumerate(engine.module.blocks):
        block.moe.register_forward_hook(
            lambda _module, _inputs, output, index=index: counts.__setitem__(index, output[2]))
    if load:
        path, _ = engine.load_checkpoint(load)
        if path is None:
            raise AssertionError(f"DeepSpeed finds no checkpoint in {load}")
    start = engine.global_steps
    if torch.distributed.get_rank() == 0:
        (folder / "started").write_text(str(start))
    for iteration in range(start + 1, last + 1):
        train_step(engine, complete(CASE), iteration)
        tokens = torch.stack([counts[i].detach().to(torch.int64) for i in range(LAYERS)])
        torch.distributed.all_reduce(tokens)
        if torch.distributed.get_rank() == 0:
            with open(folder / "tokens.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps({"iteration": iteration, "tokens": tokens.tolist()}) + "\n")
        engine.save_checkpoint(folder / "ckpt")
        if torch.distributed.get_rank() == 0:
            subprocess.run([HOOKS / "pec-save-hook.sh", folder / "sock", folder / "ckpt",
                            folder / "store", *FLAGS, "--tokens", folder / "tokens.jsonl"],
                           check=True)
            for old in (folder / "ckpt").glob("global_step*"):
                if int(old.name[11:]) < iteration - 1:
                    shutil.rmtree(old)
        torch.distributed.barrier()
        time.sleep(pause)
    return start


class Count:
    """Lost tokens by the algorithm, from the log alone."""

    def __init__(self):
        self.charged = {}

    def fault(self, tokens, resume, versions):
        """\\returns [layer][expert]"""
        lost = [[0] * EXPERTS for _ in range(LAYERS)]
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                seen = self.charged.setdefault((layer, expert), set())
                module = f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}"
                gap = set(range(versions.get(module, resume) + 1, resume + 1)) - seen
                lost[layer][expert] = sum(tokens[i][layer][expert] for i in gap)
                seen |= gap
        return lost


class Run:
    trains = staticmethod(train)

    def __init__(self, programs, folder, seed):
        self.folder, self.random, self.count = folder, random.Random(seed), Count()
        os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
        os.environ["PEC_TOKENS"] = str(folder / "tokens.jsonl")
        os.environ["PEC_REPORT"] = str(folder / "report.json")
        (folder / "ckpt").mkdir()
        self.lost, self.sources, self.resumes = 0, {"memory": 0, "peer": 0, "storage": 0}, []

    def hook(self, name, *words):
        done = subprocess.run([HOOKS / name, *map(str, words)], capture_output=True, text=True,
                              timeout=SLOWEST, check=False)
        if done.returncode != 0:
            sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def start_agent(self):
        self.hook("pec-agent.sh", "start", self.folder / "sock", self.folder / "ckpt",
                  self.folder / "store", *FLAGS, "--tokens", self.folder / "tokens.jsonl")

    def log(self):
        path = self.folder / "tokens.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {entry["iteration"]: entry["tokens"] for entry in map(json.loads, lines)}

    def restore(self):
        """\\returns the folder to load, or nothing; verifies the report's count"""
        load = self.hook("pec-restore-hook.sh", self.folder / "store", self.folder / "out",
                         "--agents", f"unix:{self.folder / 'sock'}")
        if not load:
            return None, 0
        report = json.loads((self.folder / "report.json").read_text())
        result = report["result"]
        resume = result["iteration"]
        tokens = self.log()
        if sorted(tokens) != list(range(1, resume + 1)):
            sys.exit(f"token log after a restore of {resume}: {sorted(tokens)}")
        mine = self.count.fault(tokens, resume, result["versions"])
        if result["loss"]["lost_by_expert"] != mine or \
                result["loss"]["lost"] != [sum(layer) for layer in mine]:
            sys.exit(f"lost tokens of the report: {result['loss']}\ncounted: {mine}")
        self.lost += sum(map(sum, mine))
        for source, size in result["bytes"].items():
            self.sources[source] += size
        self.resumes.append(resume)
        return load, resume

    def train(self, load, last, kill_after):
        """True if it has come to its end; otherwise it was killed when some iterations were logged, and a random time
        later."""
        (self.folder / "started").unlink(missing_ok=True)
        pid = ranks.begin(2, self.trains, self.folder, load, last, 0.2, seconds=1200)
        return ranks.ends_or_is_killed(pid, self.logged, kill_after, SLOWEST)

    def logged(self):
        path = self.folder / "tokens.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill_agent(self):
        pid = int((self.folder / "sock.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        stat = pathlib.Path(f"/proc/{pid}/stat")
        while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-killed-"))
    run = Run(given.bin, folder, given.seed)
    last = 3 * given.kills + 4
    kills = 0
    try:
        while True:
            load, resume = run.restore()
            run.start_agent()
            # Also while it starts, before the first iteration.
            when = (run.random.randrange(0, 4), run.random.uniform(0, 0.6))
            ended = run.train(load, last, when if kills < given.kills else None)
            started = folder / "started"  # absent where the kill came first
            if started.exists() and started.read_text() not in ("", str(resume)):
                sys.exit(f"DeepSpeed went on from {started.read_text()}, restored was {resume}")
            if ended:
                break
            kills += 1
            if kills % 3 == 0:
                run.kill_agent()
        if kills < given.kills:
            sys.exit(f"the training ended after {kills} of {given.kills} kills")
        run.hook("pec-agent.sh", "stop", folder / "sock")
        subprocess.run(["pec-save", "check", folder / "store", "-q"], check=True)
        load, resume = run.restore()
        if resume != last:
            sys.exit(f"the last snapshot is of iteration {resume}, training ended at {last}")
        print(f"killed {kills} times, went on from {run.resumes[:-1]}, ended at {last}; "
              f"{run.lost} tokens lost as counted; bytes restored {run.sources}")
    finally:
        try:
            os.kill(int((folder / "sock.pid").read_text()), signal.SIGKILL)
        except (OSError, ValueError):
            pass
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
