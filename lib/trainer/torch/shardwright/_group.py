# SPDX-License-Identifier: Apache-2.0
"""The trainer's process group, as the library calls it: see lib/trainer/load/trainer_comm.h."""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ._errors import INTERNAL, IO, USAGE, Error

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
                            ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_void_p),
                            ctypes.POINTER(ctypes.c_void_p))
EACH_TO_EACH, TO_ALL, FROM_ROOT = 0, 1, 2
MEETING = 1852014708  # tag of the messages of meet, unlikely to be used by a trainer
SMALL = 56  # largest data in bytes that an all-gather sends together with its size
LONGEST = 30 * 60  # seconds that a collective waits for other ranks: PyTorch's default for gloo


def moving(work: Callable[[], Any]) -> Any:
    """Returns the result of a collective. Raises TransferError if it fails, for example because a rank is gone."""
    try:
        return work()
    except Error:
        raise
    except (RuntimeError, ValueError) as error:  # dist.DistBackendError is a RuntimeError
        raise Error(IO, f"process group: {str(error).splitlines()[0]}") from error


class Group:
    """A process group of the trainer, or a single process if torch.distributed is not initialized.

    Creates a gloo group over the same ranks if the group has another backend; close() destroys it. This is collective. what,
    seconds: the name of the call and its deadline, as for meet(), which is called next. Raises as meet() does.
    failure: the exception of a collective that the library called. The caller of the library raises it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, what: str = "", seconds: float = LONGEST) -> None:
        self.failure: BaseException | None = None
        self.rank, self.size, self._given = 0, 1, group
        self._own: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None
        self._function = FUNCTION(self._swap)
        self._kept: tuple[torch.Tensor, ...] = ()
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        if self.size > 1 and "gloo" not in dist.get_backend(group):
            self._group = self._own = self._gloo_group(what, seconds)

    def _gloo_group(self, what: str, seconds: float) -> dist.ProcessGroup:
        """Creates a gloo group over the same ranks. Raises UsageError if another rank does not do so within this many seconds."""
        ranks, end = self.ranks, time.monotonic() + seconds
        try:
            # Local synchronization: only these ranks take part, and names do not clash with the trainer's other groups.
            group = dist.new_group(ranks, datetime.timedelta(seconds=max(0.001, seconds)), "gloo", use_local_synchronization=True)
        except RuntimeError as error:  # dist.DistStoreError is one, too
            raise self._not_met(error, what, seconds, end, "another rank") from error
        # The deadline is for the beginning of the call only: later collectives may wait longer.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # older releases
        set_timeout(datetime.timedelta(seconds=max(seconds, LONGEST)), group)
        return group

    def _not_met(self, error: RuntimeError, what: str, seconds: float, end: float, other: str) -> Error:
        """Returns the error of a wait for another rank that should have lasted until `end`."""
        if not what or time.monotonic() < end - 0.1:  # a rank has ended
            return Error(IO, f"process group: {str(error).splitlines()[0]}")
        return Error(USAGE, f"{what}: rank {self.rank} has waited {seconds:g} s, and {other} has not called it: all ranks of "
                            "the process group must call it (deadline= sets how long they wait)")

    def close(self) -> None:
        """Destroys the gloo group, if this object has created one. Local."""
        if self._own is not None:
            dist.destroy_process_group(self._own)
            self._own = None

    def meet(self, what: str, seconds: float) -> None:
        """Waits until all ranks have called `what`. Collective. Raises UsageError after this many seconds. On rank 0 the message names
        a missing rank."""
        end = time.monotonic() + seconds

        def arrive(work: Any, other: str) -> None:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                raise self._not_met(error, what, seconds, end, other) from error

        if self.size == 1:
            return
        # Uses messages between two ranks: a collective cannot be cancelled, and would delay the end of the process.
        others = range(1, self.size) if self.rank == 0 else [0]
        bytes_in, byte_out = torch.zeros(self.size, 1, dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
        received = [moving(lambda rank=rank: dist.irecv(bytes_in[rank], group=self._group, group_src=rank, tag=MEETING))
                    for rank in others]

        def send() -> list[Any]:
            return [moving(lambda rank=rank: dist.isend(byte_out, group=self._group, group_dst=rank, tag=MEETING)) for rank in others]

        sent = [] if self.rank == 0 else send()
        for rank, work in zip(others, received):
            arrive(work, f"rank {rank}" if self.rank == 0 else "another rank")
        for work in sent or send():
            arrive(work, "another rank")

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def any(self, value: bool) -> bool:
        """Returns whether the value of any rank is true. Collective."""
        return any(self.gather(value))

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """Calls `work` on every rank and returns the results of all ranks. Collective. If it fails on a rank, raises the error of the
        first such rank on all ranks."""
        value, failed = None, None
        try:
            value = work()
        except Exception as error:
            code = error.code if isinstance(error, Error) else IO if isinstance(error, OSError) else INTERNAL
            failed = code, str(error) if isinstance(error, (Error, OSError)) else f"{type(error).__name__}: {error}"
        results = self.gather((failed, value))
        for rank, (what, _) in enumerate(results):
            if what is not None:
                raise Error(*what, None if self.size == 1 else rank)
        return [value for _, value in results]

    @property
    def ranks(self) -> list[int]:
        """Global ranks, by rank of the group."""
        return dist.get_process_group_ranks(self._given or dist.group.WORLD) if self.size > 1 else [0]

    def for_tensors(self, *tensors: torch.Tensor) -> dist.ProcessGroup | None:
        """Returns the process group for collectives on these tensors: the gloo group for CPU tensors, otherwise the trainer's."""
        return self._group if self._own is not None and any(one.is_cpu for one in tensors) else self._given

    def pair(self, operator: Any, tensor: torch.Tensor, rank: int) -> Any:
        """Returns the operation for dist.batch_isend_irecv that sends (dist.isend) or receives (dist.irecv) a contiguous tensor."""
        return dist.P2POp(operator, tensor.detach().view(-1), group=self.for_tensors(tensor), group_peer=rank)

    @property
    def address(self) -> int:
        """Address of the C function that the library calls for collectives."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _swap(self, what: int, root: int, sent: int | None, sent_bytes: Any, received: Any, received_bytes: Any) -> int:
        """Runs a collective for the library. Returns 0, or 1 on failure, which is stored in `failure`."""
        try:
            pieces = self.size if what == EACH_TO_EACH else 1
            counts = torch.tensor([sent_bytes[i] for i in range(pieces)], dtype=torch.int64, device="cpu")
            total = int(counts.sum())
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
            if total:
                assert sent is not None
                data = torch.frombuffer((ctypes.c_uint8 * total).from_address(sent), dtype=torch.uint8)
            got, got_bytes = getattr(self, ("_each_to_each", "_to_all", "_from_root")[what])(data, counts, root)
            self._kept = got, got_bytes  # keeps the memory valid until the next call
            received[0], received_bytes[0] = got.data_ptr(), got_bytes.data_ptr()
            return 0
        except BaseException as failure:  # KeyboardInterrupt too: an exception must not leave a C callback
            self.failure = failure
            return 1

    def _each_to_each(self, data: torch.Tensor, counts: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = torch.empty_like(counts)
        dist.all_to_all_single(sizes, counts, group=self._group)
        got = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        dist.all_to_all_single(got, data, sizes.tolist(), counts.tolist(), group=self._group)
        return got, sizes

    def _to_all(self, data: torch.Tensor, counts: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.zeros(8 + SMALL, dtype=torch.uint8, device="cpu")
        row[:8] = counts.view(torch.uint8)
        if data.numel() <= SMALL:
            row[8:8 + data.numel()] = data
        rows = torch.empty(self.size * len(row), dtype=torch.uint8, device="cpu")
        dist.all_gather_into_tensor(rows, row, group=self._group)
        rows = rows.view(self.size, len(row))
        sizes = rows[:, :8].contiguous().view(torch.int64).flatten()
        most = int(sizes.max())
        if most <= SMALL:
            return torch.cat([row[8:8 + size] for row, size in zip(rows, sizes.tolist())]), sizes
        padded = torch.nn.functional.pad(data, (0, most - data.numel()))
        got = torch.empty(self.size * most, dtype=torch.uint8, device="cpu")
        dist.all_gather_into_tensor(got, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(got.split(most), sizes.tolist())]), sizes

    def _from_root(self, data: torch.Tensor, counts: torch.Tensor, root: int) -> tuple[torch.Tensor, torch.Tensor]:
        dist.broadcast(counts, group=self._group, group_src=root)
        got = data.clone() if self.rank == root else torch.empty(int(counts[0]), dtype=torch.uint8, device="cpu")
        if got.numel():
            dist.broadcast(got, group=self._group, group_src=root)
        return got, counts
