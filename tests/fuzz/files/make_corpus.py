#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed inputs of the format fuzz targets: make_corpus.py FOLDER. Same bytes every time.

Whole indexes of DCP are those of tests/data/dcp.
"""

import collections
import io
import json
import pathlib
import pickle
import pickletools
import struct
import sys
import types
import zipfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import ptfile  # pylint: disable=wrong-import-position

DCP = pathlib.Path(__file__).resolve().parents[2] / "data" / "dcp"


def fake(module, name, kind=None):
    """An object that pickles as a reference to module.name, without the module."""
    parts = module.split(".")
    for i in range(len(parts)):
        path = ".".join(parts[: i + 1])
        sys.modules.setdefault(path, types.ModuleType(path))
    made = kind or type(name, (), {})
    made.__module__, made.__qualname__, made.__name__ = module, name, name
    setattr(sys.modules[module], name, made)
    return made


def function():
    def made(*_):
        return None
    return made


rebuild_v2 = fake("torch._utils", "_rebuild_tensor_v2", function())
rebuild_v3 = fake("torch._utils", "_rebuild_tensor_v3", function())
rebuild_parameter = fake("torch._utils", "_rebuild_parameter", function())
rebuild_typed = fake("torch._tensor", "_rebuild_from_type_v2", function())
FloatStorage = fake("torch", "FloatStorage")
UntypedStorage = fake("torch.storage", "UntypedStorage")
Tensor = fake("torch", "Tensor")
Size = fake("torch", "Size", function())
uint16 = fake("torch", "uint16")
Scaler = fake("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
Stage = fake("deepspeed.runtime.zero.config", "ZeroStageEnum", function())


class Storage:
    def __init__(self, cls, key, elems):
        self.id = ("storage", cls, key, "cpu", elems)


class Call:
    def __init__(self, call, *args):
        self.reduced = (call, args)

    def __reduce__(self):
        return self.reduced


class Pickler(pickle.Pickler):
    legacy = False

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        return value.id + (None,) if self.legacy else value.id


def dumps(value, protocol=2, legacy=False):
    out = io.BytesIO()
    pickler = Pickler(out, protocol)
    pickler.legacy = legacy
    pickler.dump(value)
    return out.getvalue()


def tensor_args(storage, *more):
    return (storage, 0, (2, 3), (3, 1), False, collections.OrderedDict(), *more)


def state():
    floats = Storage(FloatStorage, "0", 6)
    weight = Call(rebuild_v2, *tensor_args(floats))
    scaler = Scaler()
    scaler.cur_scale, scaler.dynamic = 1.0, False
    module = collections.OrderedDict(w=weight, tied=weight)
    module._metadata = collections.OrderedDict({"": {"version": 1}})
    return {
        "module": module, "shape": Call(Size, (2, 3)), "stage": Call(Stage, 2), "scaler": scaler,
        "half": Call(rebuild_v3, *tensor_args(Storage(UntypedStorage, "1", 12), uint16)),
        "parameter": Call(rebuild_parameter, weight, True, collections.OrderedDict()),
        "typed": Call(rebuild_typed, rebuild_v2, Tensor, tensor_args(floats), {"ds_id": "0_3"}),
    }


def values():
    shared = ["x"]
    return [None, True, False, 1, 300, -5, 2**40, 2**80, 1.5, "text", "\u00fc", b"by\xfe", bytearray(b"z"), (),
            (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"k": 1, 2: "v"}, {1}, frozenset([2]), shared, shared,
            collections.Counter("aab"), collections.deque([1]), range(3), complex(1, 2)]


def container(data, members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as made:
        for name, content in [("data.pkl", data), ("byteorder", b"little"), *members, ("version", b"3\n")]:
            made.writestr(zipfile.ZipInfo("archive/" + name), content)
    return out.getvalue()


def legacy():
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    tensor = Call(rebuild_v2, *tensor_args(Storage(FloatStorage, "77", 6)))
    head = [0x1950A86A20F9469CFC6C, 1001, machine, {"w": tensor}, ["77"]]
    parts = [pickle.dumps(head[0], 2), *(dumps(part, 2, legacy=True) for part in head[1:])]
    return b"".join(parts) + struct.pack("<q", 6) + bytes(24)


def safetensors(header, data_bytes, pad=b""):
    text = json.dumps(header, separators=(",", ":")).encode() + pad
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def safetensors_inputs():
    def entry(dtype, shape, first, last):
        return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
    types = {"z": entry("I64", [1], 0, 8), "f": entry("F32", [2, 1], 8, 16), "h": entry("BF16", [], 16, 18),
             "e": entry("F8_E4M3", [0, 3], 18, 18), "s": entry("F6_E2M3", [4], 18, 21),
             "p": entry("F4", [1, 2], 21, 22), "\n\u00fc": entry("BOOL", [1], 22, 23)}
    return {
        "types": safetensors({"__metadata__": {"format": "pt"}, **types}, 23, b"   "),
        "empty": safetensors({}, 0),
        "unknown_field": safetensors({"a": {**entry("U8", [1], 0, 1), "x": [{"y": -1.5}]}}, 1),
        "hole": safetensors({"a": entry("U8", [1], 1, 2)}, 2),
        "huge": safetensors({"a": entry("F64", [0, 2**61], 0, 0)}, 0),
        "index": b"i" + json.dumps({"metadata": {"total_size": 3}, "weight_map": {"a": "x", "b": "../y"}}).encode(),
    }


def json_inputs():
    """Texts, and MessagePack behind an "m"."""
    text = {"schema": 1, "files": [{"path": "a/b.pt", "bytes": 4096, "crc32": 7}],
            "none": None, "flags": [True, False], "real": -2.5e-3, "word": "\u00fc\n\"", "": {}}
    return {
        "values": json.dumps(text).encode(),
        "pretty": json.dumps(text, indent=1, ensure_ascii=False).encode(),
        "deep": b"[" * 32 + b"]" * 32,
        "too_deep": b'{"a":' * 40 + b"1" + b"}" * 40,
        "twice": b'{"a":1,"b":{"a":2},"a":3}',
        "packed": b"m" + bytes.fromhex("85a6736368656d6101a46c69737493ffcb4004000000000000c0"
                                       "a4776f7264a3c3bc0aa5746f6b656ec40300ff01a4666c61677392c3c2"),
        "packed_deep": b"m" + b"\x91" * 300,
    }


def small_index():
    """The index of a folder of two ranks with compressed items, with one tensor and one object left."""
    with open(DCP / "zstd_w2" / "ckpt" / ".metadata", "rb") as file:
        index = ptfile.Reader(file, {}).load()
    names = ("model.up.bias", "note")
    for key in ("state_dict_metadata", "planner_data"):
        index.state[key] = {name: index.state[key][name] for name in names}
    index.state["storage_data"] = {item: place for item, place in index.state["storage_data"].items()
                                   if item.state["fqn"] in names}
    return pickletools.optimize(ptfile.dumps(index)[0])


def main():
    folder = pathlib.Path(sys.argv[1])
    inputs = {}
    for protocol in (2, 3, 4, 5):
        inputs[f"fuzz_pickle/values_{protocol}"] = dumps(values(), protocol)
        inputs[f"fuzz_pickle/state_{protocol}"] = dumps(state(), protocol)
    inputs["fuzz_pickle/system"] = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
    inputs["fuzz_pickle/cycle"] = b"\x80\x02]q\x00h\x00a."
    inputs["fuzz_pickle/keywords"] = b"\x80\x04cm\nC\n)}\x8c\x01aNs\x92."
    both = [("data/0", bytes(24)), ("data/1", bytes(12))]
    inputs["fuzz_container/zip"] = container(dumps(state()), both)
    inputs["fuzz_container/small"] = container(b"\x80\x02}.", [])
    inputs["fuzz_container/legacy"] = legacy()
    inputs["fuzz_dcp_index/small"] = small_index()
    for name, content in safetensors_inputs().items():
        inputs["fuzz_safetensors/" + name] = content
    for name, content in json_inputs().items():
        inputs["fuzz_json/" + name] = content
    for name, content in inputs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
