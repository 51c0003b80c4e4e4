#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saves or loads checkpoints with DeepSpeed on the CPU, and measures each time.

    save_load.py save FOLDER ... --ranks N --report FILE [--runs 5] [--hidden 1024] [--layers 32] [--vocab 32000]
    save_load.py load FOLDER ... the same flags

The model is that of make_checkpoint.py. Folders take turns. The first run warms up and is not in the report. A folder with
latest_universal is loaded by DeepSpeed's universal loader. All engines must have the same parameters after loads of
folders that come from the same checkpoint (--same, a number of folders: the first ones).

The report is JSON: `parameters`, and in `steps` for each folder a list of [seconds, bytes read, bytes written] of all ranks
together. Messages between ranks count as bytes.
"""

import argparse
import json
import pathlib
import shutil
import sys
import zlib

import trainer_load  # first: it prepares what DeepSpeed finds when imported
import make_checkpoint
import measure
import ranks
import torch
import torch.distributed as dist


def measured(work):
    """Collective. Seconds until all ranks are done, and the bytes that they have read and written."""
    before = torch.tensor(measure.moved_bytes())
    (seconds, _), done = trainer_load.timed(work)
    moved = torch.tensor(measure.moved_bytes()) - before
    dist.all_reduce(moved)
    return [seconds, *moved.tolist()], done


def save(given):
    """Collective."""
    engine = make_checkpoint.make_engine(given.hidden, given.layers, given.vocab)
    make_checkpoint.train(engine, given.vocab)
    steps = [[] for _ in given.folders]
    for _ in range(given.runs + 1):
        for folder, found in zip(given.folders, steps):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            found.append(measured(lambda folder=folder: engine.save_checkpoint(folder))[0])
    return report(engine, steps)


def checksum(engine):
    """Of the parameters of this rank, which all ranks have at ZeRO-2."""
    found = 0
    for parameter in engine.module.parameters():
        found = zlib.crc32(parameter.detach().view(torch.uint8).numpy(), found)
    return found


def load(given):
    """Collective."""
    universal = [(folder / "latest_universal").exists() for folder in given.folders]
    engines = {kind: make_checkpoint.make_engine(given.hidden, given.layers, given.vocab, checkpoint={"load_universal": kind})
               for kind in set(universal)}
    steps = [[] for _ in given.folders]
    for _ in range(given.runs + 1):
        checksums = []
        for folder, kind, found in zip(given.folders, universal, steps):
            engine = engines[kind]
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.zero_()
            step, done = measured(lambda engine=engine, folder=folder: engine.load_checkpoint(folder))
            if done[0] is None:
                sys.exit(f"{folder}: DeepSpeed has found nothing")
            found.append(step)
            checksums.append(checksum(engine))
        if len(set(checksums[:given.same])) > 1:
            sys.exit(f"{given.folders[:given.same]}: different parameters after the load: {checksums}")
    return report(engine, steps)


def report(engine, steps):
    return {"parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
            "steps": [found[1:] for found in steps]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folders", nargs="+", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--report", type=pathlib.Path, required=True)
    parser.add_argument("--same", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    given = parser.parse_args()
    found = ranks.run(given.ranks, save if given.what == "save" else load, given, seconds=3600)
    given.report.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
