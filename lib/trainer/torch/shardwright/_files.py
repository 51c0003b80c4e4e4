# SPDX-License-Identifier: Apache-2.0
"""Writes sparse torch.save files: first the header, later the byte ranges of tensors that an agent requests.

The older stream format of torch.save stores the position of every storage before the first storage, and has no checksums. So the
data of storages can be holes in the file. Each tensor gets a storage of its own, like DeepSpeed's copies for saving. Tensors over
the same elements share a storage.
"""

from __future__ import annotations

import collections
import os
import pickle
import struct
import sys
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ._device_memory import host_bytes
from ._errors import BAD_INPUT, UNSUPPORTED, Error

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the stream format
SMALL = 4096  # bytes: tensors up to this size are written with the header, because readers need some scalars
KINDS = {torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage, torch.float16: torch.HalfStorage,
         torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
         torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
         torch.bool: torch.BoolStorage}


class _Storage:
    """The storage of one tensor in the file."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key, self.tensor = key, tensor
        self.bytes = tensor.numel() * tensor.element_size()


class _Pickler(pickle.Pickler):
    """Pickles tensors as references to storages, which it collects."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[tuple, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        return torch._utils._rebuild_tensor_v2, (self._storage(value), 0, tuple(value.shape), _strides(value.shape),
                                                 value.requires_grad, collections.OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", KINDS[value.tensor.dtype], value.key, "cpu", value.tensor.numel(), None

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.dtype not in KINDS:
            raise Error(UNSUPPORTED, f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}, {tensor.layout}, "
                                     f"{tensor.dtype}: only plain tensors are supported")
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous() or tuple(tensor.stride()))
        if tensor.numel() == 0:
            key = (id(tensor),)
        if key not in self.storages:
            self.storages[key] = _Storage(str(len(self.storages)), tensor.contiguous())
        return self.storages[key]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    found, step = [], 1
    for extent in reversed(shape):
        found.append(step)
        step *= max(1, extent)
    return tuple(reversed(found))


class Part(NamedTuple):
    """The bytes [first, last) of a tensor, and their position in the file."""

    tensor: torch.Tensor
    first: int
    last: int
    place: int


class SparseFile:
    """A torch.save file with tensors in this process. They must not change until the requested byte ranges are written."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self._places: list[tuple[int, _Storage]] = []  # positions of the storages larger than SMALL, ascending
        with open(path, "xb") as file:
            pickle.dump(MAGIC, file, protocol=2)
            pickle.dump(PROTOCOL, file, protocol=2)
            pickle.dump({"protocol_version": PROTOCOL, "little_endian": sys.byteorder == "little",
                         "type_sizes": {"short": 2, "int": 4, "long": 4}}, file, protocol=2)
            pickler = _Pickler(file)
            pickler.dump(value)
            storages = list(pickler.storages.values())
            pickle.dump([storage.key for storage in storages], file, protocol=2)
            self._first = file.tell()
            for storage in storages:
                file.write(struct.pack("<q", storage.tensor.numel()))
                if storage.bytes <= SMALL:
                    file.writelines(host_bytes(storage.tensor, 0, storage.bytes))
                else:
                    self._places.append((file.tell(), storage))
                    file.seek(storage.bytes, os.SEEK_CUR)
            file.truncate()
            file.flush()
            self._size = file.tell()
            self._time = os.fstat(file.fileno()).st_mtime_ns

    def parts(self, ranges: list[tuple[int, int]]) -> list[Part]:
        """Returns the parts of tensors in byte ranges of the file: (first byte, number of bytes), ascending and disjoint. Raises
        CorruptInputError for ranges outside of the tensors."""
        if ranges and not self._first <= ranges[0][0] <= sum(ranges[-1]) <= self._size:
            raise Error(BAD_INPUT, f"{self.path}: bytes {ranges[0][0]} to {sum(ranges[-1])} requested, but tensors are at "
                                   f"{self._first} to {self._size}")
        found, at = [], 0
        for first, count in ranges:
            last = first + count
            while at < len(self._places) and self._places[at][0] < last:
                begin, storage = self._places[at]
                place, end = max(first, begin), begin + storage.bytes
                if place < end:
                    found.append(Part(storage.tensor, place - begin, min(last, end) - begin, place))
                if end > last:
                    break  # the next range may continue in this storage
                at += 1
        return found

    def fill(self, parts: list[Part]) -> None:
        """Writes parts to the file. Keeps the modification time, so that an agent that has read the header finds the same file."""
        with open(self.path, "r+b", buffering=0) as file:
            for part in parts:
                place = part.place
                for data in host_bytes(part.tensor, part.first, part.last):
                    while data:
                        done = os.pwrite(file.fileno(), data, place)
                        data, place = data[done:], place + done
            os.utime(file.fileno(), ns=(self._time, self._time))


class NoCopies(TorchFunctionMode):
    """Suppresses the copies of expert weights that DeepSpeed makes before a save. Only the bytes of the weights are read here, and
    the copies would take most of the time."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self._experts = {param.data_ptr() for layer in layers for param in layer.deepspeed_moe.experts.parameters()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone and args[0].data_ptr() in self._experts:
            return args[0].detach()
        return function(*args, **(kwargs or {}))


class HeaderEngine:
    """A DeepSpeed checkpoint engine that writes sparse files. It stores a failure instead of raising it, because other ranks wait
    during a save."""

    def __init__(self) -> None:
        self.files: dict[str, SparseFile] = {}
        self.failure: Exception | None = None
        self.name = "shardwright"

    def save(self, state_dict: Any, path: str) -> None:
        try:
            if self.failure is None:
                self.files[os.path.basename(path)] = SparseFile(path, state_dict)
        except Exception as error:
            self.failure = error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        return False  # each tensor gets a storage of its own, so copies are not needed

    def is_decoupled(self) -> bool:
        return False

    def create(self, _: Any) -> None: ...

    def commit(self, _: Any) -> None: ...
