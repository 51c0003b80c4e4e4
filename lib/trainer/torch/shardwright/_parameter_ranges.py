# SPDX-License-Identifier: Apache-2.0
"""The parameter ranges for which a rank submits gradients to an agent: docs/lossless.md."""

from __future__ import annotations

from typing import Any

from ._errors import MISMATCH, UNSUPPORTED, Error

# A range of an expert's parameter on a rank: parameter name, its number of elements, first element in the parameter, first element
# in the optimizer's tensor, number of elements.
Piece = tuple[str, int, int, int, int]


def share_of(param: Any, name: str, rank: int) -> tuple[int, int] | None:
    """Returns the first element and the number of elements that this rank submits of a parameter. Returns None if another rank submits
    the same elements. Raises UnsupportedError for other DTensors than those sharded along their first dimension."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return (0, param.numel()) if rank == 0 else None
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for placement, at in zip(param.placements, coordinate):
        if type(placement).__name__ == "Replicate":
            if at != 0:
                return None
        elif type(placement).__name__ != "Shard":
            raise Error(UNSUPPORTED, f'"{name}": DTensor placement {placement}: only Shard and Replicate can be logged')
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    shape, offset = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
    cut = next((dim for dim, (here, whole) in enumerate(zip(shape, param.shape)) if here != whole), 0)
    if list(shape[cut + 1:]) != list(param.shape[cut + 1:]) or any(extent != 1 for extent in param.shape[:cut]):
        raise Error(UNSUPPORTED, f'"{name}": DTensor placements {param.placements}: only gradients that are sharded along '
                                 "their first dimension can be logged")
    count = param._local_tensor.numel()
    stride = 1
    for extent in param.shape[cut + 1:]:
        stride *= extent
    return (offset[cut] * stride, count) if count else None


def check_cover(params: list[list[Any]], pieces: list[list[tuple[int, list[Piece]]]]) -> None:
    """Raises MismatchError unless the ranks together have every element of every parameter exactly once."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for rank in pieces:
        for _, mine in rank:
            for name, _, first, _, count in mine:
                ranges.setdefault(name, []).append((first, count))
    for module, name, elems in params:
        end = 0
        for first, count in sorted(ranges.get(name, [])):
            if first != end:
                break
            end += count
        if end != elems or sum(count for _, count in ranges.get(name, [])) != elems:
            raise Error(MISMATCH, f'"{name}" of {module}: the optimizers of all ranks hold {sum(c for _, c in ranges.get(name, []))} '
                                  f"elements, expected each of its {elems} elements exactly once")
