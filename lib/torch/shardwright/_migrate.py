"""shardwright.migrate: from one plan to the next, between live ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._errors import MISMATCH, USAGE, Error
from ._group import Group, moving
from ._library import call
from ._plans import ExpertPlan
from ._sparse import form_of

Held = Mapping[tuple[int, int], Sequence[torch.Tensor]]


def migrate(old: ExpertPlan, new: ExpertPlan, held: Held, group: Any = None) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Carries out the transfers of a plan, round by round. Collective.

    old, new: what the ranks hold, and are to hold. Their nodes are found by name, so that the old plan may have ranks that
        are gone. The transfers are those of the new plan's file, proved; where it has none they are worked out.
    held: {(layer, expert): tensors} of all that this rank has of the old plan: weights, master weights and states of the
        optimizer, in an order that all ranks have alike.
    group: the ranks of the new plan.

    Returns the same for the new plan: what stays are the tensors that were given, what arrives are new ones, on the device
    where this rank has its own. What was given is not touched: after an error it is as before.
    Raises Error; experts that no live rank holds have to come from a checkpoint.
    """
    ranks = Group(group)
    try:
        return _Migration(old, new, held, ranks).run()
    finally:
        ranks.close()


class _Migration:
    def __init__(self, old: ExpertPlan, new: ExpertPlan, held: Held, ranks: Group) -> None:
        self._old, self._new, self._held, self._ranks = old, new, held, ranks
        self._transfers: list[list[int]] = []

    def run(self) -> dict[tuple[int, int], list[torch.Tensor]]:
        told = moving(lambda: self._ranks.agree(self._prepare))
        for rank, (digests, _) in enumerate(told):
            if digests != told[0][0]:
                raise Error(MISMATCH, f"rank {rank} migrates between other plans than rank 0")
        forms: dict[tuple[int, int], Any] = {}
        for rank, (_, mine) in enumerate(told):
            for key, form in mine.items():
                if forms.setdefault(key, form)[0] != form[0]:
                    raise Error(MISMATCH, f"layer {key[0]} expert {key[1]}: tensors {form[0]} on rank {rank}, {forms[key][0]} elsewhere")
        device = next((one.device for tensors in self._held.values() for one in tensors if not one.is_cpu), None)
        found = {key: list(tensors) for key, tensors in self._held.items()}
        rounds: dict[int, list[list[int]]] = {}
        for transfer in self._transfers:
            rounds.setdefault(transfer[4], []).append(transfer)
        for number in sorted(rounds):
            self._carry_out(rounds[number], found, forms, device)
        wanted = self._wanted(self._new)
        return {key: found[key] for key in sorted(wanted)}

    def _prepare(self) -> Any:
        moves = call("plan_moves", {
            "old": self._old.path, "old_ranks": self._old.ranks, "old_digest": self._old.digest,
            "new": self._new.path, "ranks": self._ranks.size, "digest": self._new.digest})
        self._transfers = moves["transfers"]
        held = {(layer, expert) for layer, slots in zip(self._new.layers, moves["held"]) for expert in slots[self._ranks.rank]}
        if set(self._held) != held:
            layer, expert = min(set(self._held) ^ held)
            given = "are given, but it does not hold it" if (layer, expert) in self._held else "are missing"
            raise Error(USAGE, f"{self._old.path}: rank {self._ranks.rank}: tensors of layer {layer} expert {expert} {given}")
        return (self._old.digest, self._new.digest), {
            key: (form_of(tensors), [one.is_cpu for one in tensors]) for key, tensors in self._held.items()}

    def _wanted(self, plan: ExpertPlan) -> set[tuple[int, int]]:
        return {(layer, expert) for layer in plan.layers for expert, ranks in enumerate(plan.state(layer)) if self._ranks.rank in ranks}

    def _carry_out(self, transfers: list[list[int]], found: dict[tuple[int, int], list[torch.Tensor]], forms: Any,
                   device: Any) -> None:
        pairs: list[Any] = []
        arriving: dict[tuple[int, int], list[torch.Tensor]] = {}
        for layer, expert, source, target, _ in transfers:
            key = layer, expert
            if source == self._ranks.rank:
                pairs += [self._ranks.pair(dist.isend, one, target) for one in found[key]]
            elif target == self._ranks.rank:
                shapes, on_cpu = forms[key]
                arriving[key] = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if cpu or device is None else device)
                                 for (shape, dtype), cpu in zip(shapes, on_cpu)]
                pairs += [self._ranks.pair(dist.irecv, one, source) for one in arriving[key]]
        for request in moving(lambda: dist.batch_isend_irecv(pairs)) if pairs else []:
            moving(request.wait)
        found.update(arriving)
