"""Plans of moe-replace, and of other programs, as the ranks of a trainer hold them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ._errors import MISMATCH, USAGE, Error
from ._group import Group, moving
from ._library import call, expanded


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """Which rank holds which experts. Ranks are the live GPUs of the plan in their order.

    experts: of every layer.
    layers: numbers of the layers.
    slots: [layer][rank]: the experts of its slots, perhaps one of them twice.
    owners: the same of where state lies, where experts are copied for an iteration (strategy hecate); None where every
        replica has its state.
    node: of every rank.
    digest: equal for equal plans.
    """

    path: str
    experts: int
    layers: tuple[int, ...]
    slots: list[list[list[int]]]
    owners: list[list[list[int]]] | None
    node: tuple[int, ...]
    digest: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], group: Any = None) -> ExpertPlan:
        """Collective. The plan in a file, the same on all ranks of the group. Raises Error."""
        ranks, path = Group(group), expanded(path)
        try:
            found = moving(lambda: ranks.agree(lambda: call("read_plan", {"plan": path, "ranks": ranks.size})))
        finally:
            ranks.close()
        for rank, other in enumerate(found):
            if other["digest"] != found[0]["digest"]:
                raise Error(MISMATCH, f"{path}: rank {rank} has another plan ({other['digest'][:16]}) than rank 0 "
                                      f"({found[0]['digest'][:16]})")
        told = found[0]
        return cls(path, told["experts"], tuple(told["layers"]), told["slots"], told["owners"],
                   tuple(told["node"]), told["digest"])

    @property
    def ranks(self) -> int:
        return len(self.node)

    def row(self, layer: int) -> int:
        """The position of a layer."""
        if layer not in self.layers:
            raise Error(USAGE, f"{self.path}: no layer {layer}, it has {list(self.layers)}")
        return self.layers.index(layer)

    def holders(self, layer: int) -> list[list[int]]:
        """[expert]: the ranks that compute it, ascending."""
        return _by_expert(self.slots[self.row(layer)], self.experts)

    def state(self, layer: int) -> list[list[int]]:
        """[expert]: the ranks that hold its state, ascending."""
        return _by_expert((self.owners or self.slots)[self.row(layer)], self.experts)

    def owner(self, layer: int) -> list[int]:
        """[expert]: the first rank that holds its state, -1 for an expert that nobody holds."""
        return [held[0] if held else -1 for held in self.state(layer)]


def _by_expert(slots: list[list[int]], experts: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(experts)]
    for rank, held in enumerate(slots):
        for expert in sorted(set(held)):
            found[expert].append(rank)
    return found
