#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Errors at every call, allocation failures, a disk that corrupts writes, and kills of the recovery from a kill.

Usage: errors_test.py BIN_FOLDER [--part PART]... [--preload LIBRARY] [--limit N] [--first N] [--jobs N]
                      [--case NAME]... [--shard I/N]

Parts, default all (syncs and memory need the library of failing.c):
  errors  each call of lib/support/os, those that only read too, fails with each of nine errors. EINTR changes nothing
  syncs   each sync of a file fails in the C library; none of the same file follows
  memory  the N-th allocation fails, once or from then on
  writes  a write is acknowledged and not done, or one of its bits differs; --verify=readback or the next reader sees it
  double  the command is killed at a call, its recovery at one of its own, and a third run ends well
Afterwards the exit code is a documented one, the message names a path, an output or store is the old or the new one,
and the same command again ends well. --limit: calls of each case, evenly chosen; --first: and each of the first N
allocations. --shard: only every N-th trial, from the I-th on. Violations are collected and reported at the end; --stop
ends at the first.
"""

import argparse
import collections
import concurrent.futures
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import threading

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "power"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import tables  # pylint: disable=wrong-import-position
from cases import Output, Stores, Store, cases  # pylint: disable=wrong-import-position
from harness import (DATA, DEMO, SOURCE, Broken, Log, Outcome, Scratch, environment, expect, run,  # pylint: disable=wrong-import-position
                     succeed, tree)

ERRORS = ("eio", "enospc", "edquot", "enomem", "eacces", "erofs", "emfile", "estale", "eintr")
READING = ("open", "read", "stat", "list")
UNREADABLE, MISMATCH, IO_FAILED, MEMORY, KILLED = 3, 5, 7, 8, 137
FAILED = {UNREADABLE, IO_FAILED}
PARTS = ("errors", "syncs", "memory", "writes", "double")


class Check(Store):
    """A command that only reads a store: it changes nothing, and answers as it does undisturbed."""

    def learn(self, root):
        self.before_all = tree(root)

    def judge(self, root, done, counts):
        expect(tree(root) == self.before_all, "what only reads has changed the store")
        counts["resumed"] += 1


def more_cases(programs, folder):
    """Commands that only read, and the formats that have readers of their own."""
    load = programs / "ucp-load"
    stores = Stores(programs, folder)

    def checking(root):
        return [stores.save, "check", root / "store"]

    def converting(source, *flags):
        return lambda out: [load, source, out, *flags, "--threads", "1"]

    nested, ranks = DATA / "dcp" / "nested_w3" / "ckpt", DATA / "dtensor" / "accelerate_w2" / "ckpt"
    resume = ["--resume"]
    return [
        Check("check", stores, (1, 2), checking, 2),
        Output("readback", None, converting(DEMO, "--target", "zero=1,dp=4", "--verify=readback"), resume),
        Output("from-dcp", None, converting(nested, "--format", "dcp", "--target", "dp_shard=2"), resume),
        Output("from-dtensor", None, converting(ranks, "--format", "dtensor", "--target", "dp_shard=1"), resume),
    ]


class Trials:
    """One case: prepared once, disturbed many times."""

    def __init__(self, case, folder, options, log):
        self.case, self.options, self.log = case, options, log
        self.folder = folder / case.name
        self.base = self.folder / "base"
        self.base.mkdir(parents=True)
        case.prepare(self.base)
        whole = self.folder / "whole"
        shutil.copytree(self.base, whole, symlinks=True)
        counts = self.folder / "counts"
        done = succeed(case.command(whole), fault=f"count:{counts}")
        self.said = self.words(done, whole)
        self.calls = {name: int(number) for name, number in
                      (word.split("=") for word in counts.read_text().split())}
        self.after = tree(whole)
        case.learn(whole)
        self.counts, self.broken = collections.Counter(), []
        self.known, self.mutex, self.number = {}, threading.Lock(), itertools.count()

    @staticmethod
    def words(done, root):
        """The answer of a command that only reads, whatever its folder is called."""
        return done.stdout.replace(str(root), "ROOT")

    def chosen(self, count):
        limit = self.options.limit
        if not limit or count <= limit:
            return range(1, count + 1)
        return sorted({1 + i * count // limit for i in range(limit)} | {count})

    def go(self, work, trials):
        shard, shards = self.options.shard
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            for done in [pool.submit(self.guarded, work, *trial) for trial in list(trials)[shard::shards]]:
                done.result()

    def guarded(self, work, *trial):
        root = self.folder / f"trial-{next(self.number)}"
        shutil.copytree(self.base, root, symlinks=True)
        try:
            work(root, *trial)
        except Broken as broken:
            if self.options.stop:
                raise
            text = f"{self.case.name} {' '.join(map(str, trial))}: {broken}"
            self.broken.append(text)
            self.log(f"BROKEN: {text}")
        shutil.rmtree(root)

    def names_a_path(self, done, root):
        known = (self.folder.parent.parent, SOURCE, *self.folder.parents)  # these may be made or looked for, too
        expect(any(f"{path}" in done.stderr for path in known if len(path.parts) > 1), f"no path is named: {done}")

    def judge(self, root, done):
        """Checks each disk once: the verdict depends on nothing but its content."""
        key = (done, frozenset(tree(root).items()))
        with self.mutex:
            if key in self.known:
                return
        self.case.judge(root, done, self.counts)
        with self.mutex:
            self.known[key] = True

    def settle(self, root, done):
        """After a run that was disturbed and continued."""
        if done.code == 0:
            if isinstance(self.case, Check):
                expect(self.words(done, root) == self.said, f"another answer than undisturbed: {done}")
            if tree(root) == self.after:
                return
        self.judge(root, done.code == 0)

    # --- errors ------------------------------------------------------------------------------------

    def errors(self):
        kinds = [name for name in self.calls if "." not in name and name not in ("any", "every")]
        trials = [(kind, number, error) for kind in kinds for number in self.chosen(self.calls[kind])
                  for error in ERRORS]
        self.go(self.error, trials)

    def error(self, root, kind, number, error):
        done = run(self.case.command(root), fault=f"{kind}:{number}:{error}")
        self.counts["runs"] += 1
        self.counts[f"{kind} ended with {done.code}"] += 1
        if error == "eintr" and kind != "sync":
            expect(done.code == 0, f"an interrupted call is no failure: {done}")
        allowed = {0, *FAILED} if kind in READING else {0, IO_FAILED}
        if isinstance(self.case, Check):
            allowed = {0, *FAILED, MISMATCH}  # a file that cannot be read is one of its findings
        if self.case.name.startswith("gc"):
            allowed |= {MISMATCH}  # nothing is removed while a checkpoint that stays cannot be read
        expect(done.code in allowed, f"exit code not among {sorted(allowed)}: {done}")
        if done.code != 0:
            self.names_a_path(done, root)
        self.settle(root, done)

    # --- the C library fails ---------------------------------------------------------------------

    def preloaded(self, root, **settings):
        env = environment()
        env.update(LD_PRELOAD=str(self.options.preload), **{key: str(value) for key, value in settings.items()})
        argv = [str(word) for word in self.case.command(root)]
        try:
            done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  errors="replace", timeout=self.options.seconds, check=False)
        except subprocess.TimeoutExpired as late:
            raise Broken(f"{' '.join(argv)}: not done after {self.options.seconds} s") from late
        return Outcome(argv, done.returncode, done.stdout, done.stderr)

    def syncs(self):
        trials = [(number, error) for number in self.chosen(self.calls["sync"]) for error in (5, 28, 122, 116)]
        self.go(self.sync, trials)

    def sync(self, root, number, error):
        done = self.preloaded(root, FAIL_SYNC=number, FAIL_ERRNO=error)
        self.counts["runs"] += 1
        expect("synced again" not in done.stderr, f"a sync that failed was made again: {done}")
        expect(done.code in (0, IO_FAILED), f"exit code not 0 or {IO_FAILED}: {done}")
        if done.code != 0:
            self.names_a_path(done, root)
        self.counts[f"sync ended with {done.code}"] += 1
        self.settle(root, done)

    def memory(self):
        whole = self.folder / "allocations"
        shutil.copytree(self.base, whole, symlinks=True)
        counted = self.folder / "made"
        self.preloaded(whole, FAIL_COUNT=counted)
        self.counts["allocations"] = made = int(counted.read_text())
        numbers = sorted({*range(1, min(self.options.first, made) + 1), *self.chosen(made)})
        trials = [(number, onward) for number in numbers for onward in ("once", "onward")]
        self.go(self.allocation, trials)

    def allocation(self, root, number, onward):
        done = self.preloaded(root, FAIL_ALLOCATION=number, **({"FAIL_ONWARD": 1} if onward == "onward" else {}))
        self.counts["runs"] += 1
        expect(done.code < 128, f"a signal: {done}")
        looking = done.code in FAILED and "cannot allocate memory" in done.stderr  # in a call of the system
        expect(done.code in (0, MEMORY) or looking, f"exit code not 0 or {MEMORY}: {done}")
        if done.code != 0:
            expect(done.stderr.count("error: ") == 1 and "memory" in done.stderr, f"one message is expected: {done}")
        self.counts[f"memory ended with {done.code}"] += 1
        self.settle(root, done)

    # --- a disk that corrupts writes ---------------------------------------------------------------

    def writes(self):
        self.go(self.corrupt_write, [(number, way) for number in self.chosen(self.calls["write"]) for way in ("lose", "flip")])

    def corrupt_write(self, root, number, way):
        done = run(self.case.command(root), fault=f"write:{number}:{way}")
        self.counts["runs"] += 1
        argv = [str(word) for word in self.case.command(root)]
        if done.code != 0:
            self.counts["refused by the run itself"] += 1
            self.names_a_path(done, root)
            return
        if tree(root) == self.after:
            self.counts["without effect"] += 1
            return
        expect("--verify=readback" not in argv, f"passed by --verify=readback: {done}")
        self.counts["left to readers"] += 1
        self.read_after(root, done)

    def read_after(self, root, done):
        """The next reader reports an error, or reads the same as without the corruption."""
        if isinstance(self.case, Store):
            argv = [self.case.stores.save, "check", root / "store"]
            check = run(argv)
            if check.code != 0:
                self.counts["refused by check"] += 1
                return
            report = root / "seen"
            restore = run([self.case.stores.restore, root / "store", report, "--read-only"])
            if restore.code != 0:
                self.counts["refused by restore"] += 1
                return
            wanted = self.case.wanted(self.case.after)
            expect(tree(report) == wanted, f"corrupt data was restored: {done}")
            self.counts["no effect on what is read"] += 1
            return
        changed = [name for name, digest in content_of(root).items() if self.after.get(name) != digest]
        self.counts["only readback can see it: " + kinds_of(changed)] += 1

    # --- killed twice ----------------------------------------------------------------------------

    def double(self):
        trials = []
        for number in self.chosen(self.calls["any"]):
            trials += [(number, part) for part in range(self.options.several)]
        self.go(self.killed_twice, trials)

    def killed_twice(self, root, number, part):
        command = self.case.command(root)
        done = run(command, fault=f"any:{number}:kill")
        # The journal writes the records of several threads at once, so a run may have fewer calls than the counted one.
        if done.code == 0 and number > self.calls["any"] - self.calls["write"]:
            self.counts.update(("runs", "had fewer calls"))
            self.judge(root, True)
            return
        expect(done.code == KILLED, f"not killed: {done}")
        again = [*command, *getattr(self.case, "again", [])]
        # Without counting first: numbers are spread over what a whole run has, in a way of its own
        # for each kill; a repair that has fewer calls ends well and counts apart.
        most = self.calls["any"]
        second = 1 + (number * 7 + part * most // self.options.several) % most
        done = run(again, fault=f"any:{second}:kill")
        expect(done.code in (0, KILLED), f"the repair neither ends well nor is killed: {done}")
        self.counts["killed twice" if done.code == KILLED else "repaired before the second kill"] += 1
        self.counts["runs"] += 2
        self.judge(root, done.code == 0)


def content_of(root):
    return {name: digest for name, digest in tree(root).items() if digest is not None}


def kinds_of(names):
    return ", ".join(sorted({pathlib.Path(name).suffix or pathlib.Path(name).name for name in names})) or "sizes"


def outcomes(counts):
    """Counts how the runs of a part ended, without the checks afterwards."""
    found = collections.Counter()
    for key, count in counts.items():
        _, ended, code = key.rpartition(" ended with ")
        if ended:
            found[f"code {code}"] += count
        elif key not in ("runs", "allocations", "complete", "resumed", "refused"):
            found[key.partition(":")[0]] += count
    return ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))


def shard(text):
    first, _, parts = text.partition("/")
    return int(first), int(parts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--preload", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--several", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("SHARDWRIGHT_JOBS", os.cpu_count() or 1)))
    parser.add_argument("--case", action="append")
    parser.add_argument("--shard", type=shard, default=(0, 1))
    parser.add_argument("--stop", action="store_true")
    options = parser.parse_args()
    log = Log()
    totals, broken = {}, []
    try:
        with Scratch("crash-errors-") as folder:
            (folder / "more").mkdir()
            # An agent's run is a script of several commands, of which one fault would hit each.
            known = {case.name: case for case in cases(options.bin, folder) if case.name != "agent"}
            known.update((case.name, case) for case in more_cases(options.bin, folder / "more"))
            for part in options.part or PARTS:
                if part in ("syncs", "memory") and options.preload is None:
                    expect(not options.part, f"{part} needs --preload")
                    continue
                totals[part] = collections.Counter()
                for name in options.case or known:
                    expect(name in known, f"no case {name}; there are {', '.join(known)}")
                    (folder / part).mkdir(exist_ok=True)
                    trials = Trials(known[name], folder / part, options, log)
                    getattr(trials, part)()
                    log(f"{part}: {name}: {dict(sorted(trials.counts.items()))}; {len(trials.broken)} broken")
                    totals[part] += trials.counts
                    broken += trials.broken
                    shutil.rmtree(trials.folder)
        tables.show(("Part", "Runs", "Outcome"),
                    [(part, counts["runs"], outcomes(counts)) for part, counts in totals.items()])
        runs = ", ".join(f"{counts['runs']} {part}" for part, counts in totals.items())
        log(f"errors: {runs}, {len(broken)} violations")
    except Broken as one:
        log(f"FAILED: {one}")
        return 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
