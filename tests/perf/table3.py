#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures saving, converting and loading end to end, as in table 3 of Universal Checkpointing, and prints Markdown tables.

    tests/perf/table3.py [--bin build/release/bin] [--peers VENV] [--work /dev/shm] [--runs 5] [--threads 2]
                         [--sizes HIDDENxLAYERSxVOCAB,...] [--ranks 1,2,4] [--only steps,nested,balance]

steps: a DeepSpeed trainer of each size saves on 1, 2 and 4 ranks with ZeRO-2. The checkpoint is converted for half as many
ranks (1 rank: for 2) and loaded there. Compared are ucp-load alone, ucp-extract + ucp-union + ucp-load (through atoms),
ds_to_universal with DeepSpeed's universal loader, and no conversion (a trainer of the target ranks has saved). The parameters
after loading converted checkpoints must be equal.
nested: the conversion of the largest size with 1, 2 and 4 MPI ranks and 1 and 2 threads, and ds_to_universal with up to
4 + 4 workers.
balance: bytes of each of 64 MPI ranks, from dry runs of a checkpoint of a billion parameters with empty files.

Everything runs in turns, after one run to warm up (none for conversions with --runs 1). Times are medians, with the range in
brackets. Bytes are those that the processes read and wrote, including their programs. Needs Open MPI, real DeepSpeed
(scripts/peers), and for the default sizes 16 GB of memory, including the checkpoints in --work.
"""
import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True

from measure import HERE, ROOT, clear, moved_bytes, run_trainer, spread, timed, trainer_environment  # pylint: disable=wrong-import-position

Step = collections.namedtuple("Step", "seconds read written inside", defaults=[0.0])  # inside: as the command reports
Size = collections.namedtuple("Size", "hidden layers vocab")
DIRECT, ATOMS, PEER, NONE = "`ucp-load`", "`ucp-extract`, `ucp-union`, `ucp-load`", "`ds_to_universal`", "no conversion"
BALANCE_RANKS = 64


def table(*head):
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def seconds(steps, member="seconds"):
    return spread([getattr(step, member) for step in steps]) + " s" if steps else ""


def megabytes(steps, member):
    """The largest of all runs."""
    return f"{max(getattr(step, member) for step in steps) / 1e6:.1f} MB" if steps else ""


def added(*lists):
    """Steps that follow each other, added run by run."""
    return [Step(*map(sum, zip(*steps))) for steps in zip(*lists)]


def mpirun(ranks):
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] if ranks > 1 else []


class Bench:
    def __init__(self, args, work):
        self.args = args
        self.work = work
        self.python = os.path.join(args.peers, "bin", "python")
        self.sizes = [Size(*map(int, text.split("x"))) for text in args.sizes.split(",")]
        self.env = dict(trainer_environment(self.python), OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def path(self, *names):
        return os.path.join(self.work, *names)

    def command(self, name, *words, ranks=1, threads=None):
        return [*mpirun(ranks), os.path.join(self.args.bin, name), *words, "--threads", str(threads or self.args.threads),
                "--progress", "off", "-q", "--json=" + self.path("report.json")]

    def report(self):
        """The last one of a command or a trainer."""
        with open(self.path("report.json"), encoding="utf-8") as text:
            return json.load(text)

    def peer(self, source, workers):
        """The converter of DeepSpeed, which writes the folder that its universal loader reads."""
        with open(os.path.join(source, "latest"), encoding="utf-8") as latest:
            tag = latest.read().strip()
        return [self.python, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", os.path.join(source, tag),
                "--output_folder", self.path("theirs", "universal"), "--num_extract_workers", str(workers),
                "--num_merge_workers", str(workers), "--inject_missing_state"]

    def step(self, command):
        read, written = moved_bytes()
        taken = timed(command, env=self.env)[0]
        now = moved_bytes()
        inside = self.report()["seconds"] if command[0] != self.python else taken
        return Step(taken, now[0] - read, now[1] - written, inside)

    def turns(self, works, runs):
        """Runs (commands, outputs) by name in turns: for each name and command its steps. Keeps the outputs of the last run."""
        warm_up = 1 if runs > 1 else 0
        found = {name: [[] for _ in commands] for name, (commands, _) in works.items()}
        for run in range(warm_up + runs):
            for name, (commands, outputs) in works.items():
                clear(*outputs)
                for command, steps in zip(commands, found[name]):
                    step = self.step(command)
                    if run >= warm_up:
                        steps.append(step)
        return found

    def trainer(self, what, size, ranks, *folders, same=0):
        """Steps by folder, and the number of parameters."""
        run_trainer(self.python, self.python, os.path.join(HERE, "live", "save_load.py"), what, *folders, "--ranks", str(ranks),
                    "--report", self.path("report.json"), "--same", str(same), "--runs", str(self.args.runs), "--hidden",
                    str(size.hidden), "--layers", str(size.layers), "--vocab", str(size.vocab))
        found = self.report()
        return [[Step(*step) for step in steps] for steps in found["steps"]], found["parameters"]

    def measure(self, size, ranks, target):
        """Steps by conversion: save, its commands, load; steps of ds_to_universal --help; and the number of parameters."""
        source, native, catalogue, atoms, direct, united, theirs = map(self.path, (
            "source", "native", "catalogue", "atoms", "direct", "united", "theirs"))
        (saved,), parameters = self.trainer("save", size, ranks, source)
        (native_saved,), _ = self.trainer("save", size, target, native)
        layout = ("--target", f"zero=2,dp={target}")
        converted = self.turns({
            DIRECT: ([self.command("ucp-load", source, direct, *layout)], [direct]),
            ATOMS: ([self.command("ucp-extract", source, catalogue), self.command("ucp-union", catalogue, atoms),
                     self.command("ucp-load", atoms, united, *layout)], [catalogue, atoms, united]),
            PEER: ([self.peer(source, self.args.threads)], [theirs]),
            "start": ([[*self.peer(source, 1), "--help"]], [])}, self.args.runs)
        (start,) = converted.pop("start")
        clear(source, catalogue, atoms)
        loaded, _ = self.trainer("load", size, target, direct, united, theirs, native, same=3)
        clear(direct, united, theirs, native)
        found = {name: (saved, commands, load) for (name, commands), load in zip(converted.items(), loaded)}
        found[NONE] = (native_saved, [], loaded[3])
        return found, start, parameters

    def steps(self):
        rows, starts = [], []
        for size in self.sizes:
            for ranks in map(int, self.args.ranks.split(",")):
                target = 2 if ranks == 1 else ranks // 2
                found, start, parameters = self.measure(size, ranks, target)
                starts += start
                rows += [((f"{parameters / 1e6:.1f} M", f"{ranks} to {target}", name), *ways) for name, ways in found.items()]
                print(f"table3.py: {parameters} parameters, {ranks} to {target} ranks: done", file=sys.stderr, flush=True)
        head = ("Parameters", "Ranks", "Conversion")
        table(*head, "Save", "Convert", "Load", "End to end")
        for which, saved, commands, load in rows:
            convert = added(*commands)
            row(*which, seconds(saved), seconds(convert), seconds(load), seconds(added(saved, *commands, load)))
        table(*head, "Saved", "Converter reads", "Converter writes", "Loader reads")
        for which, saved, commands, load in rows:
            convert = added(*commands)
            row(*which, megabytes(saved, "written"), megabytes(convert, "read"), megabytes(convert, "written"),
                megabytes(load, "read"))
        table("Parameters", "Ranks", "`ucp-extract`", "`ucp-union`", "`ucp-load`")
        for (parameters, ranks, name), _, commands, _ in rows:
            if name == ATOMS:
                row(parameters, ranks, *map(seconds, commands))
        print(f"\nThe times of `ds_to_universal` include its start: with `--help` it takes {seconds(starts)}.")

    def nested(self):
        source, atoms, direct, theirs = map(self.path, ("source", "atoms", "direct", "theirs"))
        size = max(self.sizes, key=lambda size: size.hidden * (size.vocab + 4 * size.layers * size.hidden))
        _, parameters = self.trainer("save", size, 2, source)
        works = {}
        for ranks in (1, 2, 4):
            for threads in (1, 2):
                how = {"ranks": ranks, "threads": threads}
                works["union", ranks, threads] = ([self.command("ucp-union", source, atoms, **how)], [atoms])
                works["load", ranks, threads] = ([self.command("ucp-load", source, direct, "--target", "zero=2,dp=3", **how)],
                                                 [direct])
        for workers in (1, 2, 4):
            works["peer", workers] = ([self.peer(source, workers)], [theirs])
        found = {key: steps for key, (steps,) in self.turns(works, self.args.runs).items()}
        clear(source, atoms, direct, theirs)

        def cell(key, first, member):
            before, after = (statistics.median(getattr(step, member) for step in found[which]) for which in (first, key))
            return f"{seconds(found[key], member)}, {before / after:.2f}"

        print(f"\n{parameters / 1e6:.1f} M parameters on {os.cpu_count()} processors. After each time: how many times faster than the "
              "first row. Own time: of rank 0, from the report of the command.")
        table("MPI ranks", "Threads", "`ucp-union`", "own time", "`ucp-load`", "own time")
        for ranks in (1, 2, 4):
            for threads in (1, 2):
                row(ranks, threads, *(cell((name, ranks, threads), (name, 1, 1), member) for name in ("union", "load")
                                      for member in ("seconds", "inside")))
        table("Workers", "`ds_to_universal`")
        for workers in (1, 2, 4):
            row(workers, cell(("peer", workers), ("peer", 1), "seconds"))

    def balance(self):
        source, out = self.path("sparse"), self.path("out")
        clear(source)
        subprocess.run([self.python, os.path.join(HERE, "make_sparse.py"), source, "--ranks", str(BALANCE_RANKS), "--tensors", "200",
                        "--params", "1e9"], check=True)
        table("Command", "MPI ranks", "Mean bytes of a rank", "Largest", "Largest / mean")
        for words in (("ucp-union", source, out), ("ucp-load", source, out, "--target", "dp=48")):
            timed(self.command(*words, "--dry-run", ranks=BALANCE_RANKS, threads=1), env=self.env)
            found = self.report()["result"]["plan"]["rank_bytes"]
            mean = sum(found) / len(found)
            row(f"`{words[0]}`", len(found), f"{mean / 1e6:.1f} MB", f"{max(found) / 1e6:.1f} MB", f"{max(found) / mean:.4f}")
        clear(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build/release/bin"))
    parser.add_argument("--peers", default=os.path.expanduser("~/.cache/shardwright/peers"))
    parser.add_argument("--work", default="/dev/shm")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", default="256x8x32000,512x16x32000,768x24x32000")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--only", default="steps,nested,balance")
    args = parser.parse_args()
    args.bin = os.path.abspath(args.bin)
    os.makedirs(args.work, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardwright-table3-", dir=args.work) as work:
        bench = Bench(args, work)
        for name in args.only.split(","):
            getattr(bench, name)()


if __name__ == "__main__":
    main()
