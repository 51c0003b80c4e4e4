# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoints of real trainers straight into running trainers of other layouts, with shardwright.load.

    load_matrix.py BIN PACKAGE FIXTURES [--all] [--only TEXT]... [--record FILE [--new]]

load_matrix.tsv defines which checkpoint goes into which trainer; its head explains the columns. FIXTURES is the folder
of the checkpoints and of the scripts that made them, with the models to use. Every tensor has to be bit for bit as the
script had it in memory when it saved, counters and 16-bit weights too, and the next losses as they were. Without --all
only the rows that are marked as a sample. --record writes the results of each row into FILE (load_results.tsv); rows
that did not run keep their results in FILE, and with --new only those run that FILE has no good result of.
"""

import argparse
import contextlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys

import live  # first: it makes the modules of the other tests importable
import commands
import load_trainers
import ranks
import results

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 3000


@contextlib.contextmanager
def made(ucp, sample, checkpoint, how, folder):
    """The source of a row, made of a checkpoint: the checkpoint, a catalogue, atoms, a store, or a shared-memory
    cache."""
    way, _, rest = how.partition(" ")
    if way == "straight":
        yield checkpoint
    elif way in ("catalogue", "atoms"):
        ucp.run("ucp-extract", checkpoint, folder / "catalogue", *rest.split())
        if way == "atoms":
            ucp.run("ucp-union", folder / "catalogue", folder / "atoms")
        yield folder / way
    elif way == "store":
        for tag in sorted(checkpoint.glob("global_step*"), key=lambda path: int(path.name.removeprefix("global_step"))):
            ucp.run("pec-save", tag, folder / "store", *rest.split())
        yield folder / "store"
    elif way == "cache":
        address = f"unix:{folder}/s"
        words = [ucp.folder / "ucp-load", "serve", checkpoint, address, "--threads", "1", *rest.split()]
        with subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as serve:
            try:
                yield address
                ucp.run("ucp-load", "stop", address)
                said, _ = serve.communicate(timeout=SECONDS)
                if serve.returncode != 0:
                    raise AssertionError(f"ucp-load serve ended with {serve.returncode}: {said}")
            finally:
                serve.kill()
    else:
        raise ValueError(f"{sample}: loaded from {way!r}?")


def outcome(row, ucp, fixtures, folder):
    """True if the row passes, and its results as in matrix.py; or the reason for its failure."""
    checkpoint = fixtures / row["source"]
    checkpoint = checkpoint / "ckpt" if (checkpoint / "ckpt").is_dir() else checkpoint
    try:
        with made(ucp, row["source"], checkpoint, row["convert"], folder) as where:
            found = ranks.run(int(row["ranks"]), load_trainers.judge, str(fixtures), row["source"], str(where), row["judge"],
                              json.loads(row["case"]), seconds=SECONDS)
    except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        return False, "; ".join([line for line in said if "Error" in line][-2:] or said[-2:])[:600]
    if found["wrong"]:
        return False, "; ".join(found["wrong"][:5])[:600]
    return True, (f"{found['tensors']}/{found['tensors']}", "-" if found['loss_off'] is None else f"{found['loss_off']:.3g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ucp = live.start()
    results.options(parser)
    asked = parser.parse_args()
    if not (asked.fixtures / "train_deepspeed.py").exists():
        print(f"no checkpoints of trainers in {asked.fixtures}")
        return results.SKIPPED
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "deepspeed"))

    def tried(row):
        scratch = commands.Scratch()
        try:
            return outcome(row, ucp, asked.fixtures.resolve(), scratch.path)
        finally:
            scratch.close()

    return results.run(asked, HERE / "load_matrix.tsv", lambda row: versions, lambda row: f"{row['source']} {row['convert']} "
                       f"-> {row['judge']} {row['case']} on {row['ranks']}", tried)


if __name__ == "__main__":
    sys.exit(main())
