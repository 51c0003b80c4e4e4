# SPDX-License-Identifier: Apache-2.0
"""Expert plans of moe-replace and of other programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from ._errors import MISMATCH, USAGE, Error
from ._group import Group, moving
from ._library import call, expanded
from ._types import Path


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """A plan that assigns experts to ranks. Create it with ExpertPlan.read. The ranks are the live GPUs of the plan, in their order.

    Attributes:
        path: file of the plan.
        experts: number of experts of each layer.
        layers: numbers of the layers.
        slots: [layer][rank]: the experts in the slots of the rank. An expert can occupy several slots.
        owners: the same for optimizer states, for plans that copy experts for an iteration (strategy hecate). None if every replica
            has its state.
        node: the node of each rank.
        digest: equal for equal plans.

    Documentation: experts.md in shardwright.DOCS
    """

    path: str
    experts: int
    layers: tuple[int, ...]
    slots: list[list[list[int]]]
    owners: list[list[list[int]]] | None
    node: tuple[int, ...]
    digest: str

    @classmethod
    def read(cls, path: Path, group: dist.ProcessGroup | None = None) -> ExpertPlan:
        """Reads a plan from a file and compares it between the ranks. Collective.

        Args:
            path: file that moe-replace or another program has written. ~ is expanded.
            group: process group of the ranks of the plan. Default: all ranks.

        Raises:
            NotFoundError: the file cannot be read. CorruptInputError: it is not a valid plan. MismatchError: the plan is for
            another number of ranks, or ranks have different plans.

        Documentation: experts.md in shardwright.DOCS
        """
        ranks, text = Group(group), expanded(path)
        try:
            found = moving(lambda: ranks.agree(lambda: call("read_plan", {"plan": text, "ranks": ranks.size})))
        finally:
            ranks.close()
        for rank, other in enumerate(found):
            if other["digest"] != found[0]["digest"]:
                raise Error(MISMATCH, f"{text}: rank {rank} has another plan ({other['digest'][:16]}) than rank 0 "
                                      f"({found[0]['digest'][:16]})")
        return cls._of(text, found[0])

    @classmethod
    def _of_old_ranks(cls, path: str, ranks: int) -> ExpertPlan:
        """Reads a plan for ranks that need not exist any more. Local. Raises NotFoundError and CorruptInputError as read()."""
        return cls._of(path, call("read_plan", {"plan": path, "ranks": ranks}))

    @classmethod
    def _of(cls, text: str, plan: dict[str, Any]) -> ExpertPlan:
        return cls(text, plan["experts"], tuple(plan["layers"]), plan["slots"], plan["owners"],
                   tuple(plan["node"]), plan["digest"])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.node)

    def row(self, layer: int) -> int:
        """Returns the position of `layer` in `layers`. Local. Raises UsageError for a layer that the plan does not have."""
        if layer not in self.layers:
            raise Error(USAGE, f"{self.path}: the plan has no layer {layer}, its layers are {list(self.layers)}")
        return self.layers.index(layer)

    def holders(self, layer: int) -> list[list[int]]:
        """Returns [expert] for `layer`: the ranks that compute the expert, ascending. Local. Raises UsageError as row()."""
        return _by_expert(self.slots[self.row(layer)], self.experts)

    def state(self, layer: int) -> list[list[int]]:
        """Returns [expert] for `layer`: the ranks that have the optimizer state of the expert, ascending. Local. Raises UsageError
        as row()."""
        return _by_expert((self.owners or self.slots)[self.row(layer)], self.experts)

    def owner(self, layer: int) -> list[int]:
        """Returns [expert] for `layer`: the first rank that has the optimizer state of the expert, -1 if no rank has it. Local.
        Raises UsageError as row()."""
        return [held[0] if held else -1 for held in self.state(layer)]


def _by_expert(slots: list[list[int]], experts: int) -> list[list[int]]:
    """Converts [rank]: experts to [expert]: ranks."""
    found: list[list[int]] = [[] for _ in range(experts)]
    for rank, held in enumerate(slots):
        for expert in sorted(set(held)):
            found[expert].append(rank)
    return found
