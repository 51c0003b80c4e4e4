# SPDX-License-Identifier: Apache-2.0
"""Types of the public signatures. Neither DeepSpeed nor PyTorch is imported here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional, Protocol, Tuple, TypedDict, Union

if TYPE_CHECKING:
    import torch


class DeepSpeedEngine(Protocol):
    """The part of a DeepSpeed engine that identifies it. `deepspeed.initialize` returns an object that has it."""

    global_steps: int

    @property
    def module(self) -> torch.nn.Module: ...

    def zero_optimization_stage(self) -> int: ...


# The alternatives are quoted so that this module does not import PyTorch.
Trainer = Union[DeepSpeedEngine, "torch.nn.Module", Tuple["torch.nn.Module", Optional["torch.optim.Optimizer"]]]
Path = Union[str, "os.PathLike[str]"]
Source = Union[Path, Sequence[Path]]
User = Union[int, str]
TokenCounts = Union["torch.Tensor", Sequence[Union["torch.Tensor", Sequence[int]]]]  # [MoE layer][expert]
ClientState = Mapping[str, object]


class Loss(TypedDict, total=False):
    """Tokens that a restore lost, as in the report of pec-restore."""

    lost: list[int]  # [MoE layer]
    lost_by_expert: list[list[int]]  # [MoE layer][expert]


class Restored(TypedDict, total=False):
    """Result of a restore from a store, as `pec-restore --json` reports it. It has further keys."""

    iteration: Optional[int]  # None: the store has no checkpoint yet
    versions: dict[str, int]  # iteration of each expert, by module name
    loss: Optional[Loss]  # None: no tokens were counted


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load` that `PartialCheckpoints.load` passes on."""

    strict: bool
    verify: bool
    threads: Optional[int]
    memory: Union[int, str]
    maps: Sequence[str]
    map_sizes: str
    patterns: Sequence[str]
    weights_of: str
    group: Optional[torch.distributed.ProcessGroup]
    agents: Sequence[str]
    trust_user: Optional[User]
    lost_unreachable: bool
    at: Optional[int]
    read_only: bool
    begin: bool
    wait: float
    allow_mixed: bool
    deadline: float
