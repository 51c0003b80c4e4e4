#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time that a trainer waits to be filled from a shared-memory cache, against DeepSpeed's load_checkpoint, in pairs: of
files in a tmpfs, and of files on a disk that are not in memory. Two ranks, ZeRO-2, bf16, the same layout. And the bytes
that the cache has read, against the source.

    cache.py BIN PACKAGE FOLDER DISK [--runs 5] [--width 2048]
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/interop/deepspeed"))

import ranks  # pylint: disable=wrong-import-position
import torch.distributed as dist
from model import complete, make_engine, train_step


def timed(work):
    """Collective. Seconds until all ranks are done."""
    dist.barrier()
    start = time.monotonic()
    work()
    dist.barrier()
    return time.monotonic() - start


def case_of(given):
    return complete({"zero": 2, "dtype": "bf16", "width": given.width, "batch": 8})


def make(given):
    """Collective. A checkpoint."""
    engine = make_engine(case_of(given))
    train_step(engine, case_of(given), 0)
    engine.save_checkpoint(given.folder / "ckpt")


def measure(given, address):
    """Collective."""
    sys.path.insert(0, str(given.package))
    import shardwright
    engine = make_engine(case_of(given))
    ours, theirs, cold, filled = [], [], [], 0

    def fill():
        nonlocal filled
        filled = shardwright.load(engine, address, threads=1).bytes_filled

    def forget():
        for path in (given.disk / "ckpt").rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    for run in range(given.runs + 1):
        forget()
        times = (timed(fill), timed(lambda: engine.load_checkpoint(given.folder / "ckpt")),
                 timed(lambda: engine.load_checkpoint(given.disk / "ckpt")))
        for kept, seconds in zip((ours, theirs, cold), times):
            if run > 0:
                kept.append(seconds)
    return {"ours": ours, "tmpfs": theirs, "disk": cold, "filled": filled}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("package", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("disk", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    given = parser.parse_args()
    for folder in (given.folder, given.disk):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    address = f"unix:{given.folder}/s"
    command = str(given.bin / "ucp-load")
    try:
        ranks.run(2, make, given, seconds=600)
        shutil.copytree(given.folder / "ckpt", given.disk / "ckpt")
        os.sync()  # unwritten data cannot be dropped from memory
        words = [command, given.folder / "ckpt", given.folder / "out", "--target", "zero=2,dp=3", "--dry-run", "--json", "-q"]
        plan = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["result"]["plan"]
        begun = time.monotonic()
        with subprocess.Popen(["mpirun", "--oversubscribe", "-n", "2", command, "serve", given.folder / "ckpt", address,
                               "--target", "zero=2,dp=2", "-q"], stdout=subprocess.DEVNULL,
                              env=os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}):
            words = [command, "status", address, "--wait", "600", "--json", "-q"]
            status = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["result"]
            loaded = time.monotonic() - begun
            try:
                found = ranks.run(2, measure, given, address, seconds=1200)
            finally:
                subprocess.run([command, "stop", address, "-q"], check=True)
    finally:
        for folder in (given.folder, given.disk):
            shutil.rmtree(folder, ignore_errors=True)

    def span(times):
        return f"{min(times):.3f}-{max(times):.3f}"

    ours = statistics.median(found["ours"])
    for place in ("tmpfs", "disk"):
        theirs = statistics.median(found[place])
        print(f"{theirs / ours:.1f} times faster ({ours:.3f} s to {theirs:.3f} s; {span(found['ours'])} to "
              f"{span(found[place])}; {found['filled'] / 1e6:.0f} MB)")
    print(f"{status['bytes_read']} bytes of {plan['read_bytes']} read by 2 processes, in {loaded:.2f} s with their start")


if __name__ == "__main__":
    main()
