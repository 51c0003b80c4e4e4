"""Tokens that experts have lost in a fault, made up for: docs/experts.md."""

from __future__ import annotations

from typing import Any

import torch

from ._errors import USAGE, Error
from ._library import compute


class ExtraCapacity:
    """More capacity for experts that a restore left older: a tenth, until they have processed as many tokens more as they have
    lost, and only as much as other experts of their device leave unused (MoEtion, section 6).

        extra = shardwright.ExtraCapacity(loaded, devices=8)
        ...
        capacity = extra.capacity(layer, tokens, capacity)   # in a gate, before it drops tokens
        ...
        extra.step()                                         # after each step of the optimizer

    loaded: what shardwright.load returned, or its `restored`; where no tokens were lost, or none were counted, nothing changes.
    devices: over which the experts of a layer lie, in equal shares, the first ones on the first.
    ranks, rank: of those that route tokens, each with a capacity of its own: debts are shared among them. With a gate that counts
        the tokens of all of them, 1 and 0.

    Attributes: debts, [layer][expert]: tokens that this rank has not made up yet. Nothing here is collective.
    """

    def __init__(self, loaded: Any, devices: int, ranks: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < ranks:
            raise Error(USAGE, f"rank={rank} of ranks={ranks}")
        restored = getattr(loaded, "restored", loaded) or {}
        lost = (restored.get("loss") or {}).get("lost_by_expert", [])
        self._devices = devices
        self.debts: list[torch.Tensor] = [
            torch.tensor([whole // ranks + (rank < whole % ranks) for whole in layer], dtype=torch.int64, device="cpu")
            for layer in lost]
        for number, layer in enumerate(self.debts):
            if devices < 1 or len(layer) % devices:
                raise Error(USAGE, f"devices={devices}: a divisor of the {len(layer)} experts of layer {number} expected")
        self._owing = [bool(layer.any()) for layer in self.debts]
        self._used = [torch.zeros_like(layer) for layer in self.debts]

    def capacity(self, layer: int, tokens: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
        """What each expert of a layer may process now, of int64 numbers for each expert.

        tokens: that are routed to it. capacity: without the extra; where the layer owes nothing it is what comes back.
        The same for the same arguments until step(), also where a forward pass is repeated.
        """
        if layer >= len(self.debts) or not self._owing[layer]:
            return capacity
        extra = compute("extra_capacity", tokens.detach().to("cpu", torch.int64).contiguous(),
                        capacity.detach().to("cpu", torch.int64).contiguous(), self.debts[layer], self._devices)
        self._used[layer] += extra
        return capacity + extra.to(capacity.device, capacity.dtype)

    def step(self) -> bool:
        """Takes from the debts what was made up since the last step. Returns whether any is left."""
        for number, used in enumerate(self._used):
            if self._owing[number]:
                self.debts[number] = (self.debts[number] - used).clamp_(min=0)
                self._owing[number] = bool(self.debts[number].any())
                used.zero_()
        return any(self._owing)
