# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the agent that logs its gradients, and the memory that they share: docs/lossless.md."""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from ._agent import Connection, SharedMemory
from ._errors import BAD_INPUT, Error

PATIENCE = 120  # seconds that training waits for an agent that is behind, before the log ends
ITEM = 4  # bytes of float32


class GradientMemory(SharedMemory):
    """Shared memory for gradients or square roots, which an agent reads."""

    def __init__(self, size: int) -> None:
        super().__init__("shardwright-gradients", size)
        self.floats = torch.frombuffer(self.map, dtype=torch.float32)


class Submission:
    """This rank's connection to the agent, and their shared memory. The memory is divided into places, one for each step."""

    def __init__(self, address: str, user: int | str | None, writer: int, description: dict[str, Any], place_bytes: int,
                 places: int) -> None:
        self.place_bytes, self._places = place_bytes, places
        self.free = list(range(places))
        self.waited = 0.0
        self.behind = 0  # steps that the agent has not acknowledged
        self.memory = GradientMemory(places * place_bytes)
        try:
            text = json.dumps(description | {"places": places, "place_bytes": place_bytes})
            self.agent = Connection(address, PATIENCE, user=user)
            self.agent.send(f"gradients {writer} {len(text.encode())}")
            self.agent.send_text(text)
            self.agent.answer()
            self.agent.send_descriptor(self.memory.descriptor)
            self.agent.answer()
        except BaseException:
            self.close()
            raise

    def take(self) -> int:
        """Returns a free place, and waits for one if necessary. Prefers the lowest, so that few memory pages are used."""
        while self.behind and (not self.free or self.agent.readable()):
            start = time.monotonic()
            self._take_answer()
            self.waited += time.monotonic() - start
        return self.free.pop(0)

    def place(self, number: int) -> torch.Tensor:
        """Returns the memory of a place."""
        count = self.place_bytes // ITEM
        return self.memory.floats[number * count:(number + 1) * count]

    def send(self, iteration: int, place: int, steps: str) -> None:
        """Submits the gradients in a place. steps: JSON list of the steps that used them."""
        self.agent.send(f"step {iteration} {place} {len(steps.encode())}")
        self.agent.send_text(steps)
        self.behind += 1

    def drain(self) -> None:
        """Waits until the agent has logged everything."""
        while self.behind:
            self._take_answer()

    def close(self) -> None:
        if hasattr(self, "agent"):
            self.agent.close()
        self.memory.close()

    def _take_answer(self) -> None:
        words = self.agent.answer().split(" ")
        place = int(words[1]) if len(words) == 3 and words[1].isdigit() else self._places
        if place >= self._places or place in self.free:
            raise Error(BAD_INPUT, f"an agent's reply to gradients: iteration, place in use and bytes expected, found {words!r}")
        self.behind -= 1
        self.free.append(place)
        self.free.sort()
