#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost of the log of gradients for training: steps with and without it in turns, in blocks of the same run. Two ranks,
ZeRO-2, bf16, ep=2, 16 experts; no snapshot but the first.

    lossless_stall.py BIN PACKAGE FOLDER [--blocks 6] [--steps 5] [--width 512] [--batch 64] [--zstd 0]
"""

import argparse
import json
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


class Clock:
    """Seconds inside functions of an object."""

    def __init__(self, of, *names):
        self.seconds = 0.0
        for name in names:
            setattr(of, name, self.timed(getattr(of, name)))

    def timed(self, work):
        def call(*arguments):
            start = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                self.seconds += time.perf_counter() - start
        return call


def measure(given):
    """Collective."""
    sys.path.insert(0, str(given.package))
    import shardwright
    case = complete({"zero": 2, "dtype": "bf16", "experts": 16, "ep": 2, "width": given.width, "batch": given.batch})
    engine = make_engine(case)
    os.environ["XDG_RUNTIME_DIR"] = str(given.folder)
    total = 2 * given.blocks * given.steps + 1
    pec = shardwright.PartialCheckpoints(engine, given.folder / "store", k=1, every=10 * total, command=str(given.bin / "pec-save"),
                                         lossless=True, log_zstd=given.zstd)
    pec._asks["every"] = 1  # pylint: disable=protected-access
    train_step(engine, case, 1)
    if not pec.step():
        sys.exit("no snapshot was taken")
    pec._asks["every"] = 10 * total  # pylint: disable=protected-access
    pec._wait()  # pylint: disable=protected-access
    log = pec.gradients
    found = {True: [], False: []}
    inside = []
    for step in range(2, total + 1):
        with_log = (step - 2) // given.steps % 2 == 0
        if (step - 2) % given.steps == 0:
            log.begin() if with_log else log.end()
            clock = Clock(log, "_keep", "_hand_over")
        dist.barrier()
        start, clock.seconds = time.perf_counter(), 0.0
        train_step(engine, case, step)
        pec.step()
        dist.barrier()
        found[with_log].append(time.perf_counter() - start)
        if with_log:
            inside.append(clock.seconds)
            if not log.active:
                sys.exit("the log has ended")
    experts = sum(param.numel() for name, param in engine.module.named_parameters() if "deepspeed_experts" in name)
    handed = [None] * dist.get_world_size()
    dist.all_gather_object(handed, (log.handed_bytes, experts, log.waited_seconds))
    pec.close()
    return {"with": found[True], "without": found[False], "inside": inside, "waited": sum(one[2] for one in handed),
            "bytes": sum(one[0] for one in handed) / len(found[True]), "formula": 4 * sum(one[1] for one in handed),
            "files": sum(path.stat().st_size for path in (given.folder / "store/logs").glob("*.swg")) / len(found[True])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("package", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--zstd", type=int, default=0)
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    if shutil.disk_usage(given.folder).free < 20 << 30:
        sys.exit(f"{given.folder}: 20 GB of room wanted")
    try:
        found = ranks.run(2, measure, given, seconds=1200)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    if found["bytes"] != found["formula"]:
        sys.exit(f"{found['bytes']} bytes of gradients in an iteration, {found['formula']} expected")
    ours, theirs = statistics.median(found["with"]), statistics.median(found["without"])
    inside = statistics.median(found["inside"])
    print(f"{ours / theirs:.3f} ({ours:.3f} s a step to {theirs:.3f} s without; {min(found['with']):.3f}-{max(found['with']):.3f} "
          f"to {min(found['without']):.3f}-{max(found['without']):.3f}); inside the log {1e3 * inside:.1f} ms = "
          f"{100 * inside / theirs:.2f} % of a step, waited {found['waited']:.3f} s in all; "
          f"{found['bytes']:.0f} bytes of gradients an iteration as the formula has it, {found['files']:.0f} in files")
    print(json.dumps({key: found[key] for key in ("with", "without")}), file=sys.stderr)


if __name__ == "__main__":
    main()
