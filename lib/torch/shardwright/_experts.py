"""Layers of replicated experts: tokens to the replicas of a plan and back, parameters to copies, gradients together."""

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
    """What dispatch() has brought to this rank.

    rows: tokens, [rows][hidden], by expert and then by sender; differentiable.
    experts: this rank's, ascending.
    sizes: rows of each of them, zeros included.
    """

    rows: torch.Tensor
    experts: list[int]
    sizes: list[int]
    _place: torch.Tensor
    _arrange: torch.Tensor
    _sent: list[int]
    _received: list[int]
    _thread: torch.Tensor

    def by_expert(self) -> list[tuple[int, torch.Tensor]]:
        """(expert, its rows) for all experts of this rank."""
        return list(zip(self.experts, self.rows.split(self.sizes)))


class ReplicatedExperts:
    """A layer of experts that live where a plan says.

    plan: of moe-replace, as ExpertPlan.read has it, for the ranks of the group.
    layer: its number in the plan.
    parameters: this rank's: {expert: its tensors}, in an order and with shapes that all experts have alike; of the experts
        whose state it holds.
    rule: how tokens are shared among replicas. "capacity": equal shares for all replicas, own tokens first; "proportional":
        the same, what is left over in proportion to the room of the others; "topology": the rank itself, else its node,
        else all.

    Collective, as all methods but those that say otherwise. Every rank has to call backward() alike.
    """

    def __init__(self, plan: ExpertPlan, layer: int, parameters: Mapping[int, Sequence[torch.Tensor]], group: Any = None,
                 rule: str = "capacity") -> None:
        self._ranks = Group(group)
        self.plan, self.layer, self.rule = plan, layer, rule
        self.parameters = {expert: list(tensors) for expert, tensors in sorted(parameters.items())}

        def check() -> tuple[Any, ...]:
            if plan.ranks != self._ranks.size:
                raise Error(MISMATCH, f"{plan.path}: a plan for {plan.ranks} ranks, the group has {self._ranks.size}")
            if rule not in RULES:
                raise Error(USAGE, f'rule: {", ".join(RULES)} expected, found "{rule}"')
            self.holders, self.owner, state = plan.holders(layer), plan.owner(layer), plan.state(layer)
            mine = [expert for expert, ranks in enumerate(state) if self._ranks.rank in ranks]
            if list(self.parameters) != mine:
                raise Error(USAGE, f"{plan.path}: layer {layer}: rank {self._ranks.rank} holds experts {mine}, parameters of "
                                   f"{list(self.parameters)} are given")
            return plan.digest, layer, rule, next(iter(self.parameters.values()), None) is not None

        told = moving(lambda: self._ranks.agree(check))
        for rank, other in enumerate(told):
            if other[:3] != told[0][:3]:
                raise Error(MISMATCH, f"rank {rank} has plan {other[0][:16]} layer {other[1]} rule {other[2]}, rank 0 plan "
                                      f"{told[0][0][:16]} layer {told[0][1]} rule {told[0][2]}")
            if not other[3]:
                raise Error(USAGE, f"{plan.path}: layer {layer}: rank {rank} holds no expert: it cannot tell their form")
        self._example = next(iter(self.parameters.values()))
        self._sparse = SparseCollectives(self._example, self._ranks)
        self._replicas = torch.zeros(plan.experts, plan.ranks, dtype=torch.int64, device="cpu")
        for rank, slots in enumerate(plan.slots[plan.row(layer)]):
            for expert in slots:
                self._replicas[expert, rank] += 1
        self._node = torch.tensor(plan.node, dtype=torch.int64, device="cpu")

    def close(self) -> None:
        """Gives back what the object has made of the process group."""
        self._ranks.close()

    # Tokens

    def loads(self, chosen: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """[expert][rank]: how many tokens each rank has for each expert.

        chosen: this rank's gate decisions, [tokens][choices], -1 for none.
        Raises, on all ranks, what is wrong on any of them.
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
            said = moving(lambda: self._ranks.gather(None if failed is None else str(failed)))
            rank = next(rank for rank, text in enumerate(said) if text is not None)
            raise Error(int(table[rank, 0]), said[rank], rank)
        if tokens is not None and (table[:, 1:3] != table[0, 1:3]).any():
            forms = [f"{TYPES[dtype]}".removeprefix("torch.") + f"[...][{hidden}]" for hidden, dtype in table[:, 1:3].tolist()]
            raise Error(MISMATCH, f"tokens: ranks have {', '.join(forms)}")
        return table[:, 3:].t().contiguous()

    def dispatch(self, tokens: torch.Tensor, chosen: torch.Tensor, loads: torch.Tensor | None = None,
                 holders: Sequence[Sequence[int]] | None = None) -> Dispatched:
        """Sends each token to replicas of the experts that its gate chose.

        tokens: [tokens][hidden], on this rank.
        chosen: [tokens][choices]: experts, -1 for none.
        loads: of loads(chosen, tokens), where that was called already.
        holders: [expert]: ranks that hold it for this iteration, as calibrate() has them; default the plan's. One replica each.
        Raises Error where an expert with tokens has no replica, on all ranks.
        """
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
        return Dispatched(rows, mine, received.sum(0)[mine].tolist(), place, arrange, outgoing, incoming, thread)

    def combine(self, rows: torch.Tensor, dispatched: Dispatched, weights: torch.Tensor) -> torch.Tensor:
        """Sends what experts made of the rows back, and sums each token's by weight.

        rows: in the order of dispatched.rows, [rows][any width].
        weights: [tokens][choices]
        Returns [tokens][width], summed in float32 (float64 for float64) in the order of the choices.
        """
        if rows.dim() != 2 or rows.shape[0] != len(dispatched._arrange):
            raise Error(USAGE, f"rows: {len(dispatched._arrange)} expected, as of dispatch, found shape {list(rows.shape)}")
        back = compute("unpack_tokens", rows.contiguous(), dispatched._arrange, None)
        arrived, _ = _Exchange.apply(back, dispatched._thread, dispatched._received, dispatched._sent, self._ranks)
        return compute("unpack_tokens", arrived, dispatched._place, weights.to(sum_type(rows.dtype)).contiguous())

    # Gradients of replicas

    def sum_gradients(self) -> None:
        """After backward(): the gradients of every expert summed over its replicas, in the order of ranks, the same bits on
        all of them; zeros where no rank has one. For plans whose replicas all have state."""
        gradients = {expert: [_gradient(one) for one in tensors] for expert, tensors in self.parameters.items()}
        state = self.plan.state(self.layer)
        self._sparse.reduce_scatter(gradients, self.owner, state)
        self._sparse.all_gather(gradients, self.owner, state)

    # Copies for an iteration

    def calibrate(self, loads: torch.Tensor, *, overlap: int, spare: int | Sequence[int], expert_bytes: int,
                  seconds_per_token: float, bytes_per_token: float = 0, bytes_per_s: float = 0) -> list[list[int]]:
        """Who is to hold which expert now that the loads are known: further copies, hottest experts first, where sending them
        costs less than they save. Local, the same on all ranks that give the same.

        loads: of loads().
        overlap, spare: experts that are copied at most, and foreign ones that a rank has room for.
        expert_bytes: parameters of an expert; the others: what computing and sending a token costs.
        """
        found = call("calibrate", {
            "owner": self.owner, "planned": self.holders, "tokens": loads.sum(1).tolist(), "node": list(self.plan.node),
            "overlap": overlap, "spare": [spare] * self.plan.ranks if isinstance(spare, int) else list(spare),
            "cost": {"seconds_per_token": seconds_per_token, "bytes_per_token": bytes_per_token, "bytes_per_s": bytes_per_s,
                     "expert_bytes": expert_bytes}})
        return found["holders"]

    def prefetch(self, holders: Sequence[Sequence[int]] | None = None) -> Prefetched:
        """Begins to copy parameters from their owners to the other holders; other layers may compute meanwhile."""
        holders = self.holders if holders is None else holders
        mine = [expert for expert, ranks in enumerate(holders) if self._ranks.rank in ranks]
        held = {expert: [one.detach() for one in self.parameters[expert]] if expert in self.parameters
                else [torch.empty_like(one, requires_grad=False) for one in self._example] for expert in mine}
        return Prefetched(held, holders, self._sparse.all_gather(held, self.owner, holders, async_op=True))

    def materialise(self, tokens: torch.Tensor, prefetched: Prefetched | None = None,
                    ) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
        """The parameters of all experts that this rank computes in this iteration, copies among them, differentiable:
        backward() sums their gradients at their owners. And the tokens, which have to pass through here, before dispatch(),
        so that every rank takes part in that. For plans with one owner of each expert."""
        prefetched = prefetched or self.prefetch()
        prefetched.work.wait()
        experts = list(prefetched.held)
        owned = [one for expert in self.parameters for one in self.parameters[expert]]
        thread = torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
        tokens, *flat = _Materialise.apply(self, prefetched, tokens, thread, *owned)
        width = len(self._example)
        return tokens, {expert: flat[i * width:(i + 1) * width] for i, expert in enumerate(experts)}


@dataclasses.dataclass
class Prefetched:
    """Parameters that are on their way."""

    held: dict[int, list[torch.Tensor]]
    holders: Sequence[Sequence[int]]
    work: Work


class _Exchange(torch.autograd.Function):
    """Rows to their ranks, and gradients back. The thread is what makes every rank take part in the backward pass, also
    one without rows."""

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
    @staticmethod
    def forward(ctx: Any, layer: ReplicatedExperts, prefetched: Prefetched, tokens: torch.Tensor, thread: torch.Tensor,
                *owned: torch.Tensor) -> Any:
        ctx.layer, ctx.holders, ctx.experts = layer, prefetched.holders, list(prefetched.held)
        flat = [one.view_as(one) for tensors in prefetched.held.values() for one in tensors]
        return tokens.view_as(tokens), *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, tokens: torch.Tensor, *flat: torch.Tensor) -> Any:
        layer: ReplicatedExperts = ctx.layer
        width = len(layer._example)
        # Copies: gradients of the engine may be shared, and are summed in place here.
        summed = {expert: [one.clone(memory_format=torch.contiguous_format) for one in flat[i * width:(i + 1) * width]]
                  for i, expert in enumerate(ctx.experts)}
        layer._sparse.reduce_scatter(summed, layer.owner, ctx.holders)
        return None, None, tokens, None, *(one for expert in layer.parameters for one in summed[expert])


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _matrix(holders: Sequence[Sequence[int]], plan: ExpertPlan) -> torch.Tensor:
    if len(holders) != plan.experts:
        raise Error(USAGE, f"holders: of {len(holders)} experts, the plan has {plan.experts}")
    replicas = torch.zeros(plan.experts, plan.ranks, dtype=torch.int64, device="cpu")
    for expert, ranks in enumerate(holders):
        for rank in ranks:
            if not 0 <= rank < plan.ranks:
                raise Error(USAGE, f"holders: expert {expert}: rank {rank} of {plan.ranks}")
            replicas[expert, rank] = 1
    return replicas


def _check_tokens(tokens: torch.Tensor, chosen: torch.Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[0] != chosen.shape[0]:
        raise Error(USAGE, f"tokens: [{chosen.shape[0]}][hidden] expected, as many as gate decisions, found shape "
                           f"{list(tokens.shape)}")
    if tokens.dtype not in TYPES:
        raise Error(USAGE, f"tokens: float64, float32, float16 or bfloat16 expected, found {tokens.dtype}")
    if tokens.device != chosen.device:
        raise Error(USAGE, f"tokens: on device {tokens.device}, the gate's decisions on {chosen.device}")
