# SPDX-License-Identifier: Apache-2.0
"""States of an elastic run in the memory of a node: docs/elastic.md.

The process of the node's launcher keeps them, so they outlive the training processes that it restarts. A training process writes a
state into memory of its own and passes the descriptor. A state is either whole in the node's memory or not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from ._agent import SharedMemory
from ._errors import BAD_INPUT, IO, NOT_FOUND, Error

MESSAGE = 1 << 16  # largest message in bytes
ALIGNMENT = 64  # of tensors in a state, in bytes
RECENT = 2  # newest states of a rank that the memory keeps: ranks that stop in the same step differ by one iteration
PATIENCE = 60  # seconds to wait for an answer
Parts = Mapping[str, tuple[list[str], list[torch.Tensor]]]  # {key: labels and tensors}


@dataclasses.dataclass(frozen=True)
class Slot:
    """A state of one rank.

    iteration: optimizer steps of the run. era: identifies the part of the run between two restarts. rank: LOCAL_RANK of the process.
    kept: a checkpoint in storage has the same iteration.
    """

    job: str
    iteration: int
    era: str
    rank: int
    kept: bool

    @property
    def name(self) -> tuple[int, str]:
        return self.iteration, self.era


class NodeMemory:
    """Keeps the states of a node's ranks and serves them at a socket file, in a thread. Accepts processes that may open the file."""

    def __init__(self, path: str) -> None:
        self._slots: list[tuple[Slot, int]] = []  # with the descriptor of the memory, in the order of arrival
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                text, descriptors, _, _ = socket.recv_fds(connection, MESSAGE, 1)
                if not text:
                    return
                kept, sent = False, []
                try:
                    request = json.loads(text)
                    answer = self._answer(request, descriptors)
                    kept = request["request"] == "put"
                    if isinstance(answer, int):
                        answer, sent = {}, [answer]
                except Exception as error:
                    code = error.code if isinstance(error, Error) else BAD_INPUT
                    answer = {"error": code, "message": f"{error}"}
                try:
                    socket.send_fds(connection, [json.dumps(answer).encode()], sent)
                finally:
                    for one in [*sent, *([] if kept else descriptors)]:
                        os.close(one)

    def _answer(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | int:
        """Returns the answer, or a new descriptor of a state's memory. Keeps the descriptor of a put."""
        kind = request["request"]
        with self._lock:
            if kind == "list":
                return {"slots": [dataclasses.asdict(slot) for slot, _ in self._slots if slot.rank == request["rank"]]}
            if kind == "put":
                slot = Slot(**request["slot"])
                (descriptor,) = descriptors
                self._keep_only([one for one in self._slots if (one[0].name, one[0].rank) != (slot.name, slot.rank)])
                self._slots.append((slot, descriptor))
                mine = [one for one in self._slots if one[0].rank == slot.rank]
                self._keep_only([one for one in self._slots if one[0].rank != slot.rank or one[0].kept or one in mine[-RECENT:]])
                return {}
            if kind == "settle":  # the checkpoint of this state is whole: those before are not needed
                mine = [one for one in self._slots if one[0].rank == request["rank"]]
                self._keep_only([one for one in self._slots if one[0].rank != request["rank"] or one in mine[-RECENT:] or
                                 one[0].name == tuple(request["name"])])
                return {}
            if kind == "discard":  # states that the run has discarded, or that belong to another job
                self._keep_only([one for one in self._slots if one[0].rank != request["rank"] or
                                 one[0].job == request["job"] and one[0].iteration <= request["iteration"]])
                return {}
            if kind == "get":
                for slot, descriptor in self._slots:
                    if slot.name == tuple(request["name"]) and slot.rank == request["rank"]:
                        return os.dup(descriptor)  # another connection may replace the state meanwhile
                raise Error(NOT_FOUND, f"this node has no state {request['name']}")
        raise Error(BAD_INPUT, f"unknown request {kind!r}")

    def _keep_only(self, kept: list[tuple[Slot, int]]) -> None:
        for one in self._slots:
            if one not in kept:
                os.close(one[1])
        self._slots = kept


class State(dict[str, tuple[list[str], list[torch.Tensor]]]):
    """A state out of a node's memory: {key: labels and tensors}.

    plan: text of the placement plan. tokens: [layer][expert], token counts when it was made. bytes: its size.
    """

    plan: str
    tokens: list[list[int]]
    bytes: int


class NodeClient:
    """A training process's connection to its node's memory. rank: LOCAL_RANK of the process. Local, like all methods.

    Raises NotFoundError if nothing listens there.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank, self._path = rank, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise Error(NOT_FOUND, f"{path}: memory of this node: {error.strerror or error}") from error

    def close(self) -> None:
        self._socket.close()

    def slots(self) -> list[Slot]:
        """Returns the states of this rank, in the order of their arrival."""
        return [Slot(**slot) for slot in self._ask({"request": "list", "rank": self._rank})[0]["slots"]]

    def put(self, slot: Slot, parts: Parts, plan: str, tokens: list[list[int]]) -> int:
        """Copies a state into the node's memory. Returns its size in bytes."""
        described, place = [], 0
        for key, (labels, tensors) in parts.items():
            for label, tensor in zip(labels, tensors):
                described.append([key, label, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place])
                place += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
        header = json.dumps({"plan": plan, "tokens": tokens, "keys": list(parts), "tensors": described}).encode()
        first = math.ceil((8 + len(header)) / ALIGNMENT) * ALIGNMENT
        memory = SharedMemory("shardwright-state", first + place)
        try:
            memory.map[:8] = len(header).to_bytes(8, "little")
            memory.map[8:8 + len(header)] = header
            tensors = [tensor for _, of in parts.values() for tensor in of]
            for (_, _, _, _, place_of), tensor in zip(described, tensors):
                if tensor.numel():
                    to = torch.frombuffer(memory.map, dtype=tensor.dtype, count=tensor.numel(), offset=first + place_of)
                    to.copy_(tensor.detach().reshape(-1))
            self._ask({"request": "put", "slot": dataclasses.asdict(slot)}, memory.descriptor)
        finally:
            memory.close()
        return first + place

    def get(self, slot: Slot) -> State:
        """Returns a copy of a state. Raises NotFoundError if the node does not have it."""
        _, descriptors = self._ask({"request": "get", "name": slot.name, "rank": self._rank})
        (descriptor,) = descriptors
        try:
            data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + header_bytes])
        first = math.ceil((8 + header_bytes) / ALIGNMENT) * ALIGNMENT
        state = State({key: ([], []) for key in header["keys"]})
        state.plan, state.tokens, state.bytes = header["plan"], header["tokens"], len(data)
        for key, label, dtype, shape, place in header["tensors"]:
            count = math.prod(shape)
            kind = getattr(torch, dtype)
            tensor = torch.frombuffer(data, dtype=kind, count=count, offset=first + place) if count else torch.empty(0, dtype=kind)
            state[key][0].append(label)
            state[key][1].append(tensor.reshape(shape).clone())
        return state

    def settle(self, name: tuple[int, str]) -> None:
        """Records that a checkpoint in storage has the same state: the memory need not keep the states before."""
        self._ask({"request": "settle", "name": name, "rank": self._rank})

    def discard(self, job: str, iteration: int) -> None:
        """Removes the states of this rank that are newer than an iteration, or belong to another job."""
        self._ask({"request": "discard", "job": job, "iteration": iteration, "rank": self._rank})

    def _ask(self, request: dict[str, Any], descriptor: int | None = None) -> tuple[dict[str, Any], list[int]]:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [] if descriptor is None else [descriptor])
            text, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE, 1)
        except OSError as error:
            raise Error(IO, f"{self._path}: memory of this node: {error.strerror or error}") from error
        if not text:
            raise Error(IO, f"{self._path}: the memory of this node has closed the connection")
        answer = json.loads(text)
        if "error" in answer:
            raise Error(answer["error"], f"{self._path}: {answer['message']}")
        return answer, descriptors
