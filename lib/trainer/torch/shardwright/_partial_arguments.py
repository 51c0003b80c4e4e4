# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of shardwright.PartialCheckpoints."""

from __future__ import annotations

import re
from typing import Any

from ._deepspeed import DeepSpeedTrainer
from ._errors import UNSUPPORTED, USAGE, Error
from ._tokens import Counts

OLDEST = (0, 19, 3)  # oldest DeepSpeed version: expert files of older ones lack positions


def check_arguments(engine: Any, asks: dict[str, Any], counts: Counts) -> bool:
    """Raises UnsupportedError or UsageError for engines and arguments that are not supported. Returns whether tensors are copied
    while training continues."""
    DeepSpeedTrainer(engine)  # raises for engines that it does not support
    if engine.zero_optimization_stage() not in (1, 2):
        raise Error(UNSUPPORTED, f"DeepSpeed stage {engine.zero_optimization_stage()}: snapshots of experts require "
                                 "stage 1, stage 2 or BF16_Optimizer")
    if not counts.layers:
        raise Error(UNSUPPORTED, "the model has no DeepSpeed MoE layers, so it has no experts to save")
    import deepspeed
    version = tuple(int(number) for number in re.findall(r"\d+", deepspeed.__version__)[:3])
    if version < OLDEST:
        raise Error(UNSUPPORTED, f"DeepSpeed {deepspeed.__version__}: {'.'.join(map(str, OLDEST))} or newer is needed")
    if not isinstance(asks["every"], int) or asks["every"] < 1:
        raise Error(USAGE, f"every={asks['every']}: one or more steps expected")
    hooks = hasattr(DeepSpeedTrainer(engine).base, "register_step_pre_hook")
    if asks["overlap"] and not hooks:
        raise Error(UNSUPPORTED, f"overlap=True: optimizer {type(DeepSpeedTrainer(engine).base).__name__} has no hooks before its steps")
    if asks["k"] is not None and (not isinstance(asks["k"], int) or asks["k"] < 1):
        raise Error(USAGE, f"k={asks['k']}: one or more experts expected, or None")
    if asks["k"] is not None and asks["k"] > min(counts.shape):
        raise Error(USAGE, f"k={asks['k']}: a MoE layer of the model has only {min(counts.shape)} experts")
    if asks["overlap"] is None:
        return hooks and any(not param.is_cpu for param in engine.module.parameters())
    return bool(asks["overlap"])


def check_equal(told: list[dict[str, Any]]) -> None:
    """Raises UsageError if ranks pass different arguments."""
    for rank, asks in enumerate(told):
        for key, value in told[0].items():
            if asks[key] != value:
                raise Error(USAGE, f"{key}: rank 0 passes {value}, rank {rank} passes {asks[key]}")
