# SPDX-License-Identifier: Apache-2.0
"""Deep comparison of object graphs that torch.load returns, and the probe that rewrites files."""

import argparse
import dataclasses
import enum
import math
import subprocess

import numpy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Attributes of a mesh that lead to other meshes and back to it. They are not read, and a writer of meshes makes
# new ones.
NOT_READ = ("_root_mesh", "_flatten_mapping", "_parent_mesh")


class Difference(AssertionError):
    pass


def require(condition, where, text):
    if not condition:
        raise Difference(f"{where}: {text}")


def content(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def same_tensor(a, b, where):
    require(type(a) is type(b), where, f"{type(a)} != {type(b)}")
    require(a.dtype == b.dtype, where, f"{a.dtype} != {b.dtype}")
    require(a.shape == b.shape, where, f"{a.shape} != {b.shape}")
    if isinstance(a, DTensor):  # Without process groups it can do nothing; these two were pickled.
        same(a._local_tensor, b._local_tensor, where + "._local_tensor")
        return same(a._spec, b._spec, where + "._spec")
    require(a.stride() == b.stride(), where, f"{a.stride()} != {b.stride()}")
    require(a.storage_offset() == b.storage_offset(), where, "storage offset")
    require(a.requires_grad == b.requires_grad, where, "requires_grad")
    left, right = a.detach().untyped_storage(), b.detach().untyped_storage()
    require(left.nbytes() == right.nbytes(), where, "storage size")
    require(content(left) == content(right), where, "storage content")
    return same(dict(a.__dict__), dict(b.__dict__), where + ".__dict__")


def same(a, b, where="root"):
    """Raises Difference unless both graphs have equal types, order and bits."""
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b, where)
    require(type(a) is type(b), where, f"{type(a)} != {type(b)}")
    if isinstance(a, DeviceMesh):
        a, b = ({key: value for key, value in one.__dict__.items() if key not in NOT_READ} for one in (a, b))
    if isinstance(a, dict):
        require(list(a.keys()) == list(b.keys()), where, "keys or their order")
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
        if hasattr(a, "__dict__"):
            same(a.__dict__, b.__dict__, where + ".__dict__")
    elif isinstance(a, (list, tuple)):
        require(len(a) == len(b), where, f"length {len(a)} != {len(b)}")
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}[{i}]")
    elif isinstance(a, numpy.ndarray):
        require(a.dtype == b.dtype and a.shape == b.shape, where, "array type")
        require(a.tobytes() == b.tobytes(), where, "array content")
    elif isinstance(a, float) and math.isnan(a):
        require(math.isnan(b), where, "nan")
    elif dataclasses.is_dataclass(a) or (hasattr(a, "__dict__") and not isinstance(a, (type, enum.Enum))):
        same(a.__dict__, b.__dict__, where + ".__dict__")
    else:
        require(a == b, where, f"{a!r} != {b!r}")
    return None


def sharing(graph):
    """For every pair of tensors in walking order: do they share a storage, are they one object?"""
    found = []

    def walk(value):
        if isinstance(value, DTensor):
            found.append(value._local_tensor)
        elif isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, argparse.Namespace):
            walk(vars(value))

    walk(graph)
    storages, objects = {}, {}
    return [(storages.setdefault(t.untyped_storage().data_ptr() or id(t), len(storages)),
             objects.setdefault(id(t), len(objects))) for t in found]


class Probe:
    def __init__(self, program):
        self.program = program

    def run(self, *args):
        done = subprocess.run([self.program, *map(str, args)], capture_output=True, check=False)
        return done.returncode, done.stderr.decode(errors="replace").strip()

    def rewrite(self, source, target):
        code, text = self.run("rewrite", source, target)
        if code != 0:
            raise AssertionError(f"rewrite of {source}: exit code {code}: {text}")
