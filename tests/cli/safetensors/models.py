# SPDX-License-Identifier: Apache-2.0
"""Writes and reads .safetensors files with the standard library, and runs the commands on them."""

import json
import math
import pathlib
import random
import struct
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "demo"))

from demo import DemoTest, main  # noqa: E402,F401  pylint: disable=wrong-import-position,unused-import

SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1}


def tensor(dtype, *shape, seed=0):
    """(dtype, shape, random bytes)"""
    return dtype, list(shape), random.Random(seed).randbytes(SIZES[dtype] * math.prod(shape))


def pack(tensors, metadata=None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def unpack(path):
    """(name -> (dtype, shape, bytes), metadata)"""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    return {name: (entry["dtype"], entry["shape"],
                   data[base + entry["data_offsets"][0]:base + entry["data_offsets"][1]])
            for name, entry in header.items()}, metadata


class ModelTest(DemoTest):
    """A private folder with the demo's checkpoint, `ckpt`, and `model`, two files and their index."""

    def setUp(self):
        super().setUp()
        self.first = {"emb.weight": tensor("BF16", 5, 4, seed=1), "norm.weight": tensor("F32", 4, seed=2)}
        self.second = {"head.weight": tensor("BF16", 4, 5, seed=3), "ids": tensor("I64", 3, seed=4)}
        self.model = self.work / "model"
        self.model.mkdir()
        self.names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        for name, tensors in zip(self.names, (self.first, self.second)):
            (self.model / name).write_bytes(pack(tensors, {"format": "pt"}))
        self.index = self.model / "model.safetensors.index.json"
        self.write_index({name: file for file, tensors in zip(self.names, (self.first, self.second))
                          for name in tensors})

    def write_index(self, weight_map, **metadata):
        self.index.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))

    def convert(self, *words, source="model", out="out", code=0):
        return self.run_in("ucp-load", source, out, "--format", "safetensors", *words, code=code)

    def expect_model(self, out="out"):
        found = {}
        for path in (self.work / out).glob("*.safetensors"):
            found |= unpack(path)[0]
        self.assertEqual(found, self.first | self.second)
