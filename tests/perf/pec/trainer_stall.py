#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stall of training in a snapshot of PartialCheckpoints, one of 16 experts, against DeepSpeed's save_checkpoint into a
tmpfs, in pairs: two ranks, ZeRO-2, bf16, ep=2. With --overlap tensors are copied during the next step of training: then
the times of steps with and without copies are printed, too.

    trainer_stall.py BIN PACKAGE FOLDER [--runs 5] [--width 1024] [--overlap]
"""

import argparse
import os
import pathlib
import shutil
import statistics
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
    done = work()
    dist.barrier()
    return time.monotonic() - start, done


def measure(given):
    """Collective."""
    sys.path.insert(0, str(given.package))
    import shardwright
    case = complete({"zero": 2, "dtype": "bf16", "experts": 16, "ep": 2, "width": given.width, "batch": 8})
    engine = make_engine(case)
    os.environ["XDG_RUNTIME_DIR"] = str(given.folder)
    pec = shardwright.PartialCheckpoints(engine, given.folder / "store", k=1, every=4, command=str(given.bin / "pec-save"),
                                         overlap=given.overlap)
    snapshots, saves, alone, beside, whole = [], [], [], [], 0

    def step(number):
        """Seconds of a step of training, and of the snapshot after it."""
        trained, _ = timed(lambda: train_step(engine, case, number))
        return trained, *timed(pec.step)

    step(0)
    for run in range(given.runs + 1):
        alone.append(step(4 * run + 1)[0])
        step(4 * run + 2)
        _, seconds, taken = step(4 * run + 3)
        if not taken:
            sys.exit("no snapshot was taken")
        snapshots.append(seconds)
        beside.append(step(4 * run + 4)[0])
        pec._wait()  # pylint: disable=protected-access
        whole = whole or pec.handed_bytes  # the first one has every expert
        saves.append(timed(lambda: engine.save_checkpoint(given.folder / "ckpt"))[0])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(given.folder / "ckpt")
    handed = pec.handed_bytes
    pec.close()
    return {"snapshots": snapshots[1:], "saves": saves[1:], "alone": alone[1:], "beside": beside[1:], "handed": handed,
            "whole": whole}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("package", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--overlap", action="store_true")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    try:
        found = ranks.run(2, measure, given, seconds=1200)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    ours, theirs = statistics.median(found["snapshots"]), statistics.median(found["saves"])

    def span(times):
        return f"{min(times):.3f}-{max(times):.3f}"

    print(f"{ours / theirs:.2f} ({ours:.3f} s to {theirs:.3f} s; {span(found['snapshots'])} to {span(found['saves'])}; "
          f"{found['handed'] / 1e6:.0f} MB of {found['whole'] / 1e6:.0f} MB)" +
          (f"; the next step of training {statistics.median(found['beside']):.3f} s ({span(found['beside'])}), others "
           f"{statistics.median(found['alone']):.3f} s ({span(found['alone'])})" if given.overlap else ""))


if __name__ == "__main__":
    main()
