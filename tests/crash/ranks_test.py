#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several ranks of which one dies, hangs or loses its launcher, at calls that change something on disk.

Usage: ranks_test.py BIN --mpirun PROGRAM [--ranks N]... [--calls N] [--case NAME]... [--seconds N] [--jobs N]

Each rank in turn is the victim, at --calls of its calls, evenly chosen:
  kill     it dies; the others end within the deadline
  hang     it stops (SIGSTOP); the others wait, and the launcher ends all of them on SIGTERM
  wake     it stops and continues after a while; the run ends as if nothing had been
  orphans  the launcher is killed (SIGKILL); no rank is left after the deadline
Afterwards nothing runs, the disk has the old or the new output, and the same command again (with --resume where it has
that) ends well with the bytes of an undisturbed run. --seconds is the deadline. --jobs is how many runs execute at
once: they wait more than they compute.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True

import moe_checkpoint  # pylint: disable=wrong-import-position
from harness import (DEMO, Broken, Log, Scratch, difference, environment, expect, finish,  # pylint: disable=wrong-import-position
                     run, succeed, tree)

MODEL = moe_checkpoint.Model(layers=1, experts=4)
WAYS = ("kill", "hang", "wake", "orphans")


class Case:
    """\\param argv  of one rank. \\param resume  words added to it the second time. \\param seen  makes of a store,
    which may have an iteration twice, the output that it gives"""

    def __init__(self, name, argv, before=None, resume=(), seen=()):
        self.name, self.argv, self.before, self.resume, self.seen = name, argv, before, list(resume), seen

    def made(self, where):
        """Reads the output of the command. \\returns a tree, or None"""
        for argv in self.seen:
            shutil.rmtree(where / "out", ignore_errors=True)
            succeed(argv, cwd=where)
        return tree(where / "out") if (where / "out").exists() else None


def cases(programs, folder):
    """The commands to disturb. They run in a folder of the trial."""
    sources = folder / "sources"
    moe_checkpoint.series(sources, MODEL, range(1, 4))
    flags = ["--threads", "1"]
    for iteration in (1, 2):
        succeed([programs / "pec-save", sources / f"global_step{iteration}", folder / "store", "--k", "1", *flags])
    return [
        Case("load", [programs / "ucp-load", DEMO, "out", "--target", "zero=3,dp=3", *flags], resume=["--resume"]),
        Case("load-node-local", [programs / "ucp-load", DEMO, "out", "--target", "zero=3,dp=3", "--node-local", *flags],
             resume=["--resume"]),
        Case("union", [programs / "ucp-union", DEMO, "out", *flags], resume=["--resume"]),
        Case("save", [programs / "pec-save", sources / "global_step3", "store", "--k", "1", *flags], before=folder / "store",
             seen=[[programs / "pec-save", "check", "store"], [programs / "pec-restore", "store", "out", "--read-only"]]),
        Case("restore", [programs / "pec-restore", "store", "out", "--target", "ep=4,dp=4", *flags],
             before=folder / "store", resume=["--resume"]),
    ]


