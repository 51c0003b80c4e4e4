# SPDX-License-Identifier: Apache-2.0
"""Finds DeepSpeed engines and optimizers in this process that train the parameters of a model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._errors import USAGE, Error


def _owner(kind: type, parameters_of: Callable[[Any], Iterable[torch.Tensor]], model: torch.nn.Module) -> str | None:
    """Returns the class name of an object of this kind that has a parameter of the model, None if there is no such object."""
    mine = {id(param) for param in model.parameters()}

    def search() -> str | None:
        for one in gc.get_objects():
            if issubclass(type(one), kind) and any(id(param) in mine for param in parameters_of(one)):
                return type(one).__name__
        return None

    if search() is None:
        return None
    gc.collect()  # ignores owners that only a reference cycle keeps
    return search()


def _of_engine(engine: Any) -> Iterable[torch.Tensor]:
    module = getattr(engine, "module", None)
    return module.parameters() if isinstance(module, torch.nn.Module) else ()


def _of_optimizer(optimizer: Any) -> Iterable[torch.Tensor]:
    return (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])


def refuse_engine_parameters(model: torch.nn.Module) -> None:
    """Raises UsageError for a model that a DeepSpeed engine trains: the model does not expose the engine's master weights."""
    found = any(getattr(param, "_hp_mapping", None) is not None or hasattr(param, "ds_id") for param in model.parameters())
    deepspeed = sys.modules.get("deepspeed")
    if not found and hasattr(deepspeed, "DeepSpeedEngine"):
        found = _owner(deepspeed.DeepSpeedEngine, _of_engine, model) is not None
    if found:
        raise Error(USAGE, f"{type(model).__name__}: its parameters belong to a DeepSpeed engine, and its master weights and "
                           "optimizer states would keep other values: pass the engine, load(engine, source)")


def refuse_forgotten_optimizer(model: torch.nn.Module) -> None:
    """Raises UsageError for a sharded model (FSDP2, tensor parallelism) without its optimizer, if an optimizer has its
    parameters."""
    if not any(hasattr(param, "device_mesh") for param in model.parameters()):
        return
    found = _owner(torch.optim.Optimizer, _of_optimizer, model)
    if found is not None:
        raise Error(USAGE, f"{type(model).__name__}: its sharded parameters belong to an optimizer, {found}, that was not passed: pass "
                           "(model, optimizer), or (model, None) to load weights alone")
