#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures commands that write to a file system, against cp of the same files and a sync, and prints a Markdown table.

    filesystems_bench.py [--bin build/release/bin] [--only ext4,sshfs] [--rows atoms,large] [--runs 5] [--renamed] [--work DIR]

atoms: `ucp-union` to 351 small atoms of 34 KB, against `cp -r` of the atoms and `sync -f`. large: `ucp-load` of a ZeRO-2
checkpoint to three ranks (a few large files), against `cp -r` of its output and `sync -f`. `sync -f` does nothing on FUSE,
where `sync` is called with the names of all files instead. With --renamed the copy is renamed after the sync, as the
commands rename their output: on s3fs a rename copies the data. Both read from the page cache of the local file system. Runs
alternate. The file systems are those of tests/filesystems/mounts.py, so this needs root; those that cannot be mounted are
printed with the reason. Creating the checkpoints needs the Python with PyTorch of scripts/peers; --work keeps them for later
calls, also for those in a virtual machine:

    tests/filesystems/vm --share DIR -- tests/perf/filesystems_bench.py --work DIR --only nfs4,nfs3,vfat,exfat
"""
import argparse
import atexit
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
PEERS = pathlib.Path.home() / ".cache/shardwright/peers/bin"
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parent / "filesystems"))

import mounts  # pylint: disable=wrong-import-position

TARGETS = {"atoms": {"ext4": 2, "sshfs": 3, "nfs4": 3, "nfs3": 3, "nfs3-nolock": 3}, "large": dict.fromkeys(mounts.SYSTEMS, 1.2)}
SHOWN = {"atoms": "351 small atoms", "large": "large files"}


def sources(args):
    """Makes the checkpoints that are missing."""
    args.work.mkdir(parents=True, exist_ok=True)
    small, large = args.work / "small", args.work / "large"
    if "atoms" in args.rows and not small.exists():
        subprocess.run([PEERS / "python", HERE / "make_sparse.py", small, "--ranks", "2", "--tensors", "117", "--params", "1e6"],
                       check=True)
    if "large" in args.rows and not large.exists():
        hidden = 1024 if args.megabytes >= 405 else 256
        ends, layer = 287 * hidden / 1024, 118 * (hidden / 1024) ** 2  # MB of the embedding and the head, of a layer
        layers = max(1, int((args.megabytes - ends) / layer))
        subprocess.run([PEERS / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", HERE / "make_checkpoint.py", large,
                        "--hidden", str(hidden), "--layers", str(layers), "--vocab", "10000"], check=True, stdout=subprocess.DEVNULL,
                       env=dict(os.environ, DS_ACCELERATOR="cpu"))


class Bench:
    """One file system: `node` is a path on it, `local` a folder on the local one."""

    def __init__(self, args, name, node, local):
        self.args, self.name, self.node, self.local = args, name, node, local
        self.commands = {"atoms": ["ucp-union"], "large": ["ucp-load", "--target", "zero=2,dp=3"]}

    def ours(self, row, output):
        program, *options = self.commands[row]
        subprocess.run([self.args.bin / program, self.local / row, output, *options, "-q"], check=True, env=mounts.environment())

    def copy(self, row, output):
        path = output.with_suffix(".part") if self.args.renamed else output
        subprocess.run(["cp", "-r", self.local / f"{row}-output", path], check=True)
        kind = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True).stdout
        files = [file for file in path.rglob("*") if file.is_file()]
        subprocess.run(["sync", *(files if kind.startswith("fuse") else ("-f", path))], check=True)
        path.rename(output)

    def measured(self, row):
        """Seconds of the command and of the copy, in turn. Small outputs stay until the end, because ext4 creates files
        slowly for half a minute after many were removed."""
        times = {self.ours: [], self.copy: []}
        for run in range(self.args.runs):
            for what in list(times)[::1 if run % 2 else -1]:
                output = self.node / f"{row}-{what.__name__}-{run}"
                begin = time.perf_counter()
                what(row, output)
                times[what].append(time.perf_counter() - begin)
                if row == "large":
                    shutil.rmtree(output)
                    subprocess.run(["sync", "-f", self.node], check=True)
        return times.values()

    def row(self, row):
        ours, copy = self.measured(row)
        ratio = statistics.median(ours) / statistics.median(copy)
        ranges = "; ".join(f"{min(of):.2f}-{max(of):.2f}" for of in (ours, copy)).replace("; ", " to ")
        target = TARGETS[row].get(self.name)
        print(f"| {self.name} | {SHOWN[row]} | {ratio:.2f} ({statistics.median(ours):.2f} s to {statistics.median(copy):.2f} s; {ranges}) "
              f"| {f'≤ {target}' if target else ''} |", flush=True)

    def run(self):
        for row in self.args.rows:
            shutil.copytree(self.args.work / {"atoms": "small"}.get(row, row), self.local / row)
            self.ours(row, self.local / f"{row}-output")
            os.sync()
            self.row(row)


def child(args, name):
    """Mounts in a namespace that ends with this process."""
    try:
        world = mounts.enter()
        # SeaweedFS keeps the bytes of removed files, and s3fs copies a file to rename it.
        node, _ = mounts.large(name, world, 256 + (3 + 3 * args.runs) * args.megabytes)
    except mounts.Missing as why:
        print(f"| {name} | skipped: {why} | | |", flush=True)
        return
    (world / "local").mkdir()
    Bench(args, name, node, world / "local").run()


def leave(function, *arguments):
    """Calls a function and ends a forked process, without what the functions that called it would do at their end."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:  # pylint: disable=broad-exception-caught
        traceback.print_exc()
    atexit._run_exitfuncs()  # pylint: disable=protected-access  # unmounts
    sys.stdout.flush()
    os._exit(code)


def measure(args):
    sources(args)
    print("| File system | Output | Ratio | Target |\n|---|---|---|---|", flush=True)
    failed = 0
    for name in args.only:
        process = os.fork()
        if process == 0:
            leave(child, args, name)
        if os.waitpid(process, 0)[1] != 0:
            print(f"| {name} | failed | | |", flush=True)
            failed = 1
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "build/release/bin")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(mounts.SYSTEMS))
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(SHOWN))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the large checkpoint, about")
    parser.add_argument("--renamed", action="store_true", help="rename each copy after its sync")
    parser.add_argument("--work", type=pathlib.Path, help="keeps the checkpoints for the next call")
    args = parser.parse_args()
    if args.work:
        return measure(args)
    with tempfile.TemporaryDirectory() as folder:
        args.work = pathlib.Path(folder)
        return measure(args)


if __name__ == "__main__":
    sys.exit(main())
