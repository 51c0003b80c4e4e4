# SPDX-License-Identifier: Apache-2.0
"""PyTorch optimizers: creates their state before the first step, sets step counts and hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error

STEP = "step"
# Options that select how an optimizer computes. A load keeps the program's values.
OWN_CHOICES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", STEP}


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state of all parameters that have none, as the first step does. The parameters do not change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    without = [param for param in params if param.requires_grad and param.numel() and not optimizer.state.get(param)]
    if not without:
        return
    grads = [param.grad for param in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        new = {id(param) for param in without}
        for param in params:
            param.grad = torch.zeros_like(param) if id(param) in new else None
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        with torch.no_grad():
            optimizer.step()
    finally:
        for param, grad in zip(params, grads):
            param.grad = grad
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
    for param in without:
        set_step(optimizer.state[param], 0)


def states_of(state: dict[str, Any], shape: torch.Size, what: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of each tensor of an optimizer state. Raises UnsupportedError for a shape other than the parameter's."""
    for key, value in state.items():
        if key == STEP or not isinstance(value, torch.Tensor):
            continue
        if value.shape != shape:
            raise Error(UNSUPPORTED, f"{what}: optimizer state {key} has shape {tuple(value.shape)}, but its parameter has "
                                     f"{tuple(shape)}")
        yield key, value


def set_step(state: dict[str, Any], step: float) -> None:
    """Sets the step count in an optimizer state, in place and with the type that it has there."""
    kept = state.get(STEP)
    if isinstance(kept, torch.Tensor):
        kept.fill_(step)
    elif kept is not None:
        state[STEP] = type(kept)(step)


class SavedOptimizer:
    """Step counts and hyper-parameters of a checkpoint, by parameter name.

    answer: result of the library's "load". value_of: converts its plain values.
    """

    def __init__(self, answer: dict[str, Any], value_of: Callable[[Any], Any]) -> None:
        self._holders: dict[str, str] = answer["holders"]
        self._steps: dict[str, float] = answer["steps"]
        self._options: dict[str, dict[str, Any]] = {}
        for group in answer["groups"]:
            options = value_of(group["options"])
            for name in group["params"]:
                self._options[self._holder(name)] = options

    def _holder(self, name: str) -> str:
        return self._holders.get(name, name)

    def step(self, names: Iterable[str]) -> float | None:
        """Returns the step count that these parameters share, None if the checkpoint has none. Raises UnsupportedError if their
        counts differ."""
        steps = {self._steps[self._holder(name)] for name in names if self._holder(name) in self._steps}
        if len(steps) > 1:
            raise Error(UNSUPPORTED, f"parameters of one flat group have different step counts: {sorted(steps)}")
        return steps.pop() if steps else None

    def set_group(self, group: dict[str, Any], names: Iterable[str]) -> None:
        """Sets the hyper-parameters of an optimizer group with these parameters. Ignores options that the group does not have."""
        names = list(names)
        options = next((self._options[self._holder(name)] for name in names if self._holder(name) in self._options), {})
        for key, value in options.items():
            if key in OWN_CHOICES or key not in group:
                continue
            kept = group[key]
            if isinstance(kept, torch.Tensor) and isinstance(value, (int, float)) and math.isfinite(value):
                kept.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(kept, tuple) and isinstance(value, list) else value
        if STEP in group:
            step = self.step(names)
            if step is not None:
                set_step(group, step)
