# SPDX-License-Identifier: Apache-2.0
"""Additional capacity for experts that lost tokens in a fault: docs/experts.md."""

from __future__ import annotations

from typing import Any

import torch

from ._errors import USAGE, Error
from ._library import compute
from ._load import Loaded
from ._types import Restored


class ExtraCapacity:
    """Gives experts that a restore left older than the rest additional capacity, until they have processed as many additional
    tokens as they lost (MoEtion, section 6).

        extra = shardwright.ExtraCapacity(loaded, devices=8)
        ...
        capacity = extra.capacity(layer, tokens, capacity)   # in a gate, before it drops tokens
        ...
        extra.step()                                         # after each optimizer step

    The addition is at most a tenth of the expert's capacity, and at most its share of the capacity that other experts of its
    device leave unused. Local: no method is collective.

    Args:
        loaded: the result of shardwright.load, or its attribute `restored`. If no tokens were lost or counted, capacities do not
            change.
        devices: number of devices that have the experts of a layer, in equal shares. The first share is on the first device.
        ranks, rank: number of ranks that route tokens with a capacity of their own, and the calling rank. Each gets a share of
            the lost tokens. If a gate counts the tokens of all ranks, use the defaults 1 and 0.

    Attributes:
        debts: int64 tensors, [layer][expert]: lost tokens that this rank has not yet made up for.

    Raises:
        UsageError: an argument is out of range, or `devices` does not divide the number of experts.

    Documentation: experts.md#capacity-after-a-fault in shardwright.DOCS
    """

    debts: list[torch.Tensor]

    def __init__(self, loaded: Loaded | Restored | None, devices: int, ranks: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < ranks:
            raise Error(USAGE, f"rank={rank}: a number from 0 to {ranks - 1} expected, since ranks={ranks}")
        restored: Any = getattr(loaded, "restored", loaded) or {}
        lost = (restored.get("loss") or {}).get("lost_by_expert", [])
        self._devices = devices
        self.debts = [
            torch.tensor([whole // ranks + (rank < whole % ranks) for whole in layer], dtype=torch.int64, device="cpu")
            for layer in lost]
        for number, layer in enumerate(self.debts):
            if devices < 1 or len(layer) % devices:
                raise Error(USAGE, f"devices={devices}: a divisor of the {len(layer)} experts of layer {number} expected")
        self._owing = [bool(layer.any()) for layer in self.debts]
        self._used = [torch.zeros_like(layer) for layer in self.debts]

    def capacity(self, layer: int, tokens: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
        """Returns the capacity of each expert of a layer, including the addition. Local.

        Args:
            layer: number of the MoE layer.
            tokens: integers [expert], the tokens that are routed to each expert.
            capacity: integers [expert], the capacities without the addition. Returned unchanged if the layer has no debts.

        Until step() the same arguments return the same result, so a forward pass can be repeated.
        Documentation: experts.md#capacity-after-a-fault in shardwright.DOCS
        """
        if layer >= len(self.debts) or not self._owing[layer]:
            return capacity
        extra = compute("extra_capacity", tokens.detach().to("cpu", torch.int64).contiguous(),
                        capacity.detach().to("cpu", torch.int64).contiguous(), self.debts[layer], self._devices)
        self._used[layer] += extra
        return capacity + extra.to(capacity.device, capacity.dtype)

    def step(self) -> bool:
        """Subtracts the tokens that were made up for since the last step from the debts. Returns true if debts are left. Local.
        Call it after each optimizer step. Documentation: experts.md#capacity-after-a-fault in shardwright.DOCS"""
        for number, used in enumerate(self._used):
            if self._owing[number]:
                self.debts[number] = (self.debts[number] - used).clamp_(min=0)
                self._owing[number] = bool(self.debts[number].any())
                used.zero_()
        return any(self._owing)
