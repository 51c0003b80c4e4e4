#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills, faults and full disks against stores of partial checkpoints: at every call that changes
something on disk, of a save, a collection, also of a log of gradients, a repair and a restore.
Whatever happens, saved checkpoints can be restored, no file is half written, and doing it again
ends well.

Usage: stores_test.py BIN_FOLDER [--night] [--limit N]
Without --night a choice of the calls is disturbed.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import shutil
import sys

sys.dont_write_bytecode = True

import gradient_log  # pylint: disable=wrong-import-position
import moe_checkpoint  # pylint: disable=wrong-import-position
from campaign import ACTIONS  # pylint: disable=wrong-import-position
from harness import (Broken, Log, Scratch, difference, expect, run,  # pylint: disable=wrong-import-position
                     succeed, tree)

MODEL = moe_checkpoint.Model(layers=1, experts=4)


class Case:
    """A command on a store, and the valid states of the store after it was disturbed."""

    def __init__(self, name, before, command, allowed, after, logs=False, damaged=False):
        self.name = name
        self.logs = logs        # the gradients of all experts are in the store
        self.damaged = damaged  # blobs of the newest checkpoint are missing or damaged first
        self.before = before    # iterations that are saved first
        self.command = command  # (folder of the trial) -> argv
        self.allowed = allowed  # iterations that a restore may give after the disturbance
        self.after = after      # the one that it gives once the command was repeated


