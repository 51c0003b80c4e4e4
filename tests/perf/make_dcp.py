#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of torch.distributed.checkpoint with very many small items, as optimizers of models with many
parameters have them: for each parameter its weight, two moments and a step.

    make_dcp.py OUTPUT [--items 1000000] [--ranks 8] [--rows 1]

The index is pickled by PyTorch from its own classes. An item is one of few containers that torch.save made, so that a
million of them are written in seconds.
"""
import argparse
import io
import os
import pickle

import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo

COLUMNS, VARIANTS = 16, 64


def containers(make):
    """A few items with different values."""
    made = []
    for seed in range(VARIANTS):
        torch.manual_seed(seed)
        buffer = io.BytesIO()
        torch.save(make(), buffer)
        made.append(buffer.getvalue())
    return made


class Writer:
    def __init__(self, folder, ranks):
        self.names = [f"__{rank}_0.distcp" for rank in range(ranks)]
        self.files = [open(os.path.join(folder, name), "wb") for name in self.names]
        self.ends = [0] * ranks
        self.index = md.Metadata(state_dict_metadata={}, planner_data={}, storage_data={})

    def add(self, path, place, item, rank):
        """\\param place  of the item in its tensor; None for an object"""
        key = ".".join(map(str, path))
        self.index.planner_data[key] = path
        self.index.storage_data[md.MetadataIndex(key, place)] = _StorageInfo(self.names[rank], self.ends[rank], len(item))
        self.files[rank].write(item)
        self.ends[rank] += len(item)
        return key

    def tensor(self, path, size, item, rank):
        place = torch.Size([0] * len(size))
        key = self.add(path, place, item, rank)
        self.index.state_dict_metadata[key] = md.TensorStorageMetadata(
            md.TensorProperties(dtype=torch.float32), size, [md.ChunkStorageMetadata(place, size)])

    def value(self, path, value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.index.state_dict_metadata[self.add(path, None, buffer.getvalue(), 0)] = md.BytesStorageMetadata()

    def close(self, folder):
        for file in self.files:
            file.close()
        with open(os.path.join(folder, ".metadata"), "wb") as file:
            pickle.dump(self.index, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of a parameter; what a target's ranks have to share out")
    args = parser.parse_args()
    os.makedirs(args.output)
    writer = Writer(args.output, args.ranks)
    size, scalar = torch.Size([args.rows, COLUMNS]), torch.Size([])
    tensors = containers(lambda: torch.randn(args.rows, COLUMNS))
    step = containers(lambda: torch.tensor(7.0))[0]
    names = [f"layers.{i // 8}.experts.{i % 8}.weight" for i in range(args.items // 4)]
    for i, name in enumerate(names):
        rank = i % args.ranks
        writer.tensor(("model", name), size, tensors[i % VARIANTS], rank)
        writer.tensor(("optim", "state", name, "step"), scalar, step, rank)
        for k, slot in enumerate(("exp_avg", "exp_avg_sq")):
            writer.tensor(("optim", "state", name, slot), size, tensors[(i + k + 1) % VARIANTS], rank)
    options = {"params": names, "lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
               "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    for key, value in options.items():
        writer.value(("optim", "param_groups", 0, key), value)
    writer.close(args.output)


main()
