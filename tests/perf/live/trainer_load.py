#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time that two ranks of a trainer wait while shardwright.load fills them from files, against their own loader.

    trainer_load.py same|stage3|dcp PACKAGE SOURCE FOLDER [--runs 5] [--hidden 1024] [--layers 32] [--vocab 32000]

same     SOURCE, of make_checkpoint.py, into its own layout, against DeepSpeed's load_checkpoint
stage3   the same into ZeRO-3, against ds_to_universal alone (2 + 2 workers, into FOLDER): DeepSpeed's universal loader cannot
         open at stage 3 the output for a stage 2 checkpoint, for lack of a file of the optimizer
dcp      SOURCE, of make_sharded.py --form dcp, into FSDP2, against dcp.load into the tensors of get_state_dict

Prints the ratio, and how many bytes of the source all ranks together have read.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
for folder in ("tests/interop/deepspeed", "tests/perf"):
    sys.path.insert(0, str(ROOT / folder))

import ranks  # pylint: disable=wrong-import-position
import make_checkpoint
import torch
import torch.distributed as dist


def processor_seconds():
    """Of this rank and of the processes that it has waited for."""
    return sum(os.times()[:4])


def timed(work):
    """Collective. Seconds until all ranks are done, processor seconds of the ranks, and the result of the work."""
    dist.barrier()
    busy, start = processor_seconds(), time.monotonic()
    done = work()
    mine = torch.tensor([processor_seconds() - busy], dtype=torch.float64)
    dist.barrier()
    seconds = time.monotonic() - start
    dist.all_reduce(mine)
    return (seconds, float(mine)), done


def convert(given):
    """DeepSpeed's own converter, in a process of its own, as it is run by hand."""
    shutil.rmtree(given.folder, ignore_errors=True)
    tag = given.source / (given.source / "latest").read_text().strip()
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag),
                    "--output_folder", str(given.folder / "universal"), "--num_extract_workers", "2",
                    "--num_merge_workers", "2", "--inject_missing_state"],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def into_deepspeed(given):
    """The target, and the other loader."""
    config = {"zero_optimization": {"stage": 3}} if given.what == "stage3" else {}
    engine = make_checkpoint.make_engine(given.hidden, given.layers, given.vocab, **config)

    def other():
        if given.what != "stage3":
            if engine.load_checkpoint(given.source)[0] is None:
                sys.exit("load_checkpoint has found nothing")
        elif dist.get_rank() == 0:
            convert(given)
    return engine, other


def into_fsdp2(given):
    """The target, and the other loader."""
    import make_sharded
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optimizer = make_sharded.train(given)
    weights, moments = get_state_dict(model, optimizer)
    return (model, optimizer), lambda: dcp.load({"model": weights, "optim": moments}, checkpoint_id=given.source)


def measure(given):
    """Collective."""
    sys.path.insert(0, str(given.package))
    import shardwright
    target, other = (into_fsdp2 if given.what == "dcp" else into_deepspeed)(given)
    ours, theirs, read = [], [], 0
    for run in range(given.runs + 1):
        seconds, loaded = timed(lambda: shardwright.load(target, given.source))
        read = loaded.bytes_read
        if run > 0:
            ours.append(seconds)
        if run > 0 or given.what != "stage3":  # a converter of its own process has nothing to warm up
            seconds, _ = timed(other)
            if run > 0:
                theirs.append(seconds)
    return {"ours": ours, "theirs": theirs, "read": read}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("same", "stage3", "dcp"))
    for name in ("package", "source", "folder"):
        parser.add_argument(name, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int, default=32000)
    given = parser.parse_args()
    given.layers = given.layers or (21 if given.what == "dcp" else 32)
    try:
        found = ranks.run(2, measure, given, seconds=1200)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    (ours, ours_busy), (theirs, theirs_busy) = (zip(*found[name]) for name in ("ours", "theirs"))

    def middle(times):
        return f"{statistics.median(times):.2f}"

    def span(times):
        return f"{min(times):.2f}-{max(times):.2f}"

    print(f"{statistics.median(theirs) / statistics.median(ours):.1f} times faster ({middle(ours)} s to {middle(theirs)} s; "
          f"{span(ours)} to {span(theirs)}; of processors {middle(ours_busy)} s to {middle(theirs_busy)} s); {found['read']}")


if __name__ == "__main__":
    main()
