# SPDX-License-Identifier: Apache-2.0
"""Layers of replicated experts: sends tokens to replicas and back, copies parameters, and adds gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._errors import MISMATCH, USAGE, Error
from ._group import Group, moving
from ._library import call, compute
from ._operators import sum_type
from ._plans import ExpertPlan
from ._sparse import SparseCollectives, Work

RULES = ("capacity", "proportional", "topology")
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Dispatched:
    """Tokens that ReplicatedExperts.dispatch has sent to this rank.

    Attributes:
        rows: tokens, [rows][hidden], sorted by expert, then by sender. Differentiable.
        experts: the experts of this rank, ascending.
        sizes: number of rows of each of these experts, including zeros.

    Documentation: experts.md#tokens in shardwright.DOCS
    """

    rows: torch.Tensor
    experts: list[int]
    sizes: list[int]
    _place: torch.Tensor
    _arrange: torch.Tensor
    _sent: list[int]
    _received: list[int]
    _thread: torch.Tensor
    _copies: Prefetched | None

    def by_expert(self) -> list[tuple[int, torch.Tensor]]:
        """Returns (expert, its rows) for all experts of this rank, ascending. Local."""
        return list(zip(self.experts, self.rows.split(self.sizes)))


class ReplicatedExperts:
    """A layer of experts that are placed on ranks by a plan.

    Sends tokens to the replicas of their experts and back, and adds the gradients of replicas. Collective, like all methods except
    close and calibrate. Every rank must call backward(), even if it received no tokens.

    Args:
        plan: a plan of moe-replace from ExpertPlan.read, for the ranks of the group.
        layer: number of the layer in the plan.
        parameters: {expert: its tensors}, for the experts with state on this rank. All experts have the same number of tensors,
            with the same shapes, in the same order.
        group: process group of the ranks. Default: all ranks.
        rule: how tokens are shared among replicas. "capacity": equal shares, and a rank's own tokens first. "proportional": the
            same, and the remaining tokens in proportion to the rest of the shares. "topology": the rank itself, otherwise
            ranks of its node, otherwise all ranks.
        rematerialise: frees the copies of materialise() in combine(), and gathers them again in the backward pass. Needs a plan
            with one owner of each expert. Equal on all ranks.

    Attributes:
        parameters: {expert: its tensors}, as passed.
        holders: [expert]: ranks that compute the expert, ascending.
        owner: [expert]: the first rank that has the state of the expert, -1 for no rank.

    Raises:
        UsageError: parameters, rule or rematerialise do not match the plan. MismatchError: ranks differ in plan, layer, rule,
            rematerialise or shapes.

    Documentation: experts.md in shardwright.DOCS
    """

    plan: ExpertPlan
    layer: int
    rule: str
    rematerialise: bool
    parameters: dict[int, list[torch.Tensor]]
    holders: list[list[int]]
    owner: list[int]

    def __init__(self, plan: ExpertPlan, layer: int, parameters: Mapping[int, Sequence[torch.Tensor]],
                 group: dist.ProcessGroup | None = None, rule: str = "capacity", rematerialise: bool = False) -> None:
        self._ranks = Group(group)
        self.plan, self.layer, self.rule, self.rematerialise = plan, layer, rule, rematerialise
        self._materialised: Prefetched | None = None  # copies to free, between materialise() and dispatch()
        self.parameters = {expert: list(tensors) for expert, tensors in sorted(parameters.items())}

        def check() -> tuple[Any, ...]:
            if plan.ranks != self._ranks.size:
                raise Error(MISMATCH, f"{plan.path}: the plan is for {plan.ranks} ranks, but the process group has {self._ranks.size}")
            if rule not in RULES:
                raise Error(USAGE, f'rule: {", ".join(RULES)} expected, found "{rule}"')
            if rematerialise and plan.owners is None:
                raise Error(USAGE, f"{plan.path}: rematerialise: all replicas of the plan have state, so there are no copies to free")
            self.holders, self.owner, state = plan.holders(layer), plan.owner(layer), plan.state(layer)
            mine = [expert for expert, ranks in enumerate(state) if self._ranks.rank in ranks]
            if list(self.parameters) != mine:
                raise Error(USAGE, f"{plan.path}: layer {layer}: rank {self._ranks.rank} holds experts {mine}, parameters of "
                                   f"{list(self.parameters)} are given")
            return plan.digest, layer, rule, rematerialise, next(iter(self.parameters.values()), None) is not None

        found = moving(lambda: self._ranks.agree(check))
        for rank, other in enumerate(found):
            if other[:4] != found[0][:4]:
                raise Error(MISMATCH, f"rank {rank} has plan {other[0][:16]} layer {other[1]} rule {other[2]} rematerialise {other[3]}, "
                                      f"rank 0 plan {found[0][0][:16]} layer {found[0][1]} rule {found[0][2]} rematerialise {found[0][3]}")
            if not other[4]:
                raise Error(USAGE, f"{plan.path}: layer {layer}: rank {rank} holds no expert, so the shapes of its parameters are unknown")
        self._example = next(iter(self.parameters.values()))
        self._sparse = SparseCollectives(self._example, self._ranks)
        self._replicas = torch.zeros(plan.experts, plan.ranks, dtype=torch.int64, device="cpu")
        for rank, slots in enumerate(plan.slots[plan.row(layer)]):
            for expert in slots:
                self._replicas[expert, rank] += 1
        self._node = torch.tensor(plan.node, dtype=torch.int64, device="cpu")

    def close(self) -> None:
        """Destroys the process group that the object created, if any. Local."""
        self._ranks.close()

    # Tokens

    def loads(self, chosen: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the token counts [expert][rank]: the number of tokens that each rank has for each expert. Collective.

        Args:
            chosen: gate decisions of this rank, integers [tokens][choices], -1 for no choice.
            tokens: [tokens][hidden], to check shape and type on all ranks. Default: no check.

        Raises:
            UsageError, MismatchError: on all ranks, if the arguments of any rank are invalid or differ.

        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
        """
        counts = torch.zeros(self.plan.experts, dtype=torch.int64, device="cpu")
        failed: Error | None = None
        try:
            if chosen.dim() != 2 or chosen.dtype not in (torch.int64, torch.int32):
                raise Error(USAGE, f"chosen: integers [tokens][choices] expected, found {chosen.dtype} {list(chosen.shape)}")
            if tokens is not None:
                _check_tokens(tokens, chosen)
            counts = compute("count_experts", chosen.detach().to("cpu", torch.int64).contiguous(), self.plan.experts)
        except Error as error:
            failed = error
        hidden, dtype = (tokens.shape[-1], TYPES.index(tokens.dtype)) if tokens is not None and failed is None else (0, 0)
        mine = torch.cat([torch.tensor([0 if failed is None else failed.code, hidden, dtype], device="cpu"), counts])
        if self._ranks.size == 1:
            if failed is not None:
                raise failed
            return counts.reshape(-1, 1)
        flat = torch.empty(self._ranks.size * len(mine), dtype=torch.int64, device="cpu")
        moving(lambda: dist.all_gather_into_tensor(flat, mine, group=self._ranks.for_tensors(mine)))
        table = flat.view(self._ranks.size, -1)
        if table[:, 0].any():
            texts = moving(lambda: self._ranks.gather(None if failed is None else str(failed)))
            rank = next(rank for rank, text in enumerate(texts) if text is not None)
            raise Error(int(table[rank, 0]), texts[rank], rank)
        if tokens is not None and (table[:, 1:3] != table[0, 1:3]).any():
            forms = [f"{TYPES[dtype]}".removeprefix("torch.") + f"[...][{hidden}]" for hidden, dtype in table[:, 1:3].tolist()]
            raise Error(MISMATCH, f"tokens: ranks have different types or sizes: {', '.join(forms)}")
        return table[:, 3:].t().contiguous()

    def dispatch(self, tokens: torch.Tensor, chosen: torch.Tensor, loads: torch.Tensor | None = None,
                 holders: Sequence[Sequence[int]] | None = None) -> Dispatched:
        """Sends each token to replicas of the experts that its gate chose. Collective, differentiable.

        Args:
            tokens: [tokens][hidden], of this rank.
            chosen: integers [tokens][choices], the experts, -1 for no choice.
            loads: result of loads(chosen, tokens), if it was called already.
            holders: [expert]: ranks that have the expert in this iteration, one replica each, from calibrate(). Default: those
                of the plan.

        Returns:
            The tokens that all ranks have sent to this rank.

        Raises:
            UsageError, MismatchError: on all ranks, if the arguments of any rank are invalid, or an expert with tokens has no
            replica. UsageError: materialise() was not called before, with `rematerialise`. TransferError: a rank is gone.

        Documentation: experts.md#tokens in shardwright.DOCS
        """
        if self.rematerialise and self._materialised is None:
            raise Error(USAGE, "dispatch: with rematerialise, call materialise() before each dispatch()")
        if loads is None:
            loads = self.loads(chosen, tokens)
        replicas = self._replicas if holders is None else _matrix(holders, self.plan)
        numbers = chosen.detach().to("cpu", torch.int64).contiguous()
        place, sent, received, arrange = compute("dispatch_plan", numbers, loads, replicas, self._node, self.rule,
                                                 self._ranks.rank)
        ranks = self.plan.holders(self.layer) if holders is None else holders
        mine = [expert for expert, held in enumerate(ranks) if self._ranks.rank in held]
        place, arrange = place.to(tokens.device), arrange.to(tokens.device)
        outgoing, incoming = sent.tolist(), received.sum(1).tolist()
        packed = compute("pack_tokens", tokens.contiguous(), place, None, sum(outgoing))
        thread = torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
        arrived, thread = _Exchange.apply(packed, thread, outgoing, incoming, self._ranks)
        rows = compute("pack_tokens", arrived, arrange, None, len(arrange))
        copies, self._materialised = self._materialised, None
        return Dispatched(rows, mine, received.sum(0)[mine].tolist(), place, arrange, outgoing, incoming, thread, copies)

    def combine(self, rows: torch.Tensor, dispatched: Dispatched, weights: torch.Tensor) -> torch.Tensor:
        """Sends the results of the experts back, and computes the weighted sum of each token. Collective, differentiable.

        With `rematerialise` it first frees the copies that materialise() has returned, and removes them from the returned dict.
        Do not use these tensors, or views of them, afterwards: that can crash the process.

        Args:
            rows: results in the order of dispatched.rows, [rows][any width].
            dispatched: the result of dispatch().
            weights: [tokens][choices].

        Returns:
            [tokens][width], added in float32 (float64 for float64 rows) in the order of the choices.

        Raises:
            UsageError: a wrong number of rows. TransferError: a rank is gone.

        Documentation: experts.md#tokens in shardwright.DOCS
        """
        if rows.dim() != 2 or rows.shape[0] != len(dispatched._arrange):
            raise Error(USAGE, f"rows: the {len(dispatched._arrange)} rows of dispatch expected, found shape {list(rows.shape)}")
        back = compute("unpack_tokens", rows.contiguous(), dispatched._arrange, None)
        thread = dispatched._thread
        if dispatched._copies is not None:
            back, thread = _Free.apply(self, dispatched._copies, back, thread)
        arrived, _ = _Exchange.apply(back, thread, dispatched._received, dispatched._sent, self._ranks)
        return compute("unpack_tokens", arrived, dispatched._place, weights.to(sum_type(rows.dtype)).contiguous())

    # Gradients of replicas

    def sum_gradients(self) -> None:
        """Adds the gradients of each expert over its replicas, in the order of ranks. Collective. Call it after backward().

        All replicas get the same bits. An expert without gradients gets zeros, except for frozen parameters. Only for plans in which all replicas have state.
        Raises TransferError if a rank is gone. Documentation: experts.md#gradients in shardwright.DOCS
        """
        gradients = {expert: [_gradient(one) for one in tensors] for expert, tensors in self.parameters.items()}
        state = self.plan.state(self.layer)
        self._sparse.reduce_scatter(gradients, self.owner, state)
        self._sparse.all_gather(gradients, self.owner, state)

    # Copies for an iteration

    def calibrate(self, loads: torch.Tensor, *, overlap: int, spare: int | Sequence[int], expert_bytes: int,
                  seconds_per_token: float, bytes_per_token: float = 0, bytes_per_s: float = 0) -> list[list[int]]:
        """Selects further copies of experts by their token counts: experts with most tokens first, if sending the copy costs less
        time than it saves. Local. Ranks that pass the same arguments get the same result.

        Args:
            loads: result of loads().
            overlap: largest number of experts that are copied.
            spare: number of experts of other ranks that fit into the memory of a rank: one number, or one for each rank.
            expert_bytes: size of the parameters of an expert.
            seconds_per_token: time to compute one token.
            bytes_per_token, bytes_per_s: size of a token, and speed of the network.

        Returns:
            [expert]: ranks that have the expert in this iteration, for prefetch() and dispatch().

        Raises:
            UsageError: an argument is out of range.

        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
        """
        found = call("calibrate", {
            "owner": self.owner, "planned": self.holders, "tokens": loads.sum(1).tolist(), "node": list(self.plan.node),
            "overlap": overlap, "spare": [spare] * self.plan.ranks if isinstance(spare, int) else list(spare),
            "cost": {"seconds_per_token": seconds_per_token, "bytes_per_token": bytes_per_token, "bytes_per_s": bytes_per_s,
                     "expert_bytes": expert_bytes}})
        return found["holders"]

    def prefetch(self, holders: Sequence[Sequence[int]] | None = None) -> Prefetched:
        """Starts to copy parameters from their owners to the other ranks of `holders`. Collective. Other layers can compute
        meanwhile.

        holders: result of calibrate(). Default: the ranks of the plan.
        Raises UsageError for invalid ranks and TransferError if a rank is gone.
        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
        """
        holders = self.holders if holders is None else holders
        mine = [expert for expert, ranks in enumerate(holders) if self._ranks.rank in ranks]
        held = {expert: [one.detach() for one in self.parameters[expert]] if expert in self.parameters
                else [torch.empty_like(one, requires_grad=False) for one in self._example] for expert in mine}
        copies = [one for expert in mine if expert not in self.parameters for one in held[expert]]
        work = self._sparse.all_gather(held, self.owner, holders, async_op=True)
        return Prefetched(held, holders, work, copies, self._versions())

    def _versions(self) -> list[int]:
        """Returns numbers that change when the parameters of this rank change."""
        return [one._version for tensors in self.parameters.values() for one in tensors]

    def _gather_again(self, copies: Sequence[torch.Tensor], prefetched: Prefetched) -> None:
        """Allocates freed copies and fills them with the parameters of their owners. Collective. Raises UsageError if parameters of
        this rank have changed since prefetch()."""
        if self._versions() != prefetched.versions:
            raise Error(USAGE, f"layer {self.layer}: expert parameters changed between prefetch() and backward(), so rematerialise "
                               "cannot gather the copies of the forward pass; call backward() before the optimizer step")
        for one in copies:
            one.untyped_storage().resize_(one.nbytes)
        rest = iter(copies)
        tensors = {expert: [one.detach() for one in self.parameters[expert]] if expert in self.parameters
                   else [next(rest) for _ in self._example] for expert in prefetched.held}
        self._sparse.all_gather(tensors, self.owner, prefetched.holders)

    def materialise(self, tokens: torch.Tensor, prefetched: Prefetched | None = None,
                    ) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
        """Waits for the copies of prefetch() and returns the parameters of all experts that this rank computes. Collective.

        The parameters are differentiable: backward() adds their gradients at their owners. For plans with one owner of each
        expert.

        Args:
            tokens: the layer's input. Pass the returned tokens to dispatch(), so that every rank takes part in backward().
            prefetched: result of prefetch(). Default: calls it. With `rematerialise` each result can be passed once.

        Returns:
            (tokens, {expert: its parameters}). With `rematerialise` the dict is valid until combine().

        Raises:
            UsageError: with `rematerialise`, the copies were used already. TransferError: a rank is gone.

        Documentation: experts.md#copies-for-an-iteration in shardwright.DOCS
        """
        prefetched = prefetched or self.prefetch()
        if self.rematerialise and prefetched.given is not None:
            raise Error(USAGE, "materialise: with rematerialise, call prefetch() for each materialise(): these copies were used already")
        prefetched.work.wait()
        experts = list(prefetched.held)
        owned = [one for expert in self.parameters for one in self.parameters[expert]]
        thread = torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
        tokens, *flat = _Materialise.apply(self, prefetched, tokens, thread, *owned)
        width = len(self._example)
        given = {expert: flat[i * width:(i + 1) * width] for i, expert in enumerate(experts)}
        if self.rematerialise:
            self._materialised, prefetched.given = prefetched, given
        return tokens, given


