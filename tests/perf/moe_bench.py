#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures moe-replace and its strategies and prints Markdown tables.

    tests/perf/moe_bench.py [--build build/release] [--runs 9] [--trace gpt_moe_24x32.jsonl] [--nodes DIR]
                            [--only speed,balance,events]

speed: plan times on made-up loads (from a seed); EPLB's algorithm, written here from its description, runs on the same
loads in the same call, and its slots are compared with ours. balance and events: runs of the command over a trace of
token counts and over node events (CSV). Needs numpy and the targets moe_bench and moe-replace.
"""
import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pack(weights, bins):
    """Items of every bin: heaviest first, each to the lightest bin that is not full; ties to the lowest bin."""
    size = len(weights) // bins
    if size == 1:
        return [[item] for item in range(bins)]
    packed = [[] for _ in range(bins)]
    load = [numpy.float32(0)] * bins
    for item in numpy.argsort(-weights, kind="stable"):
        lightest = min((b for b in range(bins) if len(packed[b]) < size), key=load.__getitem__)
        packed[lightest].append(item)
        load[lightest] += weights[item]
    return packed


def eplb(loads, slots, gpus):
    """EPLB's global policy, from its published description: the expert of every slot, [layer][slot]."""
    weights = loads.astype(numpy.float32)
    layers, experts = weights.shape
    counts = numpy.ones((layers, experts), dtype=numpy.int64)
    replicas = numpy.empty((layers, slots), dtype=numpy.int64)
    replicas[:, :experts] = numpy.arange(experts)
    rows = numpy.arange(layers)
    for slot in range(experts, slots):
        hottest = (weights / counts.astype(numpy.float32)).argmax(axis=1)
        replicas[:, slot] = hottest
        counts[rows, hottest] += 1
    plan = []
    for layer in range(layers):
        mine = replicas[layer]
        share = weights[layer, mine] / counts[layer, mine].astype(numpy.float32)
        plan.append([int(mine[item]) for packed in pack(share, gpus) for item in packed])
    return plan


def skewed(layers, experts, seed):
    """Token counts like those of a trained router: a few hot experts in every layer."""
    random = numpy.random.default_rng(seed)
    shape = random.gamma(0.8, size=(layers, experts)) + 0.02
    return (shape / shape.sum(axis=1, keepdims=True) * 1_000_000).astype(numpy.int64)


def drifted(loads, seed):
    random = numpy.random.default_rng(seed)
    return (loads * random.uniform(0.8, 1.25, size=loads.shape)).astype(numpy.int64)


def milliseconds(seconds):
    text = f"{statistics.median(seconds) * 1000:.1f} ms"
    return text + (f" ({min(seconds) * 1000:.1f}-{max(seconds) * 1000:.1f})" if len(seconds) > 1 else "")


