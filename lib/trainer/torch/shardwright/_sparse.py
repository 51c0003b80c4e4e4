# SPDX-License-Identifier: Apache-2.0
"""Sparse collectives: copy parameters of selected experts from their owners to other ranks, and add gradients at the owners."""

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
    """A collective in progress, which SparseCollectives returns. Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS"""

    def __init__(self, requests: list[dist.Work], done: Callable[[], None] | None = None) -> None:
        self._requests, self._done = requests, done

    def wait(self) -> None:
        """Waits until the tensors are complete on this rank. Raises TransferError if a rank is gone."""
        requests, self._requests = self._requests, []
        for request in requests:
            moving(request.wait)
        done, self._done = self._done, None
        if done is not None:
            done()


class SparseCollectives:
    """All-gather and reduce-scatter of experts over a process group. Each expert has one owner. Collective, like its methods.

    Args:
        example: the tensors of one expert. The tensors of all experts have these shapes and types, on all ranks.
        group: process group. Default: all ranks.

    Raises:
        MismatchError: ranks pass different shapes or types. UnsupportedError: a tensor is not contiguous.

    Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
    """

    def __init__(self, example: Sequence[torch.Tensor], group: dist.ProcessGroup | Group | None = None) -> None:
        self._ranks = ranks = group if isinstance(group, Group) else Group(group)
        forms = moving(lambda: ranks.agree(lambda: form_of(example)))
        self._form = forms[0]
        for rank, form in enumerate(forms):
            if form != self._form:
                raise Error(MISMATCH, f"experts: rank {rank} has tensors {_text(form)}, rank 0 {_text(self._form)}")

    def all_gather(self, tensors: Tensors, owner: Sequence[int], holders: Sequence[Sequence[int]], async_op: bool = False) -> Work:
        """Copies the tensors of each expert from its owner to the tensors of its other ranks, in place. Collective.

        Args:
            tensors: {expert: its tensors}, for all experts that list this rank in `holders`. Do not use them before wait().
            owner: [expert]: the rank with the valid tensors, -1 for an expert without ranks. Equal on all ranks.
            holders: [expert]: the ranks that have the expert, ascending, including the owner. Equal on all ranks.
            async_op: return before the copies are complete.

        Returns:
            An object with wait().

        Raises:
            UsageError: an argument is invalid. MismatchError: shapes or types differ. TransferError: a rank is gone.

        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
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
        """Replaces the owner's tensors of each expert by the sum over all its ranks, in the order of ranks, rounded once. Collective.

        The arguments `tensors`, `owner`, `holders` and `async_op`, the result and the errors are those of all_gather(). The
        tensors of other ranks do not change.
        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
        """
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
        """Checks the arguments and returns the experts of this rank, ascending. Raises UsageError and MismatchError."""
        held = []
        for expert, ranks in enumerate(holders):
            if not ranks:
                continue
            if owner[expert] not in ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self._ranks.size:
                raise Error(USAGE, f"expert {expert}: owner {owner[expert]}, ranks {list(ranks)}: ascending numbers below "
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
    """Returns shapes and types. Raises UnsupportedError for a tensor that is not contiguous."""
    for one in tensors:
        if not one.is_contiguous():
            raise Error(UNSUPPORTED, f"an expert tensor of shape {tuple(one.shape)} has strides; only contiguous tensors are supported")
    return [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors]


def _text(form: list[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in form) or "none"