@dataclasses.dataclass
class Prefetched:
    """Copies of parameters in progress. Pass it to ReplicatedExperts.materialise.

    copies: the tensors of `held` that this rank does not own, by expert. versions: of the own parameters when copying began.
    given: with rematerialise, the dict that materialise() has returned.
    """

    held: dict[int, list[torch.Tensor]]
    holders: Sequence[Sequence[int]]
    work: Work
    copies: list[torch.Tensor]
    versions: list[int]
    given: dict[int, list[torch.Tensor]] | None = None


class _Exchange(torch.autograd.Function):
    """Sends rows to their ranks, and gradients back. The argument `thread` makes every rank take part in the backward pass, even
    without rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, thread: torch.Tensor, sent: list[int], received: list[int], ranks: Group) -> Any:
        ctx.swap = received, sent, ranks
        return _swap(rows, sent, received, ranks), thread.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, thread: torch.Tensor) -> Any:
        return _swap(rows.contiguous(), *ctx.swap), torch.zeros_like(thread), None, None, None


def _swap(rows: torch.Tensor, sent: list[int], received: list[int], ranks: Group) -> torch.Tensor:
    if ranks.size == 1:
        return rows.clone()
    out = rows.new_empty(sum(received), rows.shape[1])
    moving(lambda: dist.all_to_all_single(out, rows, received, sent, group=ranks.for_tensors(rows)))
    return out


class _Materialise(torch.autograd.Function):
    """Passes copied parameters to the layer, and adds their gradients at the owners in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: ReplicatedExperts, prefetched: Prefetched, tokens: torch.Tensor, thread: torch.Tensor,
                *owned: torch.Tensor) -> Any:
        ctx.layer, ctx.holders, ctx.experts = layer, prefetched.holders, list(prefetched.held)
        flat = [one.view_as(one) for tensors in prefetched.held.values() for one in tensors]
        if layer.rematerialise:
            ctx.save_for_backward(*prefetched.copies)
        return tokens.view_as(tokens), *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, tokens: torch.Tensor, *flat: torch.Tensor) -> Any:
        layer: ReplicatedExperts = ctx.layer
        width = len(layer._example)
        # Cloned, because the addition is in place and autograd may share gradients.
        summed = {expert: [one.clone(memory_format=torch.contiguous_format) for one in flat[i * width:(i + 1) * width]]
                  for i, expert in enumerate(ctx.experts)}
        _free(ctx.saved_tensors)
        layer._sparse.reduce_scatter(summed, layer.owner, ctx.holders)
        return None, None, tokens, None, *(one for expert in layer.parameters for one in summed[expert])


