"""What this rank holds of which tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclasses.dataclass
class Held:
    """A piece of a tensor of the trainer.

    kind: "param", "frozen", "buffer", "fp32" (a master weight) or a state of the optimizer.
    shape: of the whole tensor.
    tensor: this rank's elements, to be filled.
    where: which they are, as lib/live/held.h has it; empty for all of them.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    where: dict[str, Any] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "shape": list(self.shape), **self.where}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def split_of(placement: Any, name: str) -> list[Any]:
    """A placement of a DTensor as lib/live/held.h has it."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return ["replicate"]
    if kind == "_StridedShard":
        return ["strided", placement.dim, placement.split_factor]
    if kind == "Shard":
        return ["shard", placement.dim]
    raise Error(UNSUPPORTED, f'"{name}": placement {placement} of a DTensor')


def piece(name: str, kind: str, tensor: torch.Tensor) -> Held | None:
    """This rank's piece of a tensor, which may be a DTensor; None where the rank is not in its mesh."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Held(name, kind, tuple(tensor.shape), tensor.detach())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    where = {"mesh": list(mesh.shape), "coordinate": list(coordinate),
             "splits": [split_of(placement, name) for placement in tensor.placements]}
    return Held(name, kind, tuple(tensor.shape), tensor._local_tensor.detach(), where)  # to_local() may wait and copy


def flat_piece(name: str, kind: str, shape: Iterable[int], tensor: torch.Tensor, first: int) -> Held:
    """The elements of a flattened tensor from `first` on."""
    return Held(name, kind, tuple(shape), tensor.detach(), {"first": first, "count": tensor.numel()})


def buffers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that checkpoints have."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def check(held: Iterable[Held]) -> None:
    """Refuses tensors that cannot be written to as they lie in memory."""
    for one in held:
        tensor, where = one.tensor, f'"{one.name}" {one.kind}'
        if tensor.device.type == "meta":
            raise Error(UNSUPPORTED, f"{where}: on device meta, where it has no elements; use to_empty() first")
        if not tensor.is_cpu and tensor.is_inference():  # threads that know nothing of that mode fill it
            raise Error(UNSUPPORTED, f"{where}: on {tensor.device} and made in torch.inference_mode(); make the model outside of it")
        if tensor.layout != torch.strided:
            raise Error(UNSUPPORTED, f"{where}: layout {tensor.layout}")
        if tensor.is_quantized or tensor.is_complex() and tensor.is_conj():
            raise Error(UNSUPPORTED, f"{where}: a tensor whose elements are not as they lie in memory")
        if not tensor.is_contiguous():
            raise Error(UNSUPPORTED, f"{where}: strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}; "
                                     "only contiguous tensors are loaded")
