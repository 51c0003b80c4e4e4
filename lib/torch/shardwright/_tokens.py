"""Tokens per expert: counted in a model, and the log that an agent reads (docs/formats/loads.md)."""

from __future__ import annotations

import json
import os
from typing import Any

import torch


class Counts:
    """What the MoE layers of a model have sent to their experts since they were asked last."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.shape = tuple(layer.num_experts for layer in layers)
        self._hooks = [layer.register_forward_hook(self._hook(number)) for number, layer in enumerate(layers)]
        self._counts: list[torch.Tensor] = []
        self.clear()

    def clear(self) -> None:
        self._counts = [torch.zeros(experts, dtype=torch.int64, device="cpu") for experts in self.shape]

    def take(self) -> list[list[int]]:
        """[layer][expert]"""
        counts = [layer.tolist() for layer in self._counts]
        self.clear()
        return counts

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        def count(layer: Any, _: Any, output: Any) -> None:
            if layer.training:
                self._counts[number] += output[2].detach().to("cpu", torch.int64)
        return count


def count_tokens(model: torch.nn.Module) -> Counts:
    """Hooks on DeepSpeed's MoE layers, in the order in which DeepSpeed numbers them."""
    from deepspeed.moe.layer import MoE
    return Counts([module for module in model.modules() if isinstance(module, MoE)])


class TokenLog:
    """A line for each iteration: {"iteration": N, "tokens": [layer][expert]}."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._end: int | None = None  # of what is whole; None: not looked at yet
        self._lines = ""  # that are not written yet

    def add(self, tokens: dict[int, list[list[int]]]) -> None:
        """Iterations after those that were added before. Of those that were there at first, these or later ones go: a trainer
        before has gone further. What cannot be written is, the next time."""
        if self._path is None:
            return
        if self._end is None and tokens:
            self._end = self._place_of(min(tokens))
        self._lines += "".join(json.dumps({"iteration": iteration, "tokens": tokens[iteration]}) + "\n"
                               for iteration in sorted(tokens))
        if not self._lines:
            return
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as log:
            log.truncate(self._end)
            log.seek(self._end or 0)
            log.write(self._lines.encode())
            log.flush()
            self._end = log.tell()
        self._lines = ""

    def _place_of(self, first: int) -> int:
        """Where the lines of iterations from `first` on begin. A line may have been cut short by the end of whoever wrote it:
        it is one of those."""
        assert self._path is not None
        end = 0
        if os.path.exists(self._path):
            with open(self._path, "rb") as log:
                for line in log:
                    if not line.endswith(b"\n") or json.loads(line)["iteration"] >= first:
                        break
                    end += len(line)
        return end
