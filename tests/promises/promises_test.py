#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commands' promises of memory and disk, compared with their use.

Usage: promises_test.py BIN [--megabytes N] [--threads N] [--quick]
--quick tests two commands, with less of each.

memory   with --memory at its default and at 75, 50 and 25 % of it, and at the least that is accepted, the largest resident
         set stays below the promise, and so does the use of a run beyond a dry run (programs, object graphs, plan).
         Less than the least gives exit code 8, and the message names the required size.
space    with ever less address space (RLIMIT_AS) a run ends with 0 and its whole output, or with 7 or 8 and none.
disk     --dry-run reports the bytes that the output takes within 2 % and 1 MiB, of a store the most that it takes. On a
         file system (of its own, if mounts may be made) with a little more than that the run succeeds; with a little
         less it ends with 7, and --resume completes it once there is space.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import moe_checkpoint  # pylint: disable=wrong-import-position
import scenarios  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position
from harness import Broken, Log, Scratch, environment, expect, succeed, tree  # pylint: disable=wrong-import-position

MIB = 1 << 20
DEFAULT_BYTES = 1 << 30  # of --memory, where the machine has four times as much
SLACK_BYTES = MIB  # a page table, an allocator's rounding


class Done:
    def __init__(self, argv, folder, limit_bytes=None):
        def limited():
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        with open(folder / "said", "w+", encoding="utf-8", errors="replace") as said:
            # pylint: disable-next=subprocess-popen-preexec-fn,consider-using-with
            process = subprocess.Popen([str(word) for word in argv], env=environment(), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=said, preexec_fn=limited)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = 0  # it was waited for
            said.seek(0)
            self.stderr = said.read()
        self.argv, self.code = argv, os.waitstatus_to_exitcode(status)
        self.peak_bytes = usage.ru_maxrss * 1024

    def __str__(self):
        return f"{' '.join(map(str, self.argv))}: exit code {self.code}, {self.peak_bytes / MIB:.1f} MiB\n{self.stderr}"


class Case:
    """\\param argv  with OUT for the output. \\param before  makes the inputs of the run again, or None"""

    def __init__(self, name, argv, before=None):
        self.name, self.argv, self.before = name, list(argv), before


