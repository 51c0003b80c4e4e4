# SPDX-License-Identifier: Apache-2.0
"""Saves the series of real MoE checkpoints into stores, restores it at every iteration, and has real
DeepSpeed resume each result: every tensor must equal its module's recorded version.

    series_test.py BIN [--all]

Without --all a choice of policies, K, iterations and layouts; with it all of them.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHARED = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", ROOT.parent / "shared")) / "fixtures"
SERIES = SHARED / "deepspeed" / "moe8_ep2_series"
ITERATIONS = range(4, 10)
POLICIES = ("sequential", "load-aware", "budget", "budget-global")
CASE = {"zero": 2, "moe": 8, "ep": 2, "h": 16, "batch": 16}
# Target, ranks and case of the trainer.
LAYOUTS = [("ep=2", 2, CASE), ("ep=1", 2, {**CASE, "ep": 1}),
           ("ep=4,dp=4", 4, {**CASE, "ep": 4})]


class Test:
    def __init__(self, programs, work):
        self.bin, self.work = programs, work
        self.jobs = {ranks: [] for _, ranks, _ in LAYOUTS}
        self.count = itertools.count()

    def run(self, name, *words):
        argv = [str(word) for word in (self.bin / name, *words)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stderr}")

    def save(self, *words):
        store = self.work / f"store-{next(self.count)}"
        for iteration in ITERATIONS:
            self.run("pec-save", SERIES / "ckpt" / f"global_step{iteration}", store, "--tokens",
                     SERIES / "tokens.jsonl", "-q", *words)
        return store

    def restore(self, store, at, layout, versions=True):
        target, ranks, case = layout
        number = next(self.count)
        out, report = self.work / f"out-{number}", self.work / f"report-{number}.json"
        self.run("pec-restore", store, out, "--at", at, "--target", target, "--read-only", "-q",
                 f"--json={report}")
        job = ["resume", str(out), json.dumps(case), "--expect", str(SERIES)]
        self.jobs[ranks].append(job + (["--versions", str(report)] if versions else []))

    def resume(self):
        """\\returns jobs, tensors compared"""
        done, tensors = 0, 0
        for ranks, jobs in self.jobs.items():
            path = self.work / f"jobs-{ranks}.json"
            path.write_text(json.dumps(jobs))
            env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={ranks}", str(pathlib.Path(__file__).with_name("resume.py")),
                 str(SHARED / "train_deepspeed.py"), str(path)],
                env=env, capture_output=True, text=True, check=False)
            lines = re.findall(r"^JOB \d+: (OK|FAILED)(?: tensors (\d+)/(\d+))?", ended.stdout, re.M)
            if len(lines) != len(jobs) or any(word != "OK" for word, _, _ in lines):
                sys.exit(f"{ranks} ranks: {len(lines)} of {len(jobs)} resumed\n"
                         f"{ended.stdout[-6000:]}\n{ended.stderr[-3000:]}")
            done += len(lines)
            tensors += sum(int(exact) for _, exact, _ in lines)
        return done, tensors


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    if not SERIES.is_dir():
        print(f"skipped: {SERIES} is not there")
        sys.exit(77)
    work = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-series-"))
    try:
        test = Test(arguments.bin, work)
        for policy, k in itertools.product(POLICIES, (1, 2, 4)):
            if not arguments.all and (policy, k) not in (("sequential", 1), ("load-aware", 2),
                                                         ("budget", 1), ("budget-global", 4)):
                continue
            store = test.save("--policy", policy, "--k", k)
            for at in ITERATIONS if arguments.all else (6, 9):
                test.restore(store, at, LAYOUTS[0])
            for layout, at in itertools.product(LAYOUTS[1:], ITERATIONS if arguments.all else (9,)):
                test.restore(store, at, layout)
        full = test.save("--policy", "full")
        for layout, at in itertools.product(LAYOUTS[:3 if arguments.all else 1], ITERATIONS):
            test.restore(full, at, layout)
        # Nothing is stale: the losses that follow must be those of the uninterrupted run.
        for layout in LAYOUTS:
            test.restore(full, 9, layout, versions=False)
        done, tensors = test.resume()
        print(f"{done} restored checkpoints resumed by DeepSpeed, {tensors} tensors equal to their "
              "recorded versions")
    finally:
        shutil.rmtree(work)


main()
