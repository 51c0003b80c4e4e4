# SPDX-License-Identifier: Apache-2.0
"""The kill campaign: one undisturbed run counts the calls that change something on disk; then every
one of them is killed, failed, cut short or interrupted, and the run is resumed."""

import collections
import concurrent.futures
import os
import shutil

from harness import Scratch, difference, expect, run, succeed, tree

KILLED = 137
IO_FAILED = 7
STOPPED = 75
BUSY = 6

# Action: the target it is aimed at, and the exit codes it may end with. A fault that comes after
# the output is durable, or that only costs a faster way, is not a failure; then the run must have
# produced all of the output.
ACTIONS = {
    "kill": ("any", {KILLED}),
    "torn": ("write", {KILLED}),
    "eio": ("any", {IO_FAILED, 0}),
    "enospc": ("any", {IO_FAILED, 0}),
    "short": ("write", {0}),
    "term": ("any", {STOPPED, 0}),
}


class Case:
    """One command with one source."""

    def __init__(self, name, command, flags=(), old=None, launcher=()):
        self.name = name
        self.command = list(launcher) + list(command)  # up to and with INPUT
        self.flags = list(flags)
        self.old = old  # command that makes an output to replace, or None
        self.launched = bool(launcher)

    def argv(self, output, *more):
        return [*self.command, str(output), *self.flags, *(("--force",) if self.old else ()), *more]


class Campaign:
    def __init__(self, case, limit, log):
        self.case = case
        self.limit = limit  # trials per action, or None for all calls
        self.log = log
        self.counts = collections.Counter()
        self.scratch = Scratch(f"crash-{case.name}-")
        self.wanted = {}
        self.old = None

    def go(self, workers):
        with self.scratch as folder:
            calls = self.prepare(folder)
            trials = [(action, number) for action, (target, _) in ACTIONS.items()
                      for number in self.numbers(calls[target])]
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                for done in [pool.submit(self.trial, folder, *trial) for trial in trials]:
                    done.result()
        self.counts["calls"] = calls["any"]
        self.log(f"{self.case.name}: {calls['any']} calls; " + self.summary())
        return self.counts

    def summary(self):
        return (f"{self.counts['kill']} kills, {self.counts['torn']} torn writes, "
                f"{self.counts['eio'] + self.counts['enospc']} errors, "
                f"{self.counts['short']} short writes, {self.counts['term']} stops, "
                f"{self.counts['resumed']} resumed, {self.counts['found done']} found done")

    def numbers(self, count):
        """Calls to disturb: all, or an even choice with the whole end, where the commit is."""
        if self.limit is None or count <= self.limit:
            return range(1, count + 1)
        tail = min(count, self.limit // 2)
        step = max(1, (count - tail) // max(1, self.limit - tail))
        return [*range(1, count - tail + 1, step), *range(count - tail + 1, count + 1)]

    def prepare(self, folder):
        counts = folder / "counts"
        base = folder / "base"
        base.mkdir()
        if self.case.old:
            succeed([*self.case.old, base / "old"])
            self.old = base / "old"
            shutil.copytree(self.old, base / "out", symlinks=True)
        succeed(self.case.argv(base / "out"), fault=f"count:{counts}")
        self.wanted = tree(base / "out")
        expect(self.wanted, f"{self.case.name}: no output")
        # With several ranks the busiest one determines the range of the numbers.
        most = collections.Counter()
        for line in counts.read_text().splitlines():
            for word in line.split():
                name, number = word.rsplit("=", 1)
                most[name] = max(most[name], int(number))
        return most

    def trial(self, folder, action, number):
        target, codes = ACTIONS[action]
        fault = f"{target}:{number}:{action}"
        where = folder / f"{action}-{number}"
        where.mkdir()
        output = where / "out"
        if self.old:
            shutil.copytree(self.old, output, symlinks=True)
        done = run(self.case.argv(output), fault=fault)
        what = f"{self.case.name} with {fault}: {done}"
        if self.case.launched:
            expect(done.code != 0 or tree(output) == self.wanted, f"done without output: {what}")
        else:
            expect(done.code in codes, f"exit code not among {sorted(codes)}: {what}")
        self.counts[action] += 1
        self.look(where, done.code, what)
        self.resume(where, what)
        shutil.rmtree(where)

    def look(self, where, code, what):
        """The output on disk is whole, and no file is left that a resumed run does not know."""
        output = where / "out"
        found = tree(output) if output.exists() else None
        allowed = [self.wanted] if code == 0 else [self.wanted, tree(self.old) if self.old else None]
        # A process may be killed between the two renames of a file system that cannot exchange.
        aside = [name for name in os.listdir(where) if name.endswith(".old")]
        if aside and found is None:
            found = tree(where / aside[0])
        expect(found in allowed,
               f"output is neither old nor new ({difference(self.wanted, found or {})}): {what}")
        stray = [name for name in os.listdir(where)
                 if name not in ("out", "out.lock") and not name.startswith("out.partial-")]
        expect(not stray, f"stray files {stray}: {what}")
        if code == 0:
            self.counts["not harmed"] += 1

    def resume(self, where, what):
        output = where / "out"
        complete = output.exists() and tree(output) == self.wanted
        # Without resuming, a partial output must never be taken for one.
        done = run(self.case.argv(output, "--resume"))
        expect(done.code == 0, f"resume failed: {done}\nafter {what}")
        expect(tree(output) == self.wanted, "resumed output differs in "
               f"{difference(self.wanted, tree(output))}: {what}")
        left = sorted(set(os.listdir(where)) - {"out"})
        expect(not left, f"left after the resumed run: {left}: {what}")
        self.counts["found done" if complete and not self.case.old else "resumed"] += 1
