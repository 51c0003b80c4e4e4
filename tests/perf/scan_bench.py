#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how commands handle checkpoints with many files, and prints a Markdown table.

    scan_bench.py [--bin build/release/bin] [--before OTHER/bin] [--runs 5] [--only slow,ranks,many,atoms,outputs,formats]
                  [--hidden 512] [--work DIR]

slow: --dry-run of 768 files (384 ZeRO-3 ranks, 200 tensors) with 0, 2 and 20 ms added to every open and read of them.
ranks: the same with 2 ms under mpirun with 4 ranks. many: 32,768 files from the page cache with 2 threads. atoms: 351 small
atoms written and read with 2 ms added to every open, read, write, sync and rename. outputs: 30,000 files written with the
same delay. With --plain the rows atoms and outputs are repeated without delays, next to cp -r and sync. formats: a model of
this hidden size (512: 1.2 GB, 1024: 4.7 GB) converted from DeepSpeed to each format and back, without delays. The delays
come from slow_files.c, which is compiled and preloaded. With --before each run is paired with one of other binaries.
"Memory" is the largest resident set. Needs the Python with PyTorch of scripts/peers, a C compiler, and 1 GB in the work
folder, or 1 GB for each run of outputs, or three times the model for formats.
"""
import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PEERS = pathlib.Path.home() / ".cache/shardwright/peers/bin/python"


class Bench:
    def __init__(self, args, work):
        self.args = args
        self.work = work
        self.kept = None  # the last output
        self.slow = work / "slow_files.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", HERE / "slow_files.c", "-o", self.slow, "-ldl"], check=True)

    def sparse(self, ranks, tensors, params="1e9"):
        folder = self.work / f"sparse-{ranks}-{tensors}-{params}"
        if not folder.exists():
            subprocess.run([self.args.python, HERE / "make_sparse.py", folder, "--ranks", str(ranks), "--tensors", str(tensors),
                            "--params", params], check=True)
        return folder

    def small(self, tensors=117):
        """A model of small parameters, each with a master weight and two moments of 34 KB."""
        return self.sparse(2, tensors, f"{tensors / 117:.6g}e6")

    def atoms(self):
        folder = self.work / "atoms"
        if not folder.exists():
            subprocess.run([self.args.bin / "ucp-union", self.small(), folder, "-q"], check=True)
        return folder

    def keep(self, folder):
        """Renames an output. ext4 creates files slowly for half a minute after many were removed."""
        old = self.work / "old"
        old.mkdir(exist_ok=True)
        self.kept = old / str(len(list(old.iterdir())))
        folder.rename(self.kept)

    def copied(self, folder):
        """Seconds of cp -r and a sync of the copy."""
        out = self.work / "copy"
        times = []
        for _ in range(self.args.runs):
            begin = time.perf_counter()
            subprocess.run(["cp", "-r", folder, out], check=True)
            subprocess.run(["sync", "-f", out], check=True)
            times.append(time.perf_counter() - begin)
            self.keep(out)
        print(f"| the same, `cp -r` and `sync` | | {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}) | | | |", flush=True)

    def seconds(self, binaries, words, delay_us=0, below=None, launcher=()):
        """Of one run, the opens of files below the folder, and the memory in MiB."""
        counts = self.work / "counts"
        counts.unlink(missing_ok=True)
        env = dict(os.environ, SLOW_FILES=str(below or ""), SLOW_FILES_US=str(delay_us), SLOW_FILES_COUNT=str(counts),
                   OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        preload = ["env", f"LD_PRELOAD={self.slow}"] if below else []
        argv = [*launcher, *preload, binaries / words[0], *words[1:], "-q"]
        begin = time.perf_counter()
        process = subprocess.Popen([str(word) for word in argv], env=env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, argv)
        lines = counts.read_text().splitlines() if counts.exists() else []
        opens = sum(int(word.split("=")[1]) for line in lines for word in line.split() if word.startswith("opens="))
        return taken, opens, usage.ru_maxrss / 1024

    def row(self, what, words, clean=None, keep=True, **how):
        times = {name: [] for name in ("before", "now")}
        opens, memory = {}, {name: 0 for name in times}
        for _ in range(self.args.runs):
            for name, binaries in (("before", self.args.before), ("now", self.args.bin)):
                if binaries is None:
                    continue
                taken, opens[name], mebibytes = self.seconds(binaries, words, **how)
                times[name].append(taken)
                memory[name] = max(memory[name], mebibytes)
                if clean and keep:
                    self.keep(clean)
                elif clean:
                    shutil.rmtree(clean)
        shown = [f"{statistics.median(of):.2f} s ({min(of):.2f}-{max(of):.2f})" if of else "" for of in times.values()]
        counted = ", ".join(str(opens[name]) for name in times if opens.get(name))
        ratio = f"{statistics.median(times['now']) / statistics.median(times['before']):.2f}" if times["before"] else ""
        resident = ", ".join(f"{memory[name]:.0f} MiB" for name in times if memory[name])
        print(f"| {what} | {shown[0]} | {shown[1]} | {ratio} | {counted} | {resident} |", flush=True)

    def run(self):
        print("| what | before | now | ratio | opens below the source | memory |\n|---|---|---|---|---|---|")
        only = self.args.only.split(",")
        out = self.work / "out"
        if "slow" in only:
            source = self.sparse(384, 200)
            for delay_ms in (0, 2, 20):
                self.row(f"768 files, {delay_ms} ms", ["ucp-load", "--dry-run", source, out, "--target", "dp=4"],
                         delay_us=delay_ms * 1000, below=source)
        if "ranks" in only:
            source = self.sparse(384, 200)
            self.row("768 files, 2 ms, 4 ranks", ["ucp-load", "--dry-run", source, out, "--target", "dp=4"], delay_us=2000,
                     below=source, launcher=["mpirun", "--oversubscribe", "-n", "4"])
        if "many" in only:
            source = self.sparse(16384, 4000)
            self.row("32768 files from the page cache", ["ucp-extract", source, out, "--threads", "2"], clean=out)
        if "atoms" in only:
            atoms = self.atoms()
            self.row("351 atoms read, 2 ms", ["ucp-load", "--dry-run", atoms, out, "--target", "dp=2"], delay_us=2000, below=atoms)
            self.row("351 atoms written, 2 ms", ["ucp-union", self.small(), out], clean=out, delay_us=2000, below=out)
            if self.args.plain:
                self.row("351 atoms written", ["ucp-union", self.small(), out], clean=out)
                self.copied(atoms)
        if "outputs" in only:
            source = self.small(7500)
            self.row("30,000 files written, 2 ms", ["ucp-union", source, out], clean=out, delay_us=2000, below=out)
            if self.args.plain:
                self.row("30,000 files written", ["ucp-union", source, out], clean=out)
                self.copied(self.kept)
        if "formats" in only:
            self.formats()

    def formats(self):
        base = self.work / f"model-{self.args.hidden}"
        if not base.exists():
            torchrun = pathlib.Path(self.args.python).parent / "torchrun"
            subprocess.run([torchrun, "--nproc-per-node", "2", HERE / "make_checkpoint.py", base, "--hidden",
                            str(self.args.hidden)], check=True, env=dict(os.environ, DS_ACCELERATOR="cpu"), stdout=subprocess.DEVNULL)
        out = self.work / "out"
        self.row("union", ["ucp-union", base, out], clean=out, keep=False)
        self.row("load", ["ucp-load", base, out, "--target", "zero=2,dp=3"], clean=out, keep=False)
        for name, target in (("dcp", "dp_shard=4"), ("dtensor", "dp_shard=4"), ("megatron", "optimizer=fully_reshardable")):
            source = self.work / name
            subprocess.run([self.args.bin / "ucp-load", base, source, "--format", name, "--target", target, "-q"], check=True)
            self.row(f"to {name}", ["ucp-load", base, out, "--format", name, "--target", target], clean=out, keep=False)
            self.row(f"from {name}", ["ucp-load", source, out, "--format", "deepspeed", "--target", "zero=2,dp=3"], clean=out,
                     keep=False)
            shutil.rmtree(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "build/release/bin")
    parser.add_argument("--before", type=pathlib.Path)
    parser.add_argument("--python", default=str(PEERS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="slow,ranks,many,atoms,outputs")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--work", type=pathlib.Path, help="keeps the checkpoints for the next call")
    args = parser.parse_args()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
        Bench(args, args.work.resolve()).run()
        return
    with tempfile.TemporaryDirectory() as folder:
        Bench(args, pathlib.Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main())