class Bench:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder

    def save(self, name, loads):
        path = os.path.join(self.folder, name + ".json")
        with open(path, "w", encoding="utf-8") as out:
            json.dump(loads.tolist(), out)
        return path

    def library(self, strategy, loads, nodes, gpus, slots, old=None, runs=None):
        command = [os.path.join(self.args.build, "tests", "moe_bench"), strategy, loads, str(nodes), str(gpus),
                   str(slots), str(runs or self.args.runs)] + ([old] if old else [])
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def command(self, *words):
        """Wall seconds and the JSON report of a run of the command."""
        report = os.path.join(self.folder, "report.json")
        start = time.monotonic()
        done = subprocess.run([os.path.join(self.args.build, "bin", "moe-replace"), *words, "--json=" + report,
                               "--progress", "off", "-q"], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
        if done.returncode != 0:
            sys.exit(f"moe-replace {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
        with open(report, encoding="utf-8") as text:
            return seconds, json.load(text)["result"]

    def row(self, what, value, wanted):
        print(f"| {what} | {value} | {wanted} |", flush=True)

    def speed(self):
        print("| what | measured | must reach |\n|---|---|---|")
        for layers, experts, nodes, gpus, slots, wanted in ((58, 256, 4, 8, 9, "≤ 5 ms, identical"),
                                                            (61, 256, 32, 8, 2, "≤ 15 ms, identical")):
            loads = skewed(layers, experts, layers)
            ours = self.library("eplb", self.save("eplb", loads), nodes, gpus, slots)
            start = time.monotonic()
            theirs = eplb(loads, nodes * gpus * slots, nodes * gpus)
            peer = time.monotonic() - start
            same = "identical" if ours["slots"] == theirs else "DIFFERENT"
            self.row(f"`eplb` {layers} × {experts}, {nodes * gpus * slots} slots, {nodes * gpus} GPUs; its algorithm "
                     "in numpy", f"{milliseconds(ours['plan_seconds'])}; {milliseconds([peer])}; {same}", wanted)
        self.lazarus()
        self.best()
        self.large()

    def lazarus(self):
        run = self.library("lazarus", self.save("lazarus", skewed(60, 256, 60)), 64, 1, 8)
        both = [a + b for a, b in zip(run["plan_seconds"], run["recovery_seconds"])]
        cut = "cut" if any(run["cut"]) else "uncut"
        self.row("`lazarus` 60 × 256, 64 nodes of 8 slots, recovery of all layers and of the model included",
                 f"{milliseconds(both)}, {cut}, {run['recovery_method']}", "≤ 10 ms uncut")

    def best(self):
        before = skewed(58, 256, 1)
        old, now = self.save("old", before), self.save("now", drifted(before, 2))
        best = self.library("best", now, 4, 8, 9, old)
        peer = self.library("eplb", now, 4, 8, 9, runs=1)
        relabelled = self.library("eplb+", now, 4, 8, 9, old, runs=1)
        worse = sum(a > b * (1 + 1e-9) for a, b in zip(best["imbalance"], peer["imbalance"]))
        self.row("`best` 58 × 256, 288 slots, 32 GPUs, from an old plan; layers less even than EPLB's; moves, and EPLB's "
                 "after relabelling",
                 f"{milliseconds(best['plan_seconds'])}; {worse}; {best['moves']} of {relabelled['moves']}",
                 "≤ 100 ms; 0; ≤ half")
        beyond = []
        plan = os.path.join(self.folder, "plan.json")
        for _ in range(self.args.runs):
            seconds, result = self.command(now, "--nodes", "4", "--gpus", "8", "--slots", "9", "-o", plan, "--force")
            beyond.append(seconds - result["plan"]["plan_seconds"])
        self.row("whole command beyond the plan, 58 × 256, 288 slots, plan written", milliseconds(beyond), "≤ 50 ms")

    def large(self):
        loads = self.save("large", skewed(60, 512, 3))
        for strategy in ("best", "lazarus", "eplb+"):
            run = self.library(strategy, loads, 1024, 8, 1, runs=3)
            self.row(f"`{strategy}` 60 × 512, 1024 nodes × 8 GPUs, 8192 slots; recovery; metrics",
                     f"{milliseconds(run['plan_seconds'])}; {milliseconds(run['recovery_seconds'])} "
                     f"({run['recovery_method']}); {milliseconds(run['metrics_seconds'])}", "≤ 2 s")

    def balance(self):
        """Mean imbalance of every strategy over all iterations of the trace."""
        with open(self.args.trace, encoding="utf-8") as trace:
            iterations = [json.loads(line)["iteration"] for line in trace if line.strip()]
        step = iterations[1] - iterations[0]
        for slots in (3, 4):
            sums = {}
            for age, name in ((0, "same"), (step, f"{step} before"), (200, "200 before")):
                for at in iterations:
                    if at - age < iterations[0]:
                        continue
                    _, result = self.command("compare", self.args.trace, "--nodes", "2", "--gpus", "8",
                                             "--slots", str(slots), "--at", str(at - age), "--measured-at", str(at))
                    for row in result["strategies"]:
                        if "measured" in row:
                            sums.setdefault(row["strategy"], {}).setdefault(name, []).append(
                                row["measured"]["imbalance_mean"])
            print(f"\n{16 * slots} slots:\n\n| strategy | same | {step} before | 200 before |\n|---|---|---|---|")
            for strategy, ages in sums.items():
                print(f"| {strategy} | " + " | ".join(f"{statistics.mean(ages[name]):.2f}" for name in ages) + " |",
                      flush=True)

    def events(self):
        """Failures survived and state lost over node events, 32 machines of 8 slots at most."""
        print("\n| events | strategy | failures | survived | states lost | experts moved | bytes moved | read again | "
              "plans, mean and worst time | imbalance |\n|" + "---|" * 10)
        for path in sorted(glob.glob(os.path.join(self.args.nodes, "*.csv"))):
            for strategy, *more in (("lazarus",), ("spread",), ("compact",), ("best",),
                                    ("best", "--objective", "mixed")):
                _, result = self.command("simulate-failures", self.args.trace, path, "--nodes", "32", "--gpus", "1", "--slots",
                                         "8", "--strategy", strategy, "--faults", "1", "--expert-bytes", "117512192",
                                         *more)
                run = result["strategies"][0]
                lost = sum(step["experts_lost"] > 0 for step in run["steps"])
                self.row(f"{os.path.splitext(os.path.basename(path))[0]} | {' '.join([strategy, *more])} | "
                         f"{run['failures']} | {run['survived']} | {lost} | {run['transfers']} | "
                         f"{run['bytes'] / 2**40:.2f} TiB | {run['restored_bytes'] / 2**40:.2f} TiB",
                         f"{run['plans']}, {run['plan_seconds_mean'] * 1000:.1f} ms, "
                         f"{run['plan_seconds_max'] * 1000:.1f} ms", f"{run['imbalance_mean']:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--trace", help="token counts of a run, for balance and events")
    parser.add_argument("--nodes", help="folder of node events, for events")
    parser.add_argument("--only", default="speed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        for name in args.only.split(","):
            getattr(bench, name)()


main()
