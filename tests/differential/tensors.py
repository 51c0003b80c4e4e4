# SPDX-License-Identifier: Apache-2.0
"""Safetensors files as the package of that name writes them, and the tensors that it reads in them."""

import ctypes
import json
import math
import struct
import tempfile

import safetensors

# Name of a type for serialize, its name in headers, bytes of an element.
TYPES = (("bool", "BOOL", 1), ("uint8", "U8", 1), ("int8", "I8", 1), ("int16", "I16", 2), ("uint16", "U16", 2),
         ("float16", "F16", 2), ("bfloat16", "BF16", 2), ("int32", "I32", 4), ("uint32", "U32", 4),
         ("float32", "F32", 4), ("int64", "I64", 8), ("uint64", "U64", 8), ("float64", "F64", 8),
         ("float8_e4m3fn", "F8_E4M3", 1), ("float8_e5m2", "F8_E5M2", 1), ("complex64", "C64", 8))
NAMES = ("weight", "model.layers.0.bias", "a\"b", "a\\b", "grüße", "日本\U0001f600", "tab\t", "line\n", "\x7f", "\0", " ", "x" * 1000,
         "\u2028", "__metadata", "/")


def make(choose):
    tensors, kept = {}, []
    for i in range(choose.choice((0, 1, 2, 3, 8))):
        kind, _, size = choose.choice(TYPES)
        shape = [choose.choice((0, 1, 2, 3, 7)) for _ in range(choose.randrange(5))]
        name = choose.choice(NAMES) + choose.choice(("", f".{i}"))
        data = choose.randbytes(size * math.prod(shape))
        kept.append(ctypes.create_string_buffer(data, max(1, len(data))))
        tensors[name] = safetensors.TensorSpec(dtype=kind, shape=shape, data_ptr=ctypes.addressof(kept[-1]),
                                               data_len=len(data))
    metadata = {choose.choice(NAMES): choose.choice(NAMES) for _ in range(choose.randrange(4))}
    return bytes(safetensors.serialize(tensors, metadata=metadata or None))


def read(data):
    """\\returns ({name: type, shape, bytes}, metadata) as the package reads it"""
    found = {}
    for name, one in safetensors.deserialize(data):
        found[name] = (one["dtype"], list(one["shape"]), bytes(one["data"]))
    with tempfile.NamedTemporaryFile(prefix="sw-differential-") as file:
        file.write(data)
        file.flush()
        with safetensors.safe_open(file.name, "np") as opened:
            metadata = opened.metadata() or {}
    return found, metadata


def said(answer, data):
    """The same from the output of differential_probe."""
    found = {}
    for one in answer["tensors"]:
        content = data[one["offset"]:one["offset"] + one["bytes"]]
        found[bytes.fromhex(one["name"]).decode()] = (one["dtype"], one["shape"], content)
    return found, {bytes.fromhex(key).decode(): bytes.fromhex(value).decode()
                   for key, value in answer["metadata"].items()}


def mutated_header(choose, data):
    """Damage at sensitive places: in the header, as text or in its meaning."""
    length, = struct.unpack("<Q", data[:8])
    if length < 3 or choose.randrange(2) == 0:
        at = choose.randrange(8 + min(length, 2000))
        return data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1:]
    header = json.loads(data[8:8 + length])
    names = [name for name in header if name != "__metadata__"]
    if names:
        one = header[choose.choice(names)]
        choose.choice((
            lambda: one.update(dtype=choose.choice(TYPES)[1]), lambda: one["shape"].append(choose.choice((0, 1, 2))),
            lambda: one["shape"].reverse(), lambda: one["data_offsets"].reverse(),
            lambda: one["data_offsets"].append(1), lambda: one.pop(choose.choice(list(one))),
            lambda: one.update(data_offsets=[n + 1 for n in one["data_offsets"]]),
            lambda: header.update(extra=dict(one)), lambda: header.update(__metadata__={"a": 1}),
            lambda: one.update(more=1), lambda: header.pop(names[0])))()
    else:
        header["x"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header, ensure_ascii=bool(choose.randrange(2))).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length:]
