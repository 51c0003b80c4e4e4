# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed training that scripts/slurm/train.sbatch starts under torchrun, one process per rank.

    train_model.py FOLDER LAST PAUSE [--load CHECKPOINT]

Trains to iteration LAST, and saves every second iteration into $TRAIN_CHECKPOINT, with TRAIN_STORE each. Rank 0 appends
the loss to FOLDER/losses.jsonl and the tokens per expert to FOLDER/tokens.jsonl, writes the iteration that this start loaded
to FOLDER/started, and calls the save hook if TRAIN_STORE is set. Training begins once FOLDER/go exists. SIGUSR1 on any rank
ends it after the current iteration, with exit code 75.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/interop/deepspeed"), str(ROOT / "tests/interop/pec")]

GIVEN = dict(os.environ)
import ranks  # pylint: disable=unused-import  # Sets variables for ranks of one machine.
os.environ.update(GIVEN)
import deepspeed
import torch
from killed_training_test import CASE, FLAGS, LAYERS
from model import complete, make_engine, train_step

KEPT = 3  # checkpoints


def append(path, entry):
    """Adds a line in one call, so that a killed process leaves all or nothing of it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, json.dumps(entry).encode() + b"\n")
    os.close(file)


def counted(engine):
    """Token counts of the newest forward pass, updated by hooks."""
    counts = {}
    for index, block in enumerate(engine.module.blocks):
        block.moe.register_forward_hook(lambda _module, _inputs, output, index=index: counts.__setitem__(index, output[2]))
    return counts


def save(engine, folder, iteration):
    """Collective."""
    checkpoint = pathlib.Path(os.environ["TRAIN_CHECKPOINT"])
    engine.save_checkpoint(checkpoint)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        if os.environ.get("TRAIN_STORE"):
            subprocess.run([f"{os.environ['TRAIN_HOOKS']}/pec-save-hook.sh", os.environ["TRAIN_SOCKET"], checkpoint, os.environ["TRAIN_STORE"],
                            *FLAGS, "--tokens", folder / "tokens.jsonl"], check=True)
        for old in checkpoint.glob("global_step*"):
            if int(old.name[11:]) <= iteration - KEPT:
                shutil.rmtree(old)


def train(folder, last, pause, load, save_it=save):
    """Collective. \\returns the losses, and whether a signal stopped it"""
    stop = torch.zeros(1)
    signal.signal(signal.SIGUSR1, lambda *_: stop.fill_(1))
    engine = make_engine(complete(CASE))
    counts, losses, first = counted(engine), [], torch.distributed.get_rank() == 0
    if load and engine.load_checkpoint(load)[0] is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {load}")
    if first:
        (folder / "started").write_text(str(engine.global_steps))
    while save_it and not (folder / "go").exists():
        time.sleep(0.05)
    for iteration in range(engine.global_steps + 1, last + 1):
        losses.append(train_step(engine, complete(CASE), iteration))
        tokens = torch.stack([counts[i].detach().to(torch.int64) for i in range(LAYERS)])
        torch.distributed.all_reduce(tokens)
        if first:
            append(folder / "losses.jsonl", {"iteration": iteration, "loss": losses[-1]})
            append(folder / "tokens.jsonl", {"iteration": iteration, "tokens": tokens.tolist()})
        stopped = stop.clone()
        torch.distributed.all_reduce(stopped)
        # Iterations that are not saved are trained twice after a failure.
        if save_it and (os.environ.get("TRAIN_STORE") or iteration % 2 == 0 or iteration == last or stopped.item()):
            save_it(engine, folder, iteration)
        if stopped.item() and iteration < last:
            return losses, True
        time.sleep(pause)
    return losses, False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("last", type=int)
    parser.add_argument("pause", type=float)
    parser.add_argument("--load")
    given = parser.parse_args()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    stopped = train(given.folder, given.last, given.pause, given.load)[1]
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(75 if stopped else 0)


if __name__ == "__main__":
    main()
