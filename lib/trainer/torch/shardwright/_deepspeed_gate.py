# SPDX-License-Identifier: Apache-2.0
"""Gates of DeepSpeed's MoE layers: gives each expert a capacity of its own while experts make up for lost tokens.

DeepSpeed's gate has one capacity for all experts, which is also the size of their buffers. A RaisedGate runs it several times with
the same random numbers: at its own capacity, and at each capacity that an expert with an addition has. From each run it takes the
tokens of the experts that have this capacity. The buffers get the largest capacity of the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._group import Group, moving
from ._tokens import moe_layers


def _refuse(engine: Any) -> None:
    """Raises UnsupportedError for an engine that is not supported."""
    import deepspeed
    from deepspeed.moe.sharded_moe import TopKGate
    from deepspeed.utils import groups
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
    if "sparse_routes" not in inspect.signature(TopKGate.forward).parameters:
        raise Error(UNSUPPORTED, f"deepspeed {deepspeed.__version__}: its gates have no sparse routes, as those of 0.19.8 have")
    if type(engine).__name__ == "PipelineEngine":
        raise Error(UNSUPPORTED, "extra capacity with DeepSpeed's pipeline engine is not supported")
    size = max(bwc_tensor_model_parallel_world_size(groups.mpu), getattr(engine, "mp_world_size", 1))
    if size > 1:
        raise Error(UNSUPPORTED, f"extra capacity with DeepSpeed's tensor parallelism over {size} ranks is not supported")


def _gate_of(name: str, layer: Any, devices: int) -> Any:
    """Returns the gate of an MoE layer. Raises UnsupportedError and UsageError for one that cannot have additional capacity."""
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate
    inner = layer.deepspeed_moe
    gate = inner.gate
    for found, expected in ((inner, MOELayer), (gate, TopKGate)):
        if type(found).forward is not expected.forward:
            raise Error(UNSUPPORTED, f"{name}: DeepSpeed's {expected.__name__} expected, found {type(found).__name__}; call "
                                     "capacity() in the gate")
    if not gate.drop_tokens:
        raise Error(UNSUPPORTED, f"{name}: drop_tokens=False: the gate drops no tokens, so experts have no capacity to increase")
    if inner.use_tutel:
        raise Error(UNSUPPORTED, f"{name}: extra capacity with Tutel is not supported")
    if "forward" in vars(gate):
        raise Error(USAGE, f"{name}: the gate's forward() was replaced already; call detach() of the earlier ExtraCapacity first")
    if layer.ep_size != devices:
        raise Error(USAGE, f"devices={devices}: {name} has ep_size={layer.ep_size}; pass devices={layer.ep_size}")
    return gate


def gates_of(engine: Any, devices: int, experts: list[int] | None) -> list[Any]:
    """Returns the gates of an engine's MoE layers, in DeepSpeed's order. Local.

    Args:
        devices: as in ExtraCapacity.
        experts: number of experts of each layer in the checkpoint. None: not known.

    Raises:
        UnsupportedError: the engine or a gate is not supported (experts.md#limits in shardwright.DOCS).
        UsageError: `devices` differs from ep_size, or the gate was replaced before.
        MismatchError: the checkpoint has other layers or experts.
    """
    _refuse(engine)
    layers = moe_layers(engine.module)
    if not layers:
        raise Error(UNSUPPORTED, "the model has no layer of the class deepspeed.moe.layer.MoE")
    found = [layer.num_experts for layer in layers.values()]
    if experts is not None and found != experts:
        raise Error(MISMATCH, f"experts of each MoE layer: the restore has {experts}, the model {found}")
    return [_gate_of(name, layer, devices) for name, layer in layers.items()]


def agree_on(work: Callable[[], list[Any]], debts: list[list[int]]) -> list[Any]:
    """Returns the result of `work` of the calling rank. Collective over all ranks. Raises the error of the first rank where `work`
    fails, and UsageError if the lost tokens differ between ranks."""
    group = Group()
    try:
        found: list[Any] = []

        def local() -> list[list[int]]:
            found.extend(work())
            return debts

        for rank, theirs in enumerate(group.agree(local)):
            if theirs != debts:
                raise Error(USAGE, f"loaded: rank {rank} has other lost tokens than rank {group.rank}; pass the result of the same "
                                   "restore on all ranks")
    finally:
        group.close()
    return found


def _random_state(device: torch.device, state: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the state of a device's default generator, and sets it if `state` is given."""
    generator: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    now: torch.Tensor = generator.get_rng_state()
    if state is not None:
        generator.set_rng_state(state)
    return now


class RaisedGate:
    """Replaces forward() of a TopKGate until detach(). It detaches by itself when no rank of the expert-parallel group owes tokens.

    Evaluation passes use DeepSpeed's capacity. Each training pass is collective over the expert-parallel group.

    Args:
        gate: the gate. Its forward must not have been replaced.
        capacity: returns the capacity of each expert from the routed tokens and the capacities without addition.
        owes: returns true while the calling rank owes tokens in this layer.
    """

    def __init__(self, gate: Any, capacity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], owes: Callable[[], bool]) -> None:
        self._gate, self._capacity, self._owes = gate, capacity, owes
        self._attached = True
        self._plain = type(gate).forward
        gate.forward = self.forward

    def detach(self) -> None:
        """Restores forward() of the gate. Local."""
        self._attached = False
        if vars(self._gate).get("forward") == self.forward:
            del self._gate.forward

    def forward(self, hidden: torch.Tensor, used_token: torch.Tensor | None = None, sparse_routes: bool = False,
                use_tutel: bool = False) -> tuple[Any, ...]:
        """Returns the result of TopKGate.forward for a capacity per expert. l_aux and the token counts are those of DeepSpeed."""
        arguments = hidden, used_token, sparse_routes, use_tutel
        if not self._attached or not self._gate.training:
            return self._plain(self._gate, *arguments)
        if not sparse_routes:
            raise Error(UNSUPPORTED, "extra capacity in a gate that is called without sparse_routes=True is not supported")
        state = _random_state(hidden.device)
        normal = self._plain(self._gate, *arguments)
        capacity, tokens = int(normal[1]), normal[6]
        before = torch.full(tokens.shape, capacity, dtype=torch.int64, device="cpu")
        above = self._capacity(tokens, before) - before
        most, owed = self._largest(int(above.max()), self._owes(), hidden.device)
        if not owed:
            self.detach()
        if most == 0:
            return normal
        routes = normal[3:6]
        if above.any():
            def at(size: int) -> Any:
                return self._routes_at(size, arguments, state)
            routes = _merged(normal[3:6], capacity, above.to(hidden.device), at, len(hidden))
        return normal[0], torch.tensor(capacity + most), normal[2], *routes, tokens

    def _largest(self, above: int, owes: bool, device: torch.device) -> tuple[int, bool]:
        """Returns the largest addition of all ranks of the expert-parallel group, and true if any of these ranks owes tokens. The
        buffers of these ranks must have one size. Collective."""
        group = self._gate.ep_group
        if group is None or dist.get_world_size(group) == 1:
            return above, owes
        both = torch.tensor([above, owes], dtype=torch.int64, device=device)
        moving(lambda: dist.all_reduce(both, dist.ReduceOp.MAX, group=group))
        return int(both[0]), bool(both[1])

    def _routes_at(self, capacity: int, arguments: tuple[Any, ...], state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns experts, places and weights [choice][token] that the gate returns with another capacity for the same random
        numbers. The state of the generator is unchanged afterwards."""
        gate = self._gate
        own, now = (gate.capacity_factor, gate.min_capacity), _random_state(arguments[0].device, state)
        gate.capacity_factor, gate.min_capacity = 0.0, capacity  # DeepSpeed takes the larger capacity of both
        try:
            return self._plain(gate, *arguments)[3:6]
        finally:
            gate.capacity_factor, gate.min_capacity = own
            _random_state(arguments[0].device, now)


def _merged(normal: tuple[torch.Tensor, ...], capacity: int, above: torch.Tensor, at: Callable[[int], tuple[torch.Tensor, ...]],
            tokens: int) -> tuple[torch.Tensor, ...]:
    """Returns the routes (experts, places, weights) of experts with different capacities.

    Args:
        normal: the routes at `capacity`. An expert is -1 where the token was dropped.
        above: [expert], the addition to `capacity`.
        at: returns the routes at another capacity.
        tokens: number of tokens, the capacity at which none is dropped.
    """
    experts, places, weights = torch.full_like(normal[0], -1), torch.zeros_like(normal[1]), torch.zeros_like(normal[2])
    for more in sorted(set(above.tolist())):
        routes = at(capacity + more) if more else normal
        taken = (routes[0] >= 0) & (above[routes[0].clamp(min=0).long()] == more)
        experts, places, weights = (torch.where(taken, new, old) for new, old in zip(routes, (experts, places, weights)))
    if len(experts) == 1:
        return experts, places, weights
    # Weights of a token sum to 1 over the experts that process it. They change only where a further expert does.
    whole = at(tokens)[2] * (experts >= 0)
    whole = whole / whole.sum(0).clamp(min=torch.finfo(whole.dtype).eps)
    same = ((experts >= 0) == (normal[0] >= 0)).all(0)
    return experts, places, torch.where(same, normal[2], whole)