class _Free(torch.autograd.Function):
    """Frees copies after the forward pass of the experts, and gathers them again before their backward pass.

    Empties the storages of the copies, because autograd keeps the tensors that it has saved. The copies are saved tensors of this
    function, so that activation checkpointing, which repeats the forward pass, replaces them by the copies of the repetition. The
    argument `thread` makes every rank take part in the backward pass, even without rows."""

    @staticmethod
    def forward(ctx: Any, layer: ReplicatedExperts, prefetched: Prefetched, rows: torch.Tensor, thread: torch.Tensor) -> Any:
        ctx.layer, ctx.prefetched = layer, prefetched
        ctx.save_for_backward(*prefetched.copies)
        if prefetched.given is not None:
            prefetched.given.clear()
        _free(prefetched.copies)
        return rows.view_as(rows), thread.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, thread: torch.Tensor) -> Any:
        ctx.layer._gather_again(ctx.saved_tensors, ctx.prefetched)
        return None, None, rows, torch.zeros_like(thread)


def _free(tensors: Sequence[torch.Tensor]) -> None:
    for one in tensors:
        one.untyped_storage().resize_(0)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a parameter. Creates zeros if it has none. Those of a frozen parameter are not assigned: optimizers
    would apply their weight decay to it."""
    if parameter.grad is not None:
        return parameter.grad
    zeros = torch.zeros_like(parameter)
    if parameter.requires_grad:
        parameter.grad = zeros
    return zeros


def _matrix(holders: Sequence[Sequence[int]], plan: ExpertPlan) -> torch.Tensor:
    """Converts the ranks of each expert to numbers of replicas, [expert][rank]. Raises UsageError."""
    if len(holders) != plan.experts:
        raise Error(USAGE, f"holders: lists for {len(holders)} experts, but the plan has {plan.experts}")
    replicas = torch.zeros(plan.experts, plan.ranks, dtype=torch.int64, device="cpu")
    for expert, ranks in enumerate(holders):
        for rank in ranks:
            if not 0 <= rank < plan.ranks:
                raise Error(USAGE, f"holders: expert {expert}: a rank below {plan.ranks} expected, found {rank}")
            replicas[expert, rank] = 1
    return replicas


def _check_tokens(tokens: torch.Tensor, chosen: torch.Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[0] != chosen.shape[0]:
        raise Error(USAGE, f"tokens: [{chosen.shape[0]}][hidden] expected, as many as gate decisions, found shape "
                           f"{list(tokens.shape)}")
    if tokens.dtype not in TYPES:
        raise Error(USAGE, f"tokens: float64, float32, float16 or bfloat16 expected, found {tokens.dtype}")
    if tokens.device != chosen.device:
        raise Error(USAGE, f"tokens: are on device {tokens.device}, but the gate's decisions are on {chosen.device}")
