# SPDX-License-Identifier: Apache-2.0
"""shardwright.migrate: moves experts between live ranks."""

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

Tensors = Mapping[tuple[int, int], Sequence[torch.Tensor]]  # {(layer, expert): tensors}


def migrate(old: ExpertPlan, new: ExpertPlan, held: Tensors, group: dist.ProcessGroup | None = None,
            ) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Moves experts between live ranks, from one plan to the next.

    Collective. Makes the transfers in the file of the new plan, round by round, after it has verified them. If the file has none, it
    computes them.

    Args:
        old, new: the plan that the ranks use now, and the next one. Nodes are matched by name, so the old plan may contain ranks
            that no longer exist.
        held: {(layer, expert): tensors} of all experts with state on this rank in the old plan: weights, master weights and
            optimizer states, in the same order on all ranks.
        group: process group of the ranks of the new plan. Default: all ranks.

    Returns:
        The same for the new plan. Experts that stay keep their tensors. Experts that arrive get new tensors, on the device of this
        rank's other tensors.

    Raises:
        UsageError: `held` does not match the old plan. MismatchError: ranks have different plans or shapes. Error with
        code 10: no live rank has an expert, which must then be loaded from a checkpoint. TransferError: a rank is gone. After an
        error the tensors in `held` are unchanged.

    Documentation: experts.md#another-plan in shardwright.DOCS
    """
    ranks = Group(group)
    try:
        return _Migration(old, new, held, ranks).run()
    finally:
        ranks.close()


class _Migration:
    """One call of migrate."""

    def __init__(self, old: ExpertPlan, new: ExpertPlan, held: Tensors, ranks: Group) -> None:
        self._old, self._new, self._held, self._ranks = old, new, held, ranks
        self._transfers: list[list[int]] = []

    def run(self) -> dict[tuple[int, int], list[torch.Tensor]]:
        found_on = moving(lambda: self._ranks.agree(self._prepare))
        for rank, (digests, _) in enumerate(found_on):
            if digests != found_on[0][0]:
                raise Error(MISMATCH, f"rank {rank} migrates between different plans than rank 0")
        forms: dict[tuple[int, int], Any] = {}
        for rank, (_, mine) in enumerate(found_on):
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
