"""When a rank idles, to the agent beside it: docs/live.md."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch.distributed as dist

from ._agent import Connection, SharedMemory
from ._errors import BAD_INPUT, UNSUPPORTED, USAGE, Error

WORD = 8  # bytes of a mark
MOST = 1 << 20  # marks that an agent may ask for


class IdleTimes:
    """Tells an agent when this rank idles, so that it copies and saves then: in the bubbles of a pipeline, above all.

        idle = shardwright.IdleTimes("unix:/run/user/1/pec.sock")
        ...
        with idle:                                # in the pipeline's schedule, around what it waits in
            dist.recv(activations, rank - 1)

    agent: where the agent of this rank listens, unix:PATH.
    rank: default that of torch.distributed, else 0. Local: ranks that make none are not waited for.
    trust_user: a user, by name or number, whose agent is accepted besides those of this process's user and of root.
    strict: False: where no agent takes the marks a warning says so, and check() tries again; True raises Error.

    A mark is two numbers in memory that the agent sees, without a system call. `with` may be nested; begin() and end() do the
    same without it. One thread at a time.
    """

    def __init__(self, agent: str, rank: int | None = None, *, strict: bool = True, trust_user: int | str | None = None) -> None:
        self._address, self._user = agent, trust_user
        self._rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self._depth = 0
        self._agent: Connection | None = None
        self._words = memoryview(bytearray(2 * WORD)).cast("Q")
        self._marks = 1
        if not isinstance(self._rank, int) or not 0 <= self._rank < 1 << 32:
            raise Error(USAGE, f"rank={rank}: a number from 0 on expected")
        try:
            self._connect()
        except Error as error:
            if strict:
                raise
            warnings.warn(f"idle times are not told: {error}", stacklevel=3)

    def begin(self) -> None:
        """From here on the rank idles."""
        if self._depth == 0:
            self._mark(1)
        self._depth += 1

    def end(self) -> None:
        """From here on it computes."""
        if self._depth == 0:
            raise Error(USAGE, "end() without begin()")
        self._depth -= 1
        if self._depth == 0:
            self._mark(0)

    def __enter__(self) -> IdleTimes:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def check(self) -> bool:
        """Connects again where the agent has ended and another one is there. Returns whether one sees the marks; once in a while,
        as with a checkpoint: it asks the system."""
        if self._agent is not None and not self._agent.readable():
            return True
        try:
            self._connect()
        except Error:
            return False
        return True

    def close(self) -> None:
        """The rank says nothing more, and is not waited for."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _connect(self) -> None:
        self.close()
        agent = Connection(self._address, user=self._user)
        try:
            agent.send(f"marks {self._rank}")
            try:
                said = agent.answer()
            except Error as error:
                if error.code == USAGE:
                    raise Error(UNSUPPORTED, f"{self._address}: an agent of an older version, which knows of no idle times") from error
                raise
            if not said.isdigit() or not 0 < int(said) <= MOST:
                raise Error(BAD_INPUT, f"{self._address}: a number of marks expected, found {said[:80]!r}")
            memory = SharedMemory("shardwright-idle", (int(said) + 1) * WORD)
            try:
                words: Any = memoryview(memory.map).cast("Q")
                agent.send_descriptor(memory.descriptor)
                agent.answer()
            finally:
                memory.close()
        except BaseException:
            agent.close()
            raise
        self._agent, self._words, self._marks = agent, words, int(said)
        if self._depth > 0:
            self._mark(1)

    def _mark(self, idle: int) -> None:
        words = self._words
        count = words[0]
        words[1 + count % self._marks] = 2 * time.monotonic_ns() + idle
        words[0] = count + 1  # after the mark: the agent reads it first
