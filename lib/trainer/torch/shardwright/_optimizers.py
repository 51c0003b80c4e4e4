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
OWN_CHOICES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "amsgrad", "centered",
               "decoupled_weight_decay", STEP}


def materialise(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Creates the state of all parameters that have none, as the first step does. The parameters do not change. Returns those
    parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    without = [param for param in params if param.requires_grad and param.numel() and not optimizer.state.get(param)]
    if not without:
        return []
    grads = [param.grad for param in params]
    kept = [{key: group[key] for key in ("lr", "weight_decay") if key in group} for group in optimizer.param_groups]
    try:
        new = {id(param) for param in without}
        for param in params:
            param.grad = torch.zeros_like(param) if id(param) in new else None
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            if "weight_decay" in group:  # a decay would be in the momenta
                group["weight_decay"] = 0.0
        with torch.no_grad():
            optimizer.step()
    finally:
        for param, grad in zip(params, grads):
            param.grad = grad
        for group, options in zip(optimizer.param_groups, kept):
            group.update(options)
    for param in without:
        set_step(optimizer.state[param], 0)
    return without


def forget(optimizer: torch.optim.Optimizer, created: Iterable[torch.Tensor]) -> None:
    """Removes the states that materialise() has created: zeros differ from no state in the first step."""
    for param in created:
        optimizer.state.pop(param, None)


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

    def set_group(self, group: dict[str, Any], names: Iterable[str]) -> list[str]:
        """Sets the hyper-parameters of an optimizer group with these parameters. Ignores options that the group does not have.

        Returns those for which the parameters have different values in the checkpoint. They are unchanged.
        """
        names = [name for name in names if self._holder(name) in self._options]
        found = [self._options[self._holder(name)] for name in names]
        differ = []
        for key, value in found[0].items() if found else ():
            if key in OWN_CHOICES or key not in group:
                continue
            other = next((number for number, options in enumerate(found) if options.get(key) != value), None)
            if other is not None:
                differ.append(f'{key} of an optimizer group: the checkpoint has {value} for "{names[0]}", {found[other].get(key)} '
                              f'for "{names[other]}"; {group[key]} is used')
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
        return differ
