"""Sparse collectives: parameters of chosen experts from their owners to other ranks, and gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._group import Group, moving
from ._library import compute

Tensors = Mapping[int, Sequence[torch.Tensor]]


class Work:
    """What is under way: wait() until it is done."""

    def __init__(self, requests: list[Any], done: Callable[[], None] | None = None) -> None:
        self._requests, self._done = requests, done

    def wait(self) -> None:
        requests, self._requests = self._requests, []
        for request in requests:
            moving(request.wait)
        done, self._done = self._done, None
        if done is not None:
            done()


class SparseCollectives:
    """All-gather and reduce-scatter of experts over a process group, from and to one owner of each.

    example: the tensors of one expert. Those of all experts have these shapes and types, on all ranks. Collective.
    """

    def __init__(self, example: Sequence[torch.Tensor], group: Any = None) -> None:
        self._ranks = ranks = group if isinstance(group, Group) else Group(group)
        forms = moving(lambda: ranks.agree(lambda: form_of(example)))
        self._form = forms[0]
        for rank, form in enumerate(forms):
            if form != self._form:
                raise Error(MISMATCH, f"experts: rank {rank} has tensors {_text(form)}, rank 0 {_text(self._form)}")

    def all_gather(self, tensors: Tensors, owner: Sequence[int], holders: Sequence[Sequence[int]], async_op: bool = False) -> Work:
        """Copies the tensors of each expert from its owner into those of its other holders. Collective; all ranks give the
        same owners and holders, and each its tensors of the experts that it holds, which must not be touched before wait().
        """
        held = self._check(tensors, owner, holders)
        pairs: list[Any] = []
        for expert in held:
            if owner[expert] != self._ranks.rank:
                pairs += [self._ranks.pair(dist.irecv, one, owner[expert]) for one in tensors[expert]]
            else:
                pairs += [self._ranks.pair(dist.isend, one, to) for to in holders[expert] if to != owner[expert] for one in tensors[expert]]
        return self._begin(pairs, None, async_op)

    def reduce_scatter(self, tensors: Tensors, owner: Sequence[int], holders: Sequence[Sequence[int]], async_op: bool = False) -> Work:
        """Makes the owner's tensors of each expert the sum of all holders', in the order of their ranks, rounded once.
        Collective, as all_gather."""
        held = self._check(tensors, owner, holders)
        pairs: list[Any] = []
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        for expert in held:
            if owner[expert] != self._ranks.rank:
                pairs += [self._ranks.pair(dist.isend, one, owner[expert]) for one in tensors[expert]]
            elif len(holders[expert]) > 1:
                for one in tensors[expert]:
                    parts = one.new_empty(len(holders[expert]), one.numel())
                    sums.append((one, parts))
                    for row, rank in zip(parts, holders[expert]):
                        if rank == owner[expert]:
                            row.copy_(one.reshape(-1))
                        else:
                            pairs.append(self._ranks.pair(dist.irecv, row, rank))

        def add() -> None:
            for one, parts in sums:
                one.copy_(compute("sum_parts", parts).view_as(one))

        return self._begin(pairs, add, async_op)

    def _begin(self, pairs: list[Any], done: Callable[[], None] | None, async_op: bool) -> Work:
        work = Work(moving(lambda: dist.batch_isend_irecv(pairs)) if pairs else [], done and torch.no_grad()(done))
        if not async_op:
            work.wait()
        return work

    def _check(self, tensors: Tensors, owner: Sequence[int], holders: Sequence[Sequence[int]]) -> list[int]:
        """The experts that this rank holds, ascending."""
        held = []
        for expert, ranks in enumerate(holders):
            if not ranks:
                continue
            if owner[expert] not in ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self._ranks.size:
                raise Error(USAGE, f"expert {expert}: owner {owner[expert]}, holders {list(ranks)}: ascending ranks below "
                                   f"{self._ranks.size} with the owner among them expected")
            if self._ranks.rank in ranks:
                held.append(expert)
        if sorted(tensors) != held:
            raise Error(USAGE, f"rank {self._ranks.rank}: tensors of experts {sorted(tensors)} given, it holds {held}")
        for expert in held:
            form = form_of(tensors[expert])
            if form != self._form:
                raise Error(MISMATCH, f"expert {expert}: tensors {_text(form)}, expected {_text(self._form)}")
        return held


def form_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types. Raises Error where one has strides."""
    for one in tensors:
        if not one.is_contiguous():
            raise Error(UNSUPPORTED, f"a tensor of an expert of shape {tuple(one.shape)} has strides; only contiguous ones move")
    return [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors]


def _text(form: list[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in form) or "none"