def processes(word):
    """Processes with a trial in their folder or words, with their state."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
            place = os.readlink(f"/proc/{name}/cwd")
        except (OSError, ValueError):
            continue
        if place == word and state != "Z":
            found[int(name)] = state
    return found


def until(condition, seconds):
    """\\returns whether it came true, after how many seconds"""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return True, time.monotonic() - began
        time.sleep(0.005)
    return bool(condition()), time.monotonic() - began


class Ranks:
    def __init__(self, case, mpirun, ranks, deadline, folder, log):
        self.case, self.mpirun, self.ranks, self.deadline = case, mpirun, ranks, deadline
        self.folder, self.log = folder, log
        self.counts, self.slowest, self.lock = collections.Counter(), 0.0, threading.Lock()

    def argv(self, faults=None, more=()):
        """\\param faults  {rank: its SHARDWRIGHT_FAULT}"""
        words = [self.mpirun, "--oversubscribe"]
        for rank in range(self.ranks):
            fault = [f"SHARDWRIGHT_FAULT={faults[rank]}"] if faults and rank in faults else []
            words += [*([":"] if rank else []), "-n", "1", "env", *fault, *self.case.argv, *more]
        return list(map(str, words))

    def place(self, name):
        where = self.folder / name
        where.mkdir()
        if self.case.before:
            shutil.copytree(self.case.before, where / "store")
        return where

    def go(self, calls, jobs):
        base = self.place("base")
        counts = {rank: f"count:{base / f'counts-{rank}'}" for rank in range(self.ranks)}
        done = run(self.argv(counts), cwd=base)
        expect(done.code == 0, f"undisturbed: {done}")
        self.wanted = self.case.made(base)
        trials = []
        for victim in range(self.ranks):
            words = (base / f"counts-{victim}").read_text().split()
            count = next(int(word[4:]) for word in words if word.startswith("any="))
            self.counts["calls"] += count
            for number in sorted({1 + i * (count - 1) // max(1, calls - 1) for i in range(min(calls, count))}):
                trials += [(way, victim, number) for way in WAYS]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(self.trial, *trial, (i + i // len(WAYS)) % 2 == 0)
                         for i, trial in enumerate(trials)]:
                done.result()
        kinds = ", ".join(f"{self.counts[way]} {way}" for way in WAYS)
        self.log(f"{self.case.name}, {self.ranks} ranks: {kinds} over {self.counts['calls']} calls; the slowest end "
                 f"{self.slowest:.1f} s")

    def trial(self, way, victim, number, several):
        """\\param several  whether the command is run again with as many ranks, or with one"""
        where = self.place(f"{way}-{victim}-{number}")
        what = f"{self.case.name}, {self.ranks} ranks, {way} of rank {victim} at call {number}"
        action = "kill" if way == "kill" else "hang"
        process = subprocess.Popen(self.argv({victim: f"any:{number}:{action}"}), env=environment(), cwd=where,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   errors="replace", start_new_session=True)
        try:
            # A rank has a call more or less from run to run: its last one may not come.
            reached = way == "kill" or self.stopped(process, where, what)
            reached = reached and getattr(self, way)(process, where, what) is not False
            with self.lock:
                self.counts[way if reached else "ended before"] += 1
            gone, seconds = until(lambda: not processes(str(where)), self.deadline)
            expect(gone, f"{what}: still there after {seconds:.0f} s: {processes(str(where))}")
        finally:
            for pid in processes(str(where)):
                os.kill(pid, signal.SIGKILL)
        self.look(where, what, several)
        shutil.rmtree(where)

    def stopped(self, process, where, what):
        """Waits for the victim to stop. \\returns false if the run ended well without"""
        until(lambda: process.poll() is not None or self.victims(where), self.deadline)
        if self.victims(where):
            return True
        done = self.ended(process, what)
        expect(done.code == 0, f"{what}: no rank has stopped: {done}")
        return False

    def victims(self, where):
        return [pid for pid, state in processes(str(where)).items() if state == "T"]

    def ended(self, process, what):
        began = time.monotonic()
        done = finish(process, self.deadline)
        self.took(time.monotonic() - began)
        return done

    def took(self, seconds):
        with self.lock:
            self.slowest = max(self.slowest, seconds)

    def kill(self, process, _, what):
        done = self.ended(process, what)
        expect(done.code in (0, 137), f"{what}: exit code 137 expected: {done}")
        return done.code != 0

    def hang(self, process, _, what):
        time.sleep(0.2)
        expect(process.poll() is None, f"{what}: the others went on without it")
        process.send_signal(signal.SIGTERM)
        done = self.ended(process, what)
        expect(done.code != 0, f"{what}: told to end, ended with 0: {done}")

    def wake(self, process, where, what):
        time.sleep(0.1)
        for pid in self.victims(where):
            os.kill(pid, signal.SIGCONT)
        done = self.ended(process, what)
        expect(done.code == 0, f"{what}: {done}")
        expect(self.case.made(where) == self.wanted, f"{what}: another output")

    def orphans(self, process, where, what):
        victims = self.victims(where)
        process.kill()
        process.communicate()
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
        gone, seconds = until(lambda: not processes(str(where)), self.deadline)
        expect(gone, f"{what}: without a launcher for {seconds:.0f} s: {processes(str(where))}")
        self.took(seconds)

    def look(self, where, what, several):
        """The output on disk is whole; the command again makes all of it."""
        if not self.case.seen:
            expect(self.case.made(where) in (None, self.wanted), f"{what}: a partial output has the name")
        again = succeed(self.argv(more=self.case.resume) if several else [*self.case.argv, *self.case.resume], cwd=where)
        found = self.case.made(where)
        expect(found == self.wanted, f"{what}: {difference(self.wanted, found or {})} after {again}")
        left = sorted(set(os.listdir(where)) - {"out", "store"})
        expect(not left, f"{what}: left {left}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--case", action="append")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    log = Log()
    total = collections.Counter()
    try:
        with Scratch("crash-several-") as folder:
            for case in cases(arguments.bin, folder):
                if arguments.case and case.name not in arguments.case:
                    continue
                for ranks in arguments.ranks or (2, 4):
                    place = folder / f"{case.name}-{ranks}"
                    place.mkdir()
                    one = Ranks(case, arguments.mpirun, ranks, arguments.seconds, place, log)
                    one.go(arguments.calls, arguments.jobs)
                    total += one.counts
    except Broken as broken:
        log(f"FAILED: {broken}")
        return 1
    log("ranks: " + ", ".join(f"{total[way]} {way}" for way in WAYS) + f" over {total['calls']} calls, "
        f"{total['ended before']} ended before their call, 0 violations")
    if not all(total[way] for way in WAYS):
        log("FAILED: a way was never taken")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
