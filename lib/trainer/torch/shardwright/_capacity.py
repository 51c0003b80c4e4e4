# SPDX-License-Identifier: Apache-2.0
"""Additional capacity for experts that lost tokens in a fault: docs/experts.md."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ._deepspeed_gate import RaisedGate, agree_on, gates_of
from ._errors import USAGE, Error
from ._library import compute
from ._load import Loaded
from ._types import DeepSpeedEngine, Restored


class ExtraCapacity:
    """Gives experts that a restore left older than the rest additional capacity, until they have processed as many additional
    tokens as they lost (MoEtion, section 6).

        extra = shardwright.ExtraCapacity(loaded, devices=8)
        ...
        capacity = extra.capacity(layer, tokens, capacity)   # in a gate, before it drops tokens
        ...
        extra.step()                                         # after each optimizer step

    For DeepSpeed's MoE layers, attach() does this in their gates:

        extra = shardwright.ExtraCapacity(loaded, devices=ep, ranks=dist.get_world_size(), rank=dist.get_rank())
        extra.attach(engine)
        ...
        extra.step()

    The addition is at most a tenth of the expert's capacity, and at most its share of the capacity that other experts of its
    device leave unused. Only attach() and forward passes of attached layers are collective.

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
        self._lost, self._ranks, self._rank = [list(layer) for layer in lost], ranks, rank
        self._gates: list[RaisedGate] = []
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

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Gives experts of DeepSpeed's MoE layers the additional capacity in training passes, until no rank of a layer's
        expert-parallel group owes tokens. Collective over all ranks.

        Args:
            engine: the engine that was restored. `devices` must be the ep_size of its layers, and `ranks` and `rank` those of
                torch.distributed, because each rank routes its own tokens.

        A gate is not replaced if its layer lost no tokens. Layers are checked in any case.

        Raises:
            UnsupportedError: the engine or a gate is not supported (experts.md#limits in shardwright.DOCS).
            UsageError: an argument of the constructor differs from the above, or the gates have an ExtraCapacity already.
            MismatchError: the restore has other layers or experts than the model.

        Documentation: experts.md#capacity-after-a-fault in shardwright.DOCS
        """
        gates = agree_on(lambda: self._gates_of(engine), self._lost)
        self._gates = [
            RaisedGate(gate, functools.partial(self.capacity, number), functools.partial(self._owes, number))
            for number, (gate, lost) in enumerate(zip(gates, self._lost)) if any(lost)]

    def detach(self) -> None:
        """Restores the gates that attach() has replaced. Call it on all ranks between two steps. Local.
        Documentation: experts.md#capacity-after-a-fault in shardwright.DOCS"""
        for gate in self._gates:
            gate.detach()
        self._gates.clear()

    def _gates_of(self, engine: Any) -> list[Any]:
        """Returns the gates of all MoE layers. Raises as attach() does."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if (self._ranks, self._rank) != (ranks, rank):
            raise Error(USAGE, f"ranks={self._ranks}, rank={self._rank}: each rank routes its own tokens in DeepSpeed's layers; pass "
                               f"ranks={ranks}, rank={rank}")
        return gates_of(engine, self._devices, [len(layer) for layer in self._lost] or None)

    def _owes(self, layer: int) -> bool:
        return self._owing[layer]