class Promises:
    def __init__(self, programs, folder, megabytes, threads, log):
        self.programs, self.folder, self.log = programs, folder, log
        self.threads = ["--threads", str(threads)]
        self.least = 9 * MIB * threads
        self.counts, self.worst, self.rows = collections.Counter(), 0.0, {}
        self.source = scenarios.grow(folder / "dense", megabytes * 10 ** 6 // (18 * 47 * 14))
        # Elements of experts: 2 weights of hidden^2, 3 states of 4 bytes each, weights of 4.
        hidden = max(16, int((megabytes * 10 ** 6 / (8 * 2 * 16)) ** 0.5) // 4 * 2)
        self.model = moe_checkpoint.Model(layers=1, experts=8, hidden=hidden)
        moe_checkpoint.series(folder / "moe", self.model, (1,))
        succeed([programs / "pec-save", folder / "moe" / "global_step1", folder / "store"])

    def cases(self):
        load, union, save, restore = (self.programs / name
                                      for name in ("ucp-load", "ucp-union", "pec-save", "pec-restore"))
        return [
            Case("ucp-load", [load, self.source, "OUT", "--target", "zero=3,dp=3"]),
            Case("ucp-load to DCP", [load, self.source, "OUT", "--format", "dcp", "--target", "dp_shard=3"]),
            Case("ucp-union", [union, self.source, "OUT"]),
            Case("pec-save", [save, self.folder / "moe" / "global_step1", "OUT"]),
            Case("pec-save --compress zstd", [save, self.folder / "moe" / "global_step1", "OUT", "--compress", "zstd"]),
            Case("pec-restore", [restore, self.folder / "store", "OUT", "--target", "ep=4,dp=4", "--read-only"]),
        ]

    def run(self, case, *more, output=None, **options):
        output = output or self.folder / "out"
        argv = [output if word == "OUT" else word for word in case.argv]
        return Done([*argv, *self.threads, *more], self.folder, **options)

    def remove(self, output=None):
        shutil.rmtree(output or self.folder / "out", ignore_errors=True)

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory(self, case):
        dry = self.run(case, "--dry-run")
        expect(dry.code == 0, f"dry run: {dry}")
        wanted, peaks = None, []
        for memory in (None, DEFAULT_BYTES * 3 // 4, DEFAULT_BYTES // 2, DEFAULT_BYTES // 4, 64 * MIB, self.least):
            done = self.run(case, *(() if memory is None else ("--memory", str(memory))))
            expect(done.code == 0, f"{case.name} with memory {memory}: {done}")
            promise = memory or DEFAULT_BYTES
            beyond = done.peak_bytes - dry.peak_bytes
            expect(beyond <= promise + SLACK_BYTES,
                   f"{case.name}: {beyond} bytes beyond those of a dry run, {promise} were promised: {done}")
            if promise >= 64 * MIB:
                expect(done.peak_bytes <= promise, f"{case.name}: {promise} bytes were promised: {done}")
            found = tree(self.folder / "out")
            wanted = wanted or found
            expect(found == wanted, f"{case.name} with memory {memory}: another output")
            self.remove()
            self.counts["memory"] += 1
            self.worst = max(self.worst, beyond / promise)
            peaks.append(done.peak_bytes)
        done = self.run(case, "--memory", str(self.least - 1))
        expect(done.code == 8 and "is needed" in done.stderr or "of buffers" in done.stderr,
               f"{case.name} below the least: {done}")
        expect(not (self.folder / "out").exists(), f"{case.name} below the least left an output")
        self.counts["memory"] += 1
        self.row(case)[:3] = mib(dry.peak_bytes), mib(min(peaks)), mib(max(peaks))
        self.log(f"{case.name}: {mib(dry.peak_bytes)} of a dry run; {', '.join(map(mib, peaks))} with the default, 768, 512, 256, "
                 f"64 and {self.least // MIB} MiB")

    def row(self, case):
        """For the table: three peaks, bytes reported and written."""
        return self.rows.setdefault(f"`{case.name}`", [""] * 5)

    # --- address space --------------------------------------------------------------------------------------------

    def space(self, case):
        codes = collections.Counter()
        for limit in [*range(16, 128, 8), *range(128, 512, 64), 1024, 3072]:
            done = self.run(case, "--memory", str(self.least), limit_bytes=limit * MIB)
            if limit < 48 and done.code in (127, -11, -6, 1) and "shardwright" not in done.stderr and not codes[0]:
                codes["no start"] += 1  # the dynamic linker had no room for the libraries
            else:
                expect(done.code in (0, 7, 8), f"{case.name} with {limit} MiB of addresses: {done}")
                codes[done.code] += 1
            expect(done.code == 0 or not self.made(case), f"{case.name}, {limit} MiB of addresses: an output: {done}")
            for path in self.folder.glob("out*"):
                shutil.rmtree(path, ignore_errors=True)
            self.counts["space"] += 1
        expect(codes[0] > 0, f"{case.name} never succeeds: {codes}")
        self.log(f"{case.name}: exit codes with 16 to 3072 MiB of addresses: {dict(codes)}")

    def made(self, case):
        out = self.folder / "out"
        # A store is there before its first checkpoint is.
        return any((out / "manifests").iterdir()) if (out / "manifests").is_dir() else out.exists() and \
            not case.name.startswith("pec-save")

    # --- disk -----------------------------------------------------------------------------------------------------

    def disk(self, case):
        report = self.folder / "report.json"
        done = self.run(case, "--dry-run", f"--json={report}")
        expect(done.code == 0, f"dry run: {done}")
        told = predicted(json.loads(report.read_text()))
        expect(not (self.folder / "out").exists(), f"{case.name}: a dry run made something")
        expect(self.run(case).code == 0, f"{case.name}: the real run")
        real = sum(path.stat().st_size for path in (self.folder / "out").rglob("*") if path.is_file())
        taken = sum(path.stat().st_blocks * 512 for path in (self.folder / "out").rglob("*") if path.is_file())
        wanted = tree(self.folder / "out")
        self.remove()
        # Blobs with equal content are stored once, and compressed ones take less.
        less = real < told and case.name.startswith("pec-save")
        expect(less or abs(real - told) <= told // 50 + MIB, f"{case.name}: {told} bytes told, {real} taken")
        self.counts["disk"] += 1
        self.row(case)[3:] = told, real
        self.log(f"{case.name}: {told} bytes told, {real} written ({100 * (real - told) / told:+.2f} %)")
        self.full(case, real, max(told, taken), wanted)

    def full(self, case, real, taken, wanted):
        place = self.folder / "disk"
        place.mkdir()
        size = taken + taken // 50 + MIB
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True,
                          check=False).returncode != 0:
            self.counts["disks that may not be made"] += 1
            return
        try:
            done = self.run(case, output=place / "out")
            expect(done.code == 0, f"{case.name} on a disk of {size} bytes: {done}")
            expect(tree(place / "out") == wanted, f"{case.name} on a small disk: another output")
            for share in (0.1, 0.5, 0.9, 0.99):
                for path in place.iterdir():
                    shutil.rmtree(path)
                subprocess.run(["mount", "-o", f"remount,size={int(real * share)}", place], check=True)
                done = self.run(case, output=place / "out")
                expect(done.code == 7, f"{case.name} on a disk of {share:.0%}: {done}")
                expect(re.search("space|needed", done.stderr), f"{case.name}: the reason is not told: {done}")
                subprocess.run(["mount", "-o", f"remount,size={size}", place], check=True)
                again = self.run(case, *([] if case.name.startswith("pec-save") else ["--resume"]), output=place / "out")
                expect(again.code == 0, f"{case.name} once there was room: {again}")
                expect(tree(place / "out") == wanted, f"{case.name} once there was room: another output")
                self.counts["full disks"] += 1
        finally:
            subprocess.run(["umount", place], check=False)
            place.rmdir()


def mib(count):
    return f"{count / MIB:.0f} MiB"


def predicted(report):
    """Bytes that a dry run reports."""
    result = report["result"]
    plan = result.get("conversion", result).get("plan")
    return plan["output_bytes"] if plan else result["bytes"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    log = Log()
    violations = 0
    with Scratch("promises-") as folder:
        one = Promises(arguments.bin, folder, arguments.megabytes, arguments.threads, log)
        quick = arguments.quick
        for case in one.cases()[::5] if quick else one.cases():
            for what in (one.memory, one.disk) if quick else (one.memory, one.space, one.disk):
                try:
                    what(case)
                except Broken as broken:
                    violations += 1
                    log(f"VIOLATION {case.name}: {str(broken)[:1500]}")
                for path in folder.glob("out*"):
                    shutil.rmtree(path, ignore_errors=True)
    tables.show(("Command", "Peak of a dry run", "Smallest peak", "Largest peak", "Bytes predicted", "Bytes written"),
                [(name, *row) for name, row in one.rows.items()])
    counts = ", ".join(f"{count} {name}" for name, count in sorted(one.counts.items()))
    log(f"promises: {counts}; at most {one.worst:.0%} of a promise beyond a dry run; {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
