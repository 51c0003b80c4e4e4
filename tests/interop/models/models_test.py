# SPDX-License-Identifier: Apache-2.0
"""Random models go from trainer to trainer, and everything that the next trainer holds is what the last one had.

    models_test.py BIN [--models N] [--seed S] [--program deepspeed|torch|megatron] [--jobs N] [--no-shrink] [--table]
    models_test.py BIN --case DESCRIPTION

Models of the seeds S to S+N-1 are made, trained, saved, converted by the commands in BIN, and resumed (cases.py); a
description (draw.py) repeats one. A model that fails is made as small as it can be by dropping features one at a time.
"""

import argparse
import collections
import json
import multiprocessing
import pathlib
import sys
import time
import traceback

sys.dont_write_bytecode = True

import cases
import commands
import draw
import shrink

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))
import tables


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", choices=draw.PROGRAMS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--case", type=json.loads)
    return parser.parse_args()


def report(case, wrong, asked):
    """Prints the error of a case, and how to repeat it."""
    print(f"seed {case['seed']} ({case['program']}): WRONG: {wrong.kind}: {wrong}")
    smaller = case
    if not asked.no_shrink:
        smaller, wrong = shrink.smallest(case, wrong, lambda one: cases.judged(one, asked.ucp, asked.megatron)[1])
    print(f"  model: {cases.short(smaller)}")
    print(f"  then: {wrong.kind}: {wrong}")
    for words in wrong.words:
        print(f"  ran: {words}")
    here = pathlib.Path(__file__).resolve().relative_to(pathlib.Path.cwd()) if pathlib.Path(__file__).resolve().is_relative_to(
        pathlib.Path.cwd()) else pathlib.Path(__file__).resolve()
    print(f"  repeat: tests/interop/torch_pt/run.sh {here} {asked.bin} --case '{json.dumps(smaller)}'", flush=True)


def tried(case, asked):
    """Verifies a case and prints a line of it; its outcome, for the table."""
    began = time.monotonic()
    outcomes, wrong = cases.judged(case, asked.ucp, asked.megatron)
    if wrong:
        report(case, wrong, asked)
        return [f"{case['program']} failed"]
    print(f"seed {case['seed']} ({case['program']}): {', '.join(outcomes)} in {time.monotonic() - began:.1f} s", flush=True)
    return [f"{case['program']} models", *(f"{case['program']} {outcome.split(':')[0]}" for outcome in outcomes)]


class Later:
    """Megatron's process, started when it is first asked."""

    def __init__(self):
        self.process = None

    def ask(self, job):
        self.process = self.process or cases.Megatron()
        return self.process.ask(job)

    def close(self):
        if self.process:
            self.process.close()


def work(asked, described, counts):
    """A worker: takes descriptions until there are none, and puts what became of each."""
    asked.megatron = Later()
    while (case := described.get()) is not None:
        try:
            counts.put(tried(case, asked))
        except BaseException:
            traceback.print_exc()
            counts.put([f"{case['program']} failed"])
    asked.megatron.close()


def all_of(asked, descriptions):
    """Verifies all of them in several processes; the counts of their outcomes."""
    fork = multiprocessing.get_context("fork")
    described, counts = fork.SimpleQueue(), fork.SimpleQueue()
    workers = [fork.Process(target=work, args=(asked, described, counts)) for _ in range(asked.jobs)]
    for worker in workers:
        worker.start()
    total = collections.Counter()
    for case in descriptions[:2 * asked.jobs]:
        described.put(case)
    for done in range(len(descriptions)):
        total.update(counts.get())
        if done + 2 * asked.jobs < len(descriptions):
            described.put(descriptions[done + 2 * asked.jobs])
    for _ in workers:
        described.put(None)
    for worker in workers:
        worker.join()
    return total


def main():
    asked = arguments()
    asked.ucp = commands.Commands(asked.bin, "")
    descriptions = [asked.case] if asked.case else [
        draw.draw(seed, asked.program) for seed in range(asked.seed, asked.seed + asked.models)]
    if not cases.Megatron.is_there():
        print("no environment with Megatron (scripts/peers makes one): its models are left out")
        descriptions = [case for case in descriptions if case["program"] != "megatron"]
    asked.jobs = min(asked.jobs, len(descriptions))
    total = all_of(asked, descriptions)
    rows = [(program, *(total[f"{program} {what}"] for what in ("models", "equal", "refused", "failed"))) for program in draw.PROGRAMS
            if any(key.startswith(program) for key in total)]
    if asked.table:
        tables.show(("Trainer", "Models", "Conversions equal", "Refused as listed", "Failed"), tables.with_sum(rows, 1))
    failed = sum(row[-1] for row in rows)
    print(f"{sum(row[1] for row in rows)} models, {sum(row[2] for row in rows)} conversions equal, {failed} models failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
