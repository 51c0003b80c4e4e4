# SPDX-License-Identifier: Apache-2.0
"""Reports the idle intervals of a rank to the agent of its node: docs/live.md#idle-intervals."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch.distributed as dist

from ._agent import Connection, SharedMemory
from ._errors import BAD_INPUT, UNSUPPORTED, USAGE, Error
from ._types import User

WORD = 8  # bytes of a number in shared memory
MOST = 1 << 20  # largest number of entries that an agent may request


class IdleTimes:
    """Reports to an agent when this rank is idle, so that the agent copies and saves data then, for example in the bubbles of a
    pipeline.

        idle = shardwright.IdleTimes("unix:/run/user/1/pec.sock")
        ...
        with idle:                                # in the pipeline's schedule, around a wait
            dist.recv(activations, rank - 1)

    Local. The agent does not wait for ranks without such an object. `with` can be nested; begin() and end() do the same. An entry
    costs two writes to shared memory and no system call. Not thread safe.

    Args:
        agent: address of the agent of this rank, unix:PATH.
        rank: default: the rank in torch.distributed, or 0 without it.
        strict: raise an error if no agent accepts the reports. False: print a warning, and let check() try again.
        trust_user: name or number of a user: accept its agent, in addition to those of the user of this process and of root.

    Raises:
        Error, with strict=True: NotFoundError if no agent listens, MismatchError if the agent belongs to another user,
        UnsupportedError for an agent of an older version. UsageError: an invalid rank.

    Documentation: live.md#idle-intervals in shardwright.DOCS
    """

    def __init__(self, agent: str, rank: int | None = None, *, strict: bool = True, trust_user: User | None = None) -> None:
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
            warnings.warn(f"idle times are not reported: {error}", stacklevel=3)

    def begin(self) -> None:
        """Marks the begin of an idle interval. Local."""
        if self._depth == 0:
            self._mark(1)
        self._depth += 1

    def end(self) -> None:
        """Marks the end of an idle interval. Local. Raises UsageError without begin()."""
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
        """Connects to a new agent if the previous one has ended. Returns true if an agent receives the reports. Local.

        Call it now and then, for example after each checkpoint, because it makes a system call.
        """
        if self._agent is not None and not self._agent.readable():
            return True
        try:
            self._connect()
        except Error:
            return False
        return True

    def close(self) -> None:
        """Ends the reports. The agent no longer waits for this rank. Local."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _connect(self) -> None:
        self.close()
        agent = Connection(self._address, user=self._user)
        try:
            agent.send(f"marks {self._rank}")
            try:
                reply = agent.answer()
            except Error as error:
                if error.code == USAGE:
                    raise Error(UNSUPPORTED, f"{self._address}: the agent is too old for idle times; start one of this version") from error
                raise
            if not reply.isdigit() or not 0 < int(reply) <= MOST:
                raise Error(BAD_INPUT, f"{self._address}: the capacity for idle intervals expected, found {reply[:80]!r}")
            memory = SharedMemory("shardwright-idle", (int(reply) + 1) * WORD)
            try:
                words: Any = memoryview(memory.map).cast("Q")
                agent.send_descriptor(memory.descriptor)
                agent.answer()
            finally:
                memory.close()
        except BaseException:
            agent.close()
            raise
        self._agent, self._words, self._marks = agent, words, int(reply)
        if self._depth > 0:
            self._mark(1)

    def _mark(self, idle: int) -> None:
        """Writes an entry: the time, and 1 for idle or 0 for busy. idle: 0 or 1."""
        words = self._words
        count = words[0]
        words[1 + count % self._marks] = 2 * time.monotonic_ns() + idle
        words[0] = count + 1  # after the entry: the agent reads the count first
