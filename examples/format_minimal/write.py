#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint in the format of format_minimal.cc: a small model, trained by AdamW on two ranks.

Usage: write.py FOLDER
"""

import array
import json
import pathlib
import random
import sys
import zlib

SHAPES = {"embed.weight": (11, 6), "layers.0.up.weight": (8, 6), "layers.0.up.bias": (8,), "norm.weight": (6,)}
STATES = {"weight": "bfloat16", "fp32": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
HYPER = {"lr": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
RANKS, STEP = 2, 10


def values():
    """Returns the bytes of every tensor, by name and state. A weight is the rounded fp32 value, as in training."""
    found = {}
    for name, shape in SHAPES.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            numbers = random.Random(f"{name} {state}")
            found[name, state] = array.array("f", [numbers.random() for _ in range(count)]).tobytes()
        bits = array.array("I", found[name, "fp32"])
        rounded = [(one + 0x7FFF + (one >> 16 & 1)) >> 16 for one in bits]  # to the nearest, ties to even
        found[name, "weight"] = array.array("H", rounded).tobytes()
    return found


def write(folder):
    """Gives every rank a file with a block of rows of each tensor."""
    found, data, parameters = values(), [b""] * RANKS, []
    for name, shape in SHAPES.items():
        states = {}
        for state, dtype in STATES.items():
            whole, pieces = found[name, state], []
            row, share = len(whole) // shape[0], -(-shape[0] // RANKS)
            for rank in range(RANKS):
                first, last = rank * share, min((rank + 1) * share, shape[0])
                pieces.append({"file": f"rank-{rank}.raw", "offset": len(data[rank]),
                               "start": [first, *[0] * (len(shape) - 1)], "shape": [last - first, *shape[1:]]})
                data[rank] += whole[first * row:last * row]
            states[state] = {"dtype": dtype, "pieces": pieces}
        parameters.append({"name": name, "shape": shape, "states": states})
    files = {f"rank-{rank}.raw": {"bytes": len(one), "crc32": zlib.crc32(one)} for rank, one in enumerate(data)}
    index = {"version": 1, "step": STEP, "optimizer": HYPER, "files": files, "parameters": parameters}
    folder.mkdir()
    for rank, one in enumerate(data):
        (folder / f"rank-{rank}.raw").write_bytes(one)
    (folder / "minimal.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
