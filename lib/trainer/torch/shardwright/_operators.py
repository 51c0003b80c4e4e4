# SPDX-License-Identifier: Apache-2.0
"""Registers derivatives and shape functions for the operators of torch.ops.shardwright, and implementations for other devices
than the CPU, which are composed of PyTorch operators."""

from __future__ import annotations

from typing import Any

import torch


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of weights and accumulators for tokens of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack_composite(tokens: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, rows: int) -> torch.Tensor:
    choices = place.shape[1]
    values = tokens.repeat_interleave(choices, 0)
    if weights is not None:
        values = (values.to(weights.dtype) * weights.reshape(-1, 1)).to(tokens.dtype)
    out = tokens.new_zeros(rows + 1, tokens.shape[1])  # the last row collects choices without a row, and is dropped
    return out.index_copy_(0, torch.where(place < 0, rows, place).reshape(-1), values)[:rows]


def unpack_composite(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    last = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    at = torch.where(place < 0, rows.shape[0], place)
    total = None
    for choice in range(place.shape[1]):  # in the order of the CPU implementation
        part = last.index_select(0, at[:, choice]).to(sum_type(rows.dtype))
        if weights is not None:
            part = part * weights[:, choice:choice + 1]
        total = part if total is None else total + part
    return rows.new_zeros(place.shape[0], rows.shape[1]) if total is None else total.to(rows.dtype)


def dots_composite(rows: torch.Tensor, tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    last = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).to(sum_type(rows.dtype))
    at = torch.where(place < 0, rows.shape[0], place)
    return torch.einsum("tkh,th->tk", last[at], tokens.to(last.dtype))


def sum_composite(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].to(sum_type(parts.dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _save(ctx: Any, place: torch.Tensor, weights: torch.Tensor | None, value: torch.Tensor) -> None:
    ctx.weighted = weights is not None
    ctx.save_for_backward(place, value, *([weights] if weights is not None else []))


def _saved(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns what _save has saved: place, value, weights."""
    place, value, *weights = ctx.saved_tensors
    return place, value, weights[0] if ctx.weighted else None


def _pack_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    tokens, place, weights, ctx.rows = inputs
    _save(ctx, place, weights, tokens)


def _pack_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    place, tokens, weights = _saved(ctx)
    of_tokens = of_weights = None
    gradient = gradient.contiguous()
    if ctx.needs_input_grad[0]:
        of_tokens = torch.ops.shardwright.unpack_tokens(gradient, place, weights)
    if ctx.weighted and ctx.needs_input_grad[2]:
        of_weights = torch.ops.shardwright.token_dots(gradient, tokens, place)
    return of_tokens, None, of_weights, None


def _unpack_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, place, weights = inputs
    _save(ctx, place, weights, rows)


def _unpack_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    place, rows, weights = _saved(ctx)
    of_rows = of_weights = None
    gradient = gradient.contiguous()
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.shardwright.pack_tokens(gradient, place, weights, rows.shape[0])
    if ctx.weighted and ctx.needs_input_grad[2]:
        of_weights = torch.ops.shardwright.token_dots(rows, gradient, place)
    return of_rows, None, of_weights


def _dots_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, tokens, place = inputs
    ctx.save_for_backward(rows, tokens, place)


def _dots_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    rows, tokens, place = ctx.saved_tensors
    of_rows = of_tokens = None
    gradient = gradient.contiguous()
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.shardwright.pack_tokens(tokens, place, gradient, rows.shape[0])
    if ctx.needs_input_grad[1]:
        of_tokens = torch.ops.shardwright.unpack_tokens(rows, place, gradient)
    return of_rows, of_tokens, None


def _plan_without_data(chosen: torch.Tensor, tokens: torch.Tensor, replicas: torch.Tensor, node: torch.Tensor, rule: str,
                       rank: int) -> Any:
    received = torch.library.get_ctx().new_dynamic_size()
    return (torch.empty_like(chosen), chosen.new_empty(replicas.shape[1]),
            chosen.new_empty(replicas.shape[1], replicas.shape[0]), chosen.new_empty(received, 1))


def register() -> None:
    """Registers everything. Call it once, after the library was loaded."""
    library = torch.library
    for name, backward, setup in (("pack_tokens", _pack_backward, _pack_setup), ("unpack_tokens", _unpack_backward, _unpack_setup),
                                  ("token_dots", _dots_backward, _dots_setup)):
        library.register_autograd(f"shardwright::{name}", backward, setup_context=setup)
    for name, shaped in (
            ("pack_tokens", lambda tokens, place, weights, rows: tokens.new_empty(rows, tokens.shape[1])),
            ("unpack_tokens", lambda rows, place, weights: rows.new_empty(place.shape[0], rows.shape[1])),
            ("token_dots", lambda rows, tokens, place: rows.new_empty(place.shape, dtype=sum_type(rows.dtype))),
            ("sum_parts", lambda parts: parts.new_empty(parts.shape[1])),
            ("extra_capacity", lambda tokens, capacity, debt, devices: tokens.new_empty(tokens.shape)),
            ("count_experts", lambda chosen, experts: chosen.new_empty(experts)),
            ("dispatch_plan", _plan_without_data)):
        library.register_fake(f"shardwright::{name}", shaped)
    here = torch.accelerator.current_accelerator()
    for device in {"cuda", here.type} if here is not None else {"cuda"}:
        for name, composite in (("pack_tokens", pack_composite), ("unpack_tokens", unpack_composite),
                                ("token_dots", dots_composite), ("sum_parts", sum_composite)):
            library.register_kernel(f"shardwright::{name}", device, composite)
