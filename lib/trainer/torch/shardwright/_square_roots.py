# SPDX-License-Identifier: Apache-2.0
"""Table of the square roots that torch.sqrt returns on this processor. Some are not correctly rounded: docs/lossless.md."""

from __future__ import annotations

import functools

import torch

from ._errors import UNSUPPORTED, Error

NORMAL, ONE, END = 0x00800000, 0x3F800000, 0x7F800000  # bit patterns of the smallest normal number, of 1 and of infinity
SUBNORMALS = 1 << 31  # replay::RootTable::kSubnormals
ALL = 1 << 24  # float32 numbers in [1, 4)
CHUNK = 1 << 21
SAMPLES = 2  # chunks of random numbers


def _roots(bits: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(bits.to(torch.int32).view(torch.float32)).view(torch.int32)


def _correct(bits: torch.Tensor) -> torch.Tensor:
    """Returns correctly rounded square roots: float64 has more than twice the digits, so rounding its root again is exact."""
    return torch.sqrt(bits.to(torch.int32).view(torch.float32).double()).float().view(torch.int32)


@functools.cache
def square_roots() -> tuple[torch.Tensor, int]:
    """Returns the square roots of all float32 numbers in [1, 4), and the bits of the largest number with a root derived from them,
    with the flag SUBNORMALS if those of subnormal numbers do too, for replay::RootTable.

    Raises UnsupportedError if the square roots of other numbers do not follow from the table.
    """
    found, off = torch.empty(ALL, dtype=torch.int32, device="cpu"), torch.empty(ALL, dtype=torch.int8, device="cpu")
    for first in range(0, ALL, CHUNK):
        bits = torch.arange(ONE + first, ONE + first + CHUNK, device="cpu")
        found[first:first + CHUNK] = _roots(bits)
        off[bits % ALL] = (found[first:first + CHUNK] - _correct(bits)).to(torch.int8)

    def wrong(bits: torch.Tensor, follow: bool) -> torch.Tensor:
        # A product with an even power of 2 makes a subnormal number normal and keeps its entry in the table.
        scaled = (bits.to(torch.int32).view(torch.float32).double() * 2.0 ** 64).float().view(torch.int32)
        deviation = torch.where(bits < NORMAL, off[scaled % ALL] if follow else 0, off[bits % ALL])
        return bits[_roots(bits) != _correct(bits) + torch.where(bits == 0, 0, deviation)]

    subnormals = torch.arange(NORMAL, device="cpu")
    follow = bool(wrong(subnormals, False).numel()) and not wrong(subnormals, True).numel()

    last = END - 1
    for first in range(END - 2 * ALL, END, CHUNK):
        differing = wrong(torch.arange(first, first + CHUNK, device="cpu"), follow)
        if differing.numel():
            last = int(differing[0]) - 1
            break
    # Samples only. The test interop_replay checks every number, which takes minutes.
    numbers = torch.Generator().manual_seed(1)
    for _ in range(SAMPLES):
        differing = wrong(torch.randint(0, last + 1, (CHUNK,), generator=numbers), follow)
        if not differing.numel():
            continue
        raise Error(UNSUPPORTED, f"torch.sqrt on this processor: the result for the bits {int(differing[0]):#x} does not follow "
                                 "from those for numbers in [1, 4)")
    return found.view(torch.float32), last | (SUBNORMALS if follow else 0)
