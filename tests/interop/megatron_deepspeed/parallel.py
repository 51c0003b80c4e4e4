# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel layers as Megatron-DeepSpeed has them, without its CUDA kernels.

Every parameter has an attribute `cut`: the way in which tensor-parallel ranks share it. Initial values depend on the
seed, the parameter's number within its layer and its whole shape, so that they are the same in every layout.
"""

import torch
import torch.distributed as dist
from torch import nn

REPLICATED, ROWS, COLUMNS, HALVES = "replicated", "rows", "columns", "halves"


class Ranks:
    """The tensor-parallel group of this rank; `topology` is DeepSpeed's."""

    rank, size, group = 0, 1, None

    @classmethod
    def initialize(cls, topology):
        """Collective over all ranks."""
        cls.size = topology.get_dim("model")
        for members in topology.get_axis_comm_lists("model"):
            group = dist.new_group(members)
            if dist.get_rank() in members:
                cls.group, cls.rank = group, members.index(dist.get_rank())


class CopyToRanks(torch.autograd.Function):
    """Identity; the gradients of the ranks are added."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, grad):
        return added(grad)


class AddOverRanks(torch.autograd.Function):
    """The sum over the ranks; gradients pass unchanged."""

    @staticmethod
    def forward(_, x):
        return added(x)

    @staticmethod
    def backward(_, grad):
        return grad


def added(x):
    if Ranks.size == 1:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x, group=Ranks.group)
    return x


def own_piece(whole, cut, rank=None, size=None):
    """The piece of a whole tensor that a rank holds."""
    rank, size = (Ranks.rank, Ranks.size) if size is None else (rank, size)
    if cut == REPLICATED:
        return whole
    if cut == HALVES:  # gate and up of SwiGLU, each cut for itself
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, 1 if cut == COLUMNS else 0)[rank]


def joined(pieces, cut):
    """Inverse of own_piece, for the pieces of all ranks."""
    if cut == REPLICATED:
        return pieces[0]
    if cut == HALVES:
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(pieces, 1 if cut == COLUMNS else 0)


def parameter(whole, cut, dtype):
    weight = nn.Parameter(own_piece(whole, cut).to(dtype).clone().contiguous())
    weight.cut = cut
    weight.tensor_model_parallel = cut != REPLICATED  # DeepSpeed's gradient norm counts the others on one rank only
    return weight


def drawn(shape, seed):
    """Whole initial values. Rows are drawn one after the other, so that padding does not change those before it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.15


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, seed, dtype, cut=ROWS):
        super().__init__()
        self.weight = parameter(drawn((outputs, inputs), seed), cut, dtype)
        self.bias = parameter(drawn((outputs,), seed + 1), cut, dtype)

    def forward(self, x):
        return nn.functional.linear(CopyToRanks.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, seed, dtype):
        super().__init__()
        self.weight = parameter(drawn((outputs, inputs), seed), COLUMNS, dtype)
        self.bias = parameter(drawn((outputs,), seed + 1), REPLICATED, dtype)

    def forward(self, x):
        return AddOverRanks.apply(nn.functional.linear(x, self.weight)) + self.bias


class LayerNorm(nn.Module):
    """One on all ranks. `spread` makes the ranks' weights differ, as rounding did in BLOOM's training."""

    def __init__(self, width, seed, dtype, spread=0.0):
        super().__init__()
        self.weight = parameter(1 + drawn((width,), seed), REPLICATED, dtype)
        self.bias = parameter(drawn((width,), seed + 1), REPLICATED, dtype)
        with torch.no_grad():
            self.weight += spread * Ranks.rank

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


class VocabParallelEmbedding(nn.Module):
    """A rank has some rows; BLOOM has a layer norm behind it."""

    def __init__(self, rows, width, seed, dtype, norm):
        super().__init__()
        self.weight = parameter(drawn((rows, width), seed), ROWS, dtype)
        if norm:
            self.norm = LayerNorm(width, seed + 1, dtype)

    def forward(self, tokens):
        rows = self.weight.shape[0]
        at = tokens - rows * Ranks.rank
        elsewhere = (at < 0) | (at >= rows)
        x = nn.functional.embedding(at.masked_fill(elsewhere, 0), self.weight)
        x = AddOverRanks.apply(x.masked_fill(elsewhere.unsqueeze(-1), 0))
        return self.norm(x) if hasattr(self, "norm") else x


def parallel_logits(x, weight):
    """The logits of this rank's rows of the vocabulary."""
    return nn.functional.linear(CopyToRanks.apply(x), weight)


def parallel_cross_entropy(logits, labels, rows):
    """Mean loss of logits that the ranks share. Rows of the vocabulary from `rows` on are padding: not None masks them."""
    logits = logits.float()
    first = logits.shape[-1] * Ranks.rank
    if rows is not None:
        number = first + torch.arange(logits.shape[-1])
        logits = logits.masked_fill(number >= rows, float("-inf"))
    top = logits.detach().amax(-1)
    if Ranks.size > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=Ranks.group)
    logits = logits - top.unsqueeze(-1)
    total = AddOverRanks.apply(logits.exp().sum(-1))
    at = labels - first
    elsewhere = (at < 0) | (at >= logits.shape[-1])
    mine = logits.gather(-1, at.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    label = AddOverRanks.apply(mine.masked_fill(elsewhere, 0))
    return (total.log() - label).mean()