class Stores:
    def __init__(self, programs, folder, limit, log):
        self.save, self.restore = programs / "pec-save", programs / "pec-restore"
        self.folder, self.limit, self.log = folder, limit, log
        self.counts = collections.Counter()
        self.run = folder / "run"
        moe_checkpoint.series(self.run, MODEL, range(1, 5))
        self.wanted = {}

    def step(self, iteration):
        return self.run / f"global_step{iteration}"

    def fill(self, store, iterations, k=1):
        for iteration in iterations:
            succeed([self.save, self.step(iteration), store, "--k", str(k), "--threads", "1"])

    def log_gradients(self, store):
        """Of all iterations after the first, a segment for each."""
        fingerprint = json.loads((store / "store.json").read_text())["fingerprint"]
        gradient_log.log_series(store / "logs", fingerprint, MODEL, range(2, 5), gradient_log.adamw)

    def one_segment_left(self, where, what):
        """No version of the newest checkpoint is older than 3, so only the gradients of 4 are needed."""
        names = sorted(os.listdir(where / "store" / "logs"))
        expect(names == ["0-3.swg"], f"segments {names}: {what}")

    def look(self, where, allowed, what):
        """The store is whole and gives one of the allowed iterations, bit for bit."""
        store = where / "store"
        done = run([self.save, "check", store])
        expect(done.code == 0, f"the store is damaged: {done}\n{what}")
        out, report = where / "seen", where / "report"
        done = run([self.restore, store, out, "--read-only", f"--json={report}"])
        expect(done.code == 0, f"no restore: {done}\n{what}")
        report = json.loads(report.read_text())
        iteration, logs = report["iteration"], (store / "logs").exists()
        expect(iteration in allowed, f"iteration {iteration} of {sorted(allowed)}: {what}")
        if logs:
            stale, replay = report["result"]["stale_modules"], report["result"]["replay"]
            expect(stale == 0 and replay["modules"] > 0, f"{stale} experts are older, {replay}: {what}")
        found = tree(out)
        wanted = self.wanted.setdefault((iteration, logs), found)
        expect(found == wanted, f"iteration {iteration} differs in "
               f"{difference(wanted, found)}: {what}")
        shutil.rmtree(out)

    def damage(self, store):
        """Removes the blobs that only the newest manifest names, but for one, of which a bit is flipped."""
        texts = [path.read_text() for path in sorted((store / "manifests").iterdir())]
        lost = [path for path in sorted((store / "blobs").rglob("*")) if path.is_file()
                and path.stem in texts[-1] and not any(path.stem in text for text in texts[:-1])]
        expect(len(lost) > 2, f"only {lost} to damage")
        data = bytearray(lost[0].read_bytes())
        data[-1] ^= 1
        lost[0].write_bytes(data)
        for path in lost[1:]:
            path.unlink()

    def look_at_blobs(self, where, whole, damaged, what):
        """Each blob is as it was before it was damaged, or still as it was after that."""
        for name, digest in tree(where / "store").items():
            if digest is not None and name.startswith("blobs/"):
                expect(digest in (whole.get(name), damaged.get(name)), f"{name} has other content: {what}")

    def numbers(self, count):
        if self.limit is None or count <= self.limit:
            return range(1, count + 1)
        tail = self.limit // 2
        step = max(1, (count - tail) // max(1, self.limit - tail))
        return [*range(1, count - tail + 1, step), *range(count - tail + 1, count + 1)]

    def go(self, case):
        base = self.folder / case.name
        base.mkdir()
        self.fill(base / "store", case.before, k=2 if case.logs else 1)
        if case.logs:
            self.log_gradients(base / "store")
        # The states that may be seen, from undisturbed runs.
        self.look(base, case.allowed, f"{case.name} before")
        whole = tree(base / "store")
        if case.damaged:
            self.damage(base / "store")
        counted, counts = base / "counted", base / "counts"
        shutil.copytree(base / "store", counted / "store")
        succeed(case.command(counted), fault=f"count:{counts}")
        self.look(counted, {case.after}, f"{case.name} after")
        if case.logs:
            self.one_segment_left(counted, f"{case.name} after")
        calls = collections.Counter()
        for word in counts.read_text().split():
            name, number = word.rsplit("=", 1)
            calls[name] += int(number)
        trials = [(action, number) for action, (target, _) in ACTIONS.items()
                  for number in self.numbers(calls[target])]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done in [pool.submit(self.trial, base, case, whole, *trial) for trial in trials]:
                done.result()
        self.counts["calls"] += calls["any"]
        self.log(f"{case.name}: {calls['any']} calls, {len(trials)} trials")

    def trial(self, base, case, whole, action, number):
        target, codes = ACTIONS[action]
        where = base / f"{action}-{number}"
        shutil.copytree(base / "store", where / "store")
        before = self.texts(where)
        done = run(case.command(where), fault=f"{target}:{number}:{action}")
        what = f"{case.name} with {target}:{number}:{action}: {done}"
        expect(done.code in codes, f"exit code not among {sorted(codes)}: {what}")
        self.counts[action] += 1
        if case.damaged:
            self.look_at_blobs(where, whole, tree(base / "store"), what)
        if done.code == 0 or not case.damaged:
            # A run that is killed or fails at its very end may have done its work.
            self.look(where, {case.after} if done.code == 0 else case.allowed | {case.after}, what)
        if not case.name.startswith("gc"):
            kept = {name: self.texts(where).get(name) for name in before}
            expect(kept == before, f"an older text has changed: {what}")
        again = run([*case.command(where), *(["--force"] if case.name == "restore" else [])])
        expect(again.code == 0, f"cannot be repeated: {again}\nafter {what}")
        self.look(where, {case.after}, f"repeated after {what}")
        if case.logs:
            self.one_segment_left(where, f"repeated after {what}")
        stray = [name for name in os.listdir(where / "store")
                 if name.startswith("incoming-") or name.endswith(".tmp") or name == "lock"]
        expect(not stray, f"left in the store: {stray}: {what}")
        self.counts["repeated"] += 1
        shutil.rmtree(where)

    def texts(self, where):
        """Texts that no later save may touch."""
        return {name: digest for name, digest in tree(where / "store").items()
                if digest and name.split("/")[0] in ("manifests", "catalogues", "store.json")}

    def full_disk(self):
        """Every write fails from some call on: exit 7, and nothing is lost."""
        base = self.folder / "full"
        base.mkdir()
        self.fill(base / "store", (1, 2))
        for number in (1, 2, 5, 9, 14, 20):
            where = base / str(number)
            shutil.copytree(base / "store", where / "store")
            argv = [self.save, self.step(3), where / "store", "--k", "1", "--threads", "1"]
            done = run(argv, fault=f"write:{number}+:enospc")
            expect(done.code == 7, f"a full disk is no failure: {done}")
            self.look(where, {2}, f"full disk: {done}")
            succeed(argv)
            self.look(where, {3}, "after the full disk")
            self.counts["full disks"] += 1
            shutil.rmtree(where)


    def first(self):
        """A store with a first save that is killed at any call: the next save makes it."""
        base = self.folder / "first"
        base.mkdir()
        argv = [self.save, self.step(1), base / "store", "--threads", "1"]
        counts = base / "counts"
        succeed(argv, fault=f"count:{counts}")
        calls = {k: int(v) for k, v in (w.split("=") for w in counts.read_text().split())}
        for number in self.numbers(calls["any"]):
            where = base / str(number)
            where.mkdir()
            argv = [self.save, self.step(1), where / "store", "--threads", "1"]
            done = run(argv, fault=f"any:{number}:kill")
            expect(done.code == 137, f"not killed: {done}")
            succeed(argv)
            self.look(where, {1}, f"first save killed at call {number}")
            self.counts["kill"] += 1
            shutil.rmtree(where)


def cases(stores):
    def save(where):
        return [stores.save, stores.step(3), where / "store", "--k", "1", "--threads", "1"]

    def packed(where):
        return [*save(where), "--compress", "zstd"]

    def collect(where):
        return [stores.save, "gc", where / "store", "--keep-last", "1"]

    def repair(where):
        return [stores.save, "check", where / "store", "--repair", stores.step(2), "--threads", "1"]

    def restore(where):
        return [stores.restore, where / "store", where / "out", "--at", "2", "--restart", "--threads", "1",
                "--target", "ep=1"]

    logs = [Case("gc-log", (1, 2, 3, 4), collect, {4}, 4, logs=True)] if gradient_log.LIBRARY else []
    return [Case("save", (1, 2), save, {2}, 3), Case("save-zstd", (1, 2), packed, {2}, 3),
            Case("gc", (1, 2, 3), collect, {3}, 3), *logs,
            Case("repair", (1, 2), repair, {2}, 2, damaged=True),
            Case("restore", (1, 2, 3), restore, {2, 3}, 2)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--night", action="store_true")
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    log = Log()
    limit = arguments.limit or (None if arguments.night else 10)
    try:
        with Scratch("crash-stores-") as folder:
            stores = Stores(arguments.bin, folder, limit, log)
            for case in cases(stores):
                stores.go(case)
            stores.full_disk()
            stores.first()
            counts = stores.counts
            log(f"stores: {counts['kill'] + counts['torn']} kills ({counts['torn']} of them in the "
                f"middle of a write), {counts['eio'] + counts['enospc']} errors, "
                f"{counts['short']} short writes, {counts['term']} stops, "
                f"{counts['full disks']} full disks over {counts['calls']} calls; all could be "
                f"restored and repeated")
            for kind in ("kill", "torn", "eio", "enospc", "short", "term", "full disks"):
                expect(counts[kind] > 0, f"the campaign had no {kind}")
    except Broken as broken:
        log(f"FAILED: {broken}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
