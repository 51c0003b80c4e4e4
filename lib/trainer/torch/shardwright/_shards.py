# SPDX-License-Identifier: Apache-2.0
"""Shards: the elements of each tensor that this rank has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclasses.dataclass
class Shard:
    """This rank's elements of one tensor of the trainer.

    kind: "param", "frozen", "buffer", "fp32" (a master weight) or the name of an optimizer state.
    shape: of the whole tensor.
    tensor: this rank's elements. A load writes to them.
    where: position of the elements in the whole tensor, in the form of lib/trainer/load/trainer_shard.h. Empty for all elements.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    where: dict[str, Any] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Returns name, kind, shape and position for the library."""
        return {"name": self.name, "kind": self.kind, "shape": list(self.shape), **self.where}


def plain_name(name: str) -> str:
    """Removes the parts of a parameter name that wrapper modules add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def split_of(placement: Any, name: str) -> list[Any]:
    """Returns a DTensor placement in the form of lib/trainer/load/trainer_shard.h. Raises UnsupportedError for other placements."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return ["replicate"]
    if kind == "_StridedShard":
        return ["strided", placement.dim, placement.split_factor]
    if kind == "Shard":
        return ["shard", placement.dim]
    raise Error(UNSUPPORTED, f'"{name}": DTensor placement {placement} is not supported')


def shard_of(name: str, kind: str, tensor: torch.Tensor) -> Shard | None:
    """Returns this rank's shard of a tensor or DTensor. Returns None if the rank is not in the device mesh of the DTensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Shard(name, kind, tuple(tensor.shape), tensor.detach())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    where = {"mesh": list(mesh.shape), "coordinate": list(coordinate),
             "splits": [split_of(placement, name) for placement in tensor.placements]}
    return Shard(name, kind, tuple(tensor.shape), tensor._local_tensor.detach(), where)  # to_local() may wait and copy


def flat_shard(name: str, kind: str, shape: Iterable[int], tensor: torch.Tensor, first: int) -> Shard:
    """Returns the shard that `tensor` is of a flattened tensor with this shape. It starts at element `first`."""
    return Shard(name, kind, tuple(shape), tensor.detach(), {"first": first, "count": tensor.numel()})


def buffers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of each persistent buffer. Checkpoints do not contain other buffers."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def check(shards: Iterable[Shard]) -> None:
    """Raises UnsupportedError if bytes cannot be written directly to the memory of a tensor."""
    for one in shards:
        tensor, where = one.tensor, f'"{one.name}" {one.kind}'
        if tensor.device.type == "meta":
            raise Error(UNSUPPORTED, f"{where}: on device meta, where it has no elements; use to_empty() first")
        if not tensor.is_cpu and tensor.is_inference():  # the threads that fill it run outside of inference mode
            raise Error(UNSUPPORTED, f"{where}: on {tensor.device} and created in torch.inference_mode(); create the model outside of it")
        if tensor.layout != torch.strided:
            raise Error(UNSUPPORTED, f"{where}: layout {tensor.layout} is not supported")
        if tensor.is_quantized or tensor.is_complex() and tensor.is_conj():
            raise Error(UNSUPPORTED, f"{where}: quantized tensors and conjugate views are not supported")
        if not tensor.is_contiguous():
            raise Error(UNSUPPORTED, f"{where}: strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}; "
                                     "only contiguous tensors are supported")
