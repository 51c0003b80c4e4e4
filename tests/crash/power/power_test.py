#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Power failures: the changes that a command had made when the power failed, with every possible loss of unsynced data.
Whatever the disk holds then, no output and no store passes for one that it is not, the command ends well when it is
started again, and once it has reported success, nothing is lost.

Usage: power_test.py BIN_FOLDER RECORDER [--states N] [--seed N] [--case NAME]... [--forget syncs|N]

RECORDER is the library of record.c. --states is the number of states of each case (half of them: each single loss,
an even choice of them where there are more; the rest mixtures); they differ from each other, so there may be fewer.
--forget leaves all syncs (or the N-th) out of the recording, as if the command had none: then every case is expected
to have a violation, and a case without one ends with 1.
"""

import argparse
import collections
import concurrent.futures
import copy
import multiprocessing
import os
import pathlib
import random
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))

import disk as disks  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position
from cases import cases  # pylint: disable=wrong-import-position
from disk import KEPT, LOST, Disk, State  # pylint: disable=wrong-import-position
from harness import Broken, Log, Scratch, environment, expect  # pylint: disable=wrong-import-position


CASES = {}  # by name
KINDS = ("single", "mixture", "after success")  # of states


class Recording:
    """A case that was run once, undisturbed."""

    def __init__(self, case, root, recorder, forget):
        self.case, self.root = case, root
        case.prepare(root)
        self.before = Disk(root)  # as its inodes are now
        log = root.parent / "calls"
        env = environment()
        env.update(RECORD_ROOT=str(root), RECORD_FILE=str(log), LD_PRELOAD=str(recorder))
        done = subprocess.run([str(word) for word in case.command(root)], env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=3000, check=False)
        expect(done.returncode == 0, f"{case.name}: {done.args} ended with {done.returncode}\n{done.stderr}")
        calls = disks.read_calls(log)
        # That it is done.
        self.said = case.said([(number, call.data) for number, call in enumerate(calls) if call.kind == "p"])
        syncs = [i for i, call in enumerate(calls) if call.kind in "sS"]
        expect(syncs, f"{case.name}: no sync was recorded")
        self.forgotten = set(syncs if forget == "syncs" else [] if forget is None else [syncs[int(forget) - 1]])
        self.calls, self.syncs = calls, len(syncs)
        case.learn(root)

    def disks(self):
        """The disk after each call. One and the same object."""
        disk = copy.deepcopy(self.before)
        for index, call in enumerate(self.calls):
            if index not in self.forgotten:
                disk.add(call)
            yield index, disk


def singles(pending):
    """Number of states that `single` knows."""
    return 2 + sum(1 + len(change.ways()) for change in pending)


def single(pending, number):
    """Everything lost, nothing lost, each change as the only one that is not, and as the only one that is."""
    if number < 2:
        return [(change, (LOST, KEPT)[number]) for change in pending]
    number -= 2
    for index, change in enumerate(pending):
        ways = (KEPT, *change.ways())
        if number < len(ways):
            others = LOST if number == 0 else KEPT
            return [(one, ways[number] if i == index else others) for i, one in enumerate(pending)]
        number -= len(ways)
    raise IndexError


def mixture(pending, numbers):
    """Most losses are few, or nearly all."""
    share = numbers.choice((0.05, 0.2, 0.5, 0.8, 0.95))
    return [(change, numbers.choice(change.ways()) if numbers.random() < share else KEPT) for change in pending]


class Explorer:
    """One worker's share of the states of a case."""

    def __init__(self, case, arguments, worker, workers):
        self.case, self.states, self.seed = case, arguments.states, arguments.seed
        self.recorder, self.forget = arguments.recorder, arguments.forget
        self.worker, self.workers = worker, workers
        self.numbers = random.Random(f"{self.seed} {case.name} {worker}")
        self.seen = set()
        self.counts = collections.Counter()

    def go(self, folder):
        root = folder / "root"
        root.mkdir(parents=True)
        recording = Recording(self.case, root, self.recorder, self.forget)
        # Their number is known only after all calls were visited.
        total = sum(singles(disk.pending) for _, disk in recording.disks())
        # One in so many, and of these a worker's share.
        every = max(1, 2 * total // self.states) * self.workers
        due = random.Random(self.seed).randrange(every // self.workers) + every // self.workers * self.worker
        mixtures = collections.Counter(self.numbers.randrange(len(recording.calls))
                                       for _ in range(self.states // 2 // self.workers))
        # Completed work has to last: as many mixtures again at the end.
        mixtures[len(recording.calls) - 1] += self.states // 8 // self.workers
        for index, disk in recording.disks():
            here = singles(disk.pending)
            while due < here:
                self.look(recording, index, disk, single(disk.pending, due), "single")
                due += every
            due -= here
            for _ in range(mixtures[index]):
                self.look(recording, index, disk, mixture(disk.pending, self.numbers), "mixture")
        return self.counts, len(recording.calls), recording.syncs

    def look(self, recording, index, disk, ways, kind):
        noise = self.numbers.random()
        state = State(disk, ways, random.Random(noise))
        digest = (state.digest(), index >= recording.said)
        if digest in self.seen:
            return
        self.seen.add(digest)
        self.counts[kind] += 1
        if index >= recording.said:
            self.counts["after success"] += 1
        try:
            self.judge(recording, index, state)
        except Broken as broken:
            why = broken
            if self.forget is None:
                ways, why = self.smallest(recording, index, disk, ways, noise, broken)
            lost = [f"  {way}: {change.call}" for change, way in ways if way != KEPT]
            raise Broken(f"{self.case.name}: power failed after call {index + 1} of {len(recording.calls)} "
                         f"({recording.calls[index]}), seed {self.seed}\n" + "\n".join(lost) + f"\n{why}") from None

    def judge(self, recording, index, state):
        shutil.rmtree(recording.root)
        recording.root.mkdir()
        state.write(recording.root)
        self.case.judge(recording.root, index >= recording.said, self.counts)

    def smallest(self, recording, index, disk, ways, noise, why):
        """Fewer losses that are a violation too."""
        for place in range(len(ways)):
            if ways[place][1] == KEPT:
                continue
            fewer = [*ways[:place], (ways[place][0], KEPT), *ways[place + 1:]]
            try:
                self.judge(recording, index, State(disk, fewer, random.Random(noise)))
            except Broken as broken:
                ways, why = fewer, broken
        return ways, why


def explore(name, arguments, worker, workers):
    """In a process of its own, which has the cases of its parent."""
    case = CASES[name]
    with Scratch(f"power-{case.name}-") as folder:
        return Explorer(case, arguments, worker, workers).go(folder / "work")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("recorder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--states", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append")
    parser.add_argument("--forget")
    arguments = parser.parse_args()
    log = Log()
    workers = os.cpu_count() or 1
    total, violations, rows = collections.Counter(), 0, []
    with Scratch("power-sources-") as sources:
        CASES.update((case.name, case) for case in cases(arguments.bin, sources))
        pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
        for name in arguments.case or CASES:
            expect(name in CASES, f"no case {name}; there are {', '.join(CASES)}")
            shares = [pool.submit(explore, name, arguments, worker, workers) for worker in range(workers)]
            counts = collections.Counter()
            try:
                for share in shares:
                    found, calls, syncs = share.result()
                    counts += found
            except Broken as broken:
                violations += 1
                log(f"FAILED: {broken}")
                continue
            log(f"{name}: {calls} calls, {syncs} syncs; {counts['single']} states with one loss, {counts['mixture']} "
                f"mixtures, {counts['after success']} of them after success; {counts['complete']} complete, "
                f"{counts['resumed']} resumed, {counts['refused']} refused to resume")
            total += counts
            rows.append((f"`{name}`", CASES[name].shown(), calls, syncs, *(counts[kind] for kind in KINDS)))
    if rows:
        tables.show(("Case", "Command", "Calls", "Syncs", "States with one loss", "Mixtures", "After success"),
                    tables.with_sum(rows, 4))
    log(f"power: {total['single'] + total['mixture']} states, {violations} violations, seed {arguments.seed}")
    expected = 0 if arguments.forget is None else len(arguments.case or CASES)
    return int(violations != expected)


if __name__ == "__main__":
    sys.exit(main())
