"""Files of torch.save that hold their header at first, and of their tensors what is asked for later.

The older stream of torch.save tells the place of every storage before the first one begins, and has no checksums: so its
payloads can be holes that nothing was written to. Each tensor gets a storage of its own, as DeepSpeed's copies for saving
have it; tensors over the same elements share one.
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

from ._errors import BAD_INPUT, UNSUPPORTED, Error
from ._far import near

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the stream
SMALL = 4096  # bytes: what is not larger comes with the header, scalars that readers look at among it
KINDS = {torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage, torch.float16: torch.HalfStorage,
         torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
         torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
         torch.bool: torch.BoolStorage}


class _Storage:
    """Of a tensor by itself."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key, self.tensor = key, tensor
        self.bytes = tensor.numel() * tensor.element_size()


class _Pickler(pickle.Pickler):
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
                                     f"{tensor.dtype}: only plain tensors are handed over")
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous() or tuple(tensor.stride()))
        if tensor.numel() == 0:
            key = (id(tensor),)
        if key not in self.storages:
            self.storages[key] = _Storage(str(len(self.storages)), tensor.contiguous())
        return self.storages[key]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    found, step = [], 1
    for extent in reversed(shape):
        found.append(step)
        step *= max(1, extent)
    return tuple(reversed(found))


class Part(NamedTuple):
    """The bytes first..last of a tensor, and where in the file they go."""

    tensor: torch.Tensor
    first: int
    last: int
    place: int


class SparseFile:
    """A file whose tensors are in this process. They must not change until what is asked for was filled in."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self._places: list[tuple[int, _Storage]] = []  # of the larger storages, ascending
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
                    file.writelines(near(storage.tensor, 0, storage.bytes))
                else:
                    self._places.append((file.tell(), storage))
                    file.seek(storage.bytes, os.SEEK_CUR)
            file.truncate()
            file.flush()
            self._size = file.tell()
            self._time = os.fstat(file.fileno()).st_mtime_ns

    def parts(self, stretches: list[tuple[int, int]]) -> list[Part]:
        """What of which tensors lies in stretches (first byte, how many; ascending, apart from each other)."""
        if stretches and not self._first <= stretches[0][0] <= sum(stretches[-1]) <= self._size:
            raise Error(BAD_INPUT, f"{self.path}: bytes {stretches[0][0]} to {sum(stretches[-1])} are asked for, tensors lie from "
                                   f"{self._first} to {self._size}")
        found, at = [], 0
        for first, count in stretches:
            last = first + count
            while at < len(self._places) and self._places[at][0] < last:
                begin, storage = self._places[at]
                place, end = max(first, begin), begin + storage.bytes
                if place < end:
                    found.append(Part(storage.tensor, place - begin, min(last, end) - begin, place))
                if end > last:
                    break  # the next stretch may go on in it
                at += 1
        return found

    def fill(self, parts: list[Part]) -> None:
        """Writes them. The file keeps the time of its header: to who has read that it is the same file."""
        with open(self.path, "r+b", buffering=0) as file:
            for part in parts:
                place = part.place
                for data in near(part.tensor, part.first, part.last):
                    while data:
                        done = os.pwrite(file.fileno(), data, place)
                        data, place = data[done:], place + done
            os.utime(file.fileno(), ns=(self._time, self._time))


class NoCopies(TorchFunctionMode):
    """DeepSpeed copies the weights of experts before it saves them: here that is not needed, since only their bytes are
    looked at, and it would take longer than the rest."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self._experts = {param.data_ptr() for layer in layers for param in layer.deepspeed_moe.experts.parameters()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone and args[0].data_ptr() in self._experts:
            return args[0].detach()
        return function(*args, **(kwargs or {}))


class HeaderEngine:
    """A checkpoint engine of DeepSpeed that writes headers, and keeps what the tensors of its files are. A failure is
    kept too: other ranks wait in the middle of a save."""

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
        return False  # each tensor gets a storage of its own: nothing has to be copied for that

    def is_decoupled(self) -> bool:
        return False

    def create(self, _: Any) -> None: ...

    def commit(self, _: Any) -> None: ...
