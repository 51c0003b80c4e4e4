#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the input files of the commands in docs/papers.md.

Usage: inputs.py FOLDER [NAME...]

Without names it makes all of them. Some need the routing trace of a training run that was published with SmartMoE:
fixtures/routing/gpt_moe_24x32.jsonl in the folder that SHARDWRIGHT_SHARED names (default: shared, next to the source
tree). It has 51 records (iterations 1, 101, ..., 5001) of 24 layers with 32 experts.
"""

import json
import os
import pathlib
import shutil
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
DATA = SOURCE / "tests" / "data"


class Missing(Exception):
    """An input that needs data from outside the source tree."""


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def even(iterations, layers, experts):
    """Token counts of a run that routes evenly."""
    return lines({"iteration": i, "tokens": [[100] * experts] * layers} for i in range(1, iterations + 1))


def trace():
    """\\exception Missing  the trace is not there"""
    shared = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED") or SOURCE.parent / "shared")
    path = shared / "fixtures" / "routing" / "gpt_moe_24x32.jsonl"
    if not path.is_file():
        raise Missing(f"{path} is not there")
    return path.read_text(encoding="utf-8")


def most_loaded(iteration, experts):
    """Token counts of the most loaded experts of the first 12 layers of the trace, as Lazarus took them."""
    for line in trace().splitlines():
        record = json.loads(line)
        if record["iteration"] == iteration:
            break
    chosen = []
    for layer in record["tokens"][:12]:
        first = sorted(range(len(layer)), key=lambda e: (-layer[e], e))[:experts]  # pylint: disable=cell-var-from-loop
        chosen.append([layer[e] for e in sorted(first)])
    return json.dumps(chosen)


def skewed(ratio):
    """One layer of 8 experts, of which the last has `ratio` times the mean."""
    return json.dumps([[(8 - ratio) * 100] * 7 + [ratio * 700]])


RULES = [
    {"match": r".*(emb|head)\.weight", "split": "replicated"},
    {"match": r".*norm\.(weight|bias)", "split": "replicated"},
    {"match": r".*scale", "split": "replicated"},
    {"match": r".*attend\.(weight|bias)", "split": "sub", "dim": 0, "sizes": [16, 4, 4], "granule": 2},
    {"match": r".*attended\.weight", "split": "sub", "dim": 1, "ratio": [1], "view": [2, -1, 8]},
    {"match": r".*widen\.(weight|bias)", "split": "dim", "dim": 0, "uneven": True},
    {"match": r".*narrow\.weight", "split": "dim", "dim": 1, "uneven": True}]


def rules():
    """Sharding rules of the sample checkpoints."""
    return json.dumps({"family": "papers", "rules": RULES + [{"match": r".*narrow\.bias", "split": "replicated"}]})


def patterns():
    """Rules of the sample checkpoints for 4 ranks, one for each pattern that tensor parallelism makes."""
    mesh = [{"split": "dim", "dim": 0, "ranks": 2, "uneven": True}, {"split": "dim", "dim": 1, "ranks": 2}]
    first = [{"match": r".*widen\.weight", "split": "mesh", "axes": mesh},
             {"match": r".*narrow\.bias", "split": "average"},
             {"match": r".*attend\.(weight|bias)", "split": "sub", "dim": 0, "sizes": [16, 4, 4]},
             {"match": r".*attended\.weight", "split": "sub", "dim": 0, "ratio": [1, 1]}]
    return json.dumps({"family": "papers", "rules": first + RULES})


def copies():
    """A placement of 4 experts on 4 GPUs: one on all, one on two, two on one."""
    return json.dumps({"layers": [{"layer": 0, "devices": [[0, -1, -1], [1, 0, -1], [2, 0, -1], [3, 0, 2]],
                                   "owners": [[0, -1, -1], [1, -1, -1], [2, -1, -1], [3, -1, -1]]}]})


# By name: a sentence about the file, and a function that returns its text, or the folder that is copied.
INPUTS = {
    "demo": ("small DeepSpeed checkpoint, ZeRO-2 on 2 ranks (`tests/data/demo`)", DATA / "demo"),
    "zero1": ("small DeepSpeed checkpoint, ZeRO-1 on 2 ranks (`tests/data/deepspeed/zero1_w2`)",
              DATA / "deepspeed" / "zero1_w2" / "ckpt"),
    "pipeline": ("small DeepSpeed checkpoint, ZeRO-1 with 2 pipeline stages and 2 data-parallel ranks (`tests/data/deepspeed/pp2_dp2_zero1`)",
                 DATA / "deepspeed" / "pp2_dp2_zero1" / "ckpt"),
    "moe": ("small DeepSpeed checkpoint, ZeRO-1 with 4 experts on 2 ranks (`tests/data/deepspeed/moe4_ep2_zero1_w2`)",
            DATA / "deepspeed" / "moe4_ep2_zero1_w2" / "ckpt"),
    "rules.json": ("sharding rules of the small checkpoints, with fused query, key and value of 16, 4 and 4 rows and with fused experts",
                   rules),
    "patterns.json": ("sharding rules of the small checkpoints for 4 ranks, one for each pattern that tensor parallelism makes", patterns),
    "even-8.jsonl": ("1280 iterations of one layer of 8 experts with equal tokens", lambda: even(1280, 1, 8)),
    "even-16.jsonl": ("1280 iterations of 12 layers of 16 experts with equal tokens", lambda: even(1280, 12, 16)),
    "long-16.jsonl": ("20000 iterations of one layer of 16 experts with equal tokens", lambda: even(20000, 1, 16)),
    "fault.txt": ("a fault at iteration 640", lambda: "640\n"),
    "two-faults.txt": ("faults that destroy the memory of node 0 at iteration 329, and of node 1 at iteration 969",
                       lambda: "329 0\n969 1\n"),
    "faults-16.txt": ("16 faults, 1000 iterations apart, of node 0 and node 1 in turn",
                      lambda: "".join(f"{1205 + 1000 * i} {i % 2}\n" for i in range(16))),
    "even-4.json": ("one layer of 4 experts with equal tokens", lambda: "[[10, 10, 10, 10]]"),
    "loads-4.json": ("one layer of 4 experts with 10, 20, 30 and 40 tokens", lambda: "[[10, 20, 30, 40]]"),
    "copies.json": ("4 experts on 4 GPUs; one is on all GPUs, one on two, and two on one", copies),
    "skew-2.json": ("one layer of 8 experts; one has twice the mean", lambda: skewed(2)),
    "skew-4.json": ("one layer of 8 experts; one has four times the mean", lambda: skewed(4)),
    "trace.jsonl": ("routing trace of 24 layers of 32 experts, published with SmartMoE", trace),
    "gpt-s-200.json": ("8 most loaded experts of the trace's first 12 layers, iteration 201", lambda: most_loaded(201, 8)),
    "gpt-s-4000.json": ("the same at iteration 4001", lambda: most_loaded(4001, 8)),
    "gpt-l-200.json": ("16 most loaded experts of the trace's first 12 layers, iteration 201", lambda: most_loaded(201, 16)),
    "gpt-l-4000.json": ("the same at iteration 4001", lambda: most_loaded(4001, 16)),
}


def make(name, folder):
    """Makes an input in the folder.
    \\exception Missing  it needs data that is not there"""
    content = INPUTS[name][1]
    if isinstance(content, pathlib.Path):
        shutil.copytree(content, folder / name)
    else:
        (folder / name).write_text(content(), encoding="utf-8")


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or INPUTS:
        if name not in INPUTS:
            sys.exit(f"inputs.py: no input {name}; the names are {', '.join(INPUTS)}")
        try:
            make(name, folder)
        except Missing as missing:
            print(f"inputs.py: {name} was left out: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
