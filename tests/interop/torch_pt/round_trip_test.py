# SPDX-License-Identifier: Apache-2.0
"""torch.save -> our reader -> our writer -> torch.load gives the same graph, bit for bit."""

import argparse
import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import random
import sys
import tempfile
import types
import unittest
import uuid
import zipfile

import numpy
import torch

from same import Probe, same, sharing


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Outer:
    class Inner:
        def __init__(self):
            self.value = 3


@dataclasses.dataclass
class Options:
    rate: float = 0.5
    names: tuple = ("a", "b")


class Slots:
    __slots__ = ("left", "right")

    def __init__(self):
        self.left, self.right = 1, [2]


class WithNew:
    def __new__(cls, first, *, second):
        made = super().__new__(cls)
        made.both = (first, second)
        return made

    def __getnewargs_ex__(self):
        return (self.both[0],), {"second": self.both[1]}


class Items(list):
    pass


def tensors(untyped=True):
    seeded = torch.Generator().manual_seed(7)
    base = torch.randn(6, 8, generator=seeded)
    graph = {
        "scalar": torch.tensor(2.5), "empty": torch.empty(0), "empty_2d": torch.empty(3, 0, 2),
        "view": base[1:3], "column": base[:, 2], "turned": base.t(), "wide": torch.ones(3).expand(4, 3),
        "base": base, "grad": torch.ones(2, requires_grad=True),
        "deep": torch.zeros(1, 2, 1, 2, 1, 2),
    }
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128,
                  torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
                  torch.bool):
        graph[str(dtype)] = (torch.arange(13) % 3 - 1).to(dtype)
    raw = torch.arange(64, dtype=torch.uint8)
    for name in ("uint16", "uint32", "uint64", "complex32", "float8_e5m2", "float8_e4m3fn",
                 "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        if untyped and hasattr(torch, name):
            graph[name] = raw.clone().view(getattr(torch, name))
    return graph


def parameters():
    shared = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    marked = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    marked.ds_id = "0_3"
    plain = torch.zeros(4)
    plain.ds_id = "4_9"
    plain.nested = {"inner": torch.ones(2), "n": 5}
    return {"w": shared, "tied": shared, "data": shared.data, "marked": marked, "plain": plain}


def values():
    twice = [1, 2]
    return {
        "none": None, "true": True, "false": False,
        "ints": [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -128, -129, -(2**31), -(2**31) - 1,
                 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70, -(2**70), 2**1000],
        "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324],
        "text": ["", "ascii", "grüße", "日本", "\U0001f600", "line\nbreak\0", "\udc80"],
        "bytes": [b"", b"abc", bytes(range(256))], "bytearray": [bytearray(), bytearray(b"\x00\xff")],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
        "sets": [set(), {"a"}, {1}], "size": torch.Size([2, 3]), "size0": torch.Size([]),
        "dtype": torch.bfloat16, "many": {f"k{i}": i for i in range(2500)}, "list": list(range(3001)),
        "keys": {1: "int", None: "none", (1, 2): "tuple", 2.5: "float", b"b": "bytes", -1: 0},
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]), "twice": [twice, twice],
    }


def classes():
    table = collections.defaultdict(list)
    table["x"].append(1)
    items = Items([1, 2])
    items.note = "n"
    return {
        "namespace": argparse.Namespace(a=1, t=torch.ones(2), n=argparse.Namespace()),
        "simple": types.SimpleNamespace(x=1), "deque": collections.deque([1, 2], 5),
        "counter": collections.Counter("abca"), "default": table, "frozen": frozenset([1]),
        "complex": 1 + 2j, "range": range(1, 9, 2), "slice": slice(1, None, 2), "device": torch.device("cuda:1"),
        "layout": torch.strided, "enum": [Color.RED, Color.BLUE], "inner": Outer.Inner(),
        "options": Options(), "slots": [Slots().right], "items": items,
        "path": pathlib.PurePosixPath("/a/b"), "day": datetime.datetime(2020, 1, 2, 3),
        "uuid": uuid.UUID(int=5), "type": [int, str, dict, Outer],
        "array": numpy.arange(7, dtype=numpy.float32).reshape(1, 7), "numpy": numpy.float64(2.5),
        "rng": numpy.random.RandomState(3).get_state(), "python_rng": random.Random(1).getstate(),
    }


def training():
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": schedule.state_dict()}


SAFE = {"tensors": tensors, "parameters": parameters, "values": values, "training": training}
ALL = {**SAFE, "classes": classes}


class RoundTrip(unittest.TestCase):
    probe = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.source = pathlib.Path(self.folder.name) / "source.pt"
        self.target = pathlib.Path(self.folder.name) / "target.pt"

    def tearDown(self):
        self.folder.cleanup()

    def check(self, name):
        """Rewrites self.source and compares what torch loads from both."""
        self.probe.rewrite(self.source, self.target)
        want = torch.load(self.source, weights_only=False)
        modes = [{"weights_only": False}]
        if name in SAFE:
            modes.append({"weights_only": True})
        modes += [{**mode, "mmap": True} for mode in modes]
        for mode in modes:
            got = torch.load(self.target, **mode)
            same(want, got)
            self.assertEqual(sharing(want), sharing(got))
        again = pathlib.Path(self.folder.name) / "again.pt"
        self.probe.rewrite(self.target, again)
        self.assertEqual(self.target.read_bytes(), again.read_bytes())

    def test_protocols(self):
        for name, make in ALL.items():
            for protocol in (2, 3, 4, 5):
                with self.subTest(name=name, protocol=protocol):
                    torch.save(make(), self.source, pickle_protocol=protocol)
                    self.check(name)

    def test_keyword_arguments_of_new(self):
        for protocol in (4, 5):  # earlier ones hide them in functools.partial, an unsupported function
            torch.save([WithNew(1, second=2), WithNew(3, second=[])], self.source, pickle_protocol=protocol)
            self.check("keywords")

    def test_legacy_stream(self):
        # torch itself cannot read types without a storage class from a legacy stream.
        legacy = {**ALL, "tensors": lambda: tensors(untyped=False)}
        for name, make in legacy.items():
            with self.subTest(name=name):
                torch.save(make(), self.source, _use_new_zipfile_serialization=False)
                self.check(name)

    def test_without_checksums(self):
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensors(), self.source)
        finally:
            torch.serialization.set_crc32_options(True)
        self.check("tensors")

    def test_zip_program(self):
        torch.save(tensors(), self.source)
        other = pathlib.Path(self.folder.name) / "other.zip"
        with zipfile.ZipFile(self.source) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_STORED) as new:
            for member in reversed(old.namelist()):
                new.writestr(member, old.read(member))
        self.source = other
        self.check("tensors")

    def test_ordinary_zip_reader_accepts_ours(self):
        torch.save(training(), self.source)
        self.probe.rewrite(self.source, self.target)
        with zipfile.ZipFile(self.target) as ours:
            self.assertIsNone(ours.testzip())
            names = ours.namelist()
        self.assertEqual(names[0], "archive/data.pkl")
        self.assertEqual(names[-1], "archive/version")

    def test_offsets_by_arithmetic(self):
        from torch.utils.serialization import config
        torch.save([tensors(), training(), [torch.full((i,), i) for i in range(40)]], self.source)
        self.probe.rewrite(self.source, self.target)
        want = torch.load(self.source, weights_only=False)
        config.load.calculate_storage_offsets = True
        try:
            same(want, torch.load(self.target, mmap=True, weights_only=True))
        finally:
            config.load.calculate_storage_offsets = False

    def test_every_member_is_where_torch_would_put_it(self):
        """Same sizes and names in, same offsets out: the container rules are those of torch."""
        torch.save({"a": torch.ones(3), "b": torch.zeros(0), "c": torch.ones(1000)}, self.source)
        self.probe.rewrite(self.source, self.target)
        with zipfile.ZipFile(self.target) as ours:
            infos = ours.infolist()
        raw = self.target.read_bytes()
        for info in infos:
            name, extra = (int.from_bytes(raw[info.header_offset + at:info.header_offset + at + 2], "little")
                           for at in (26, 28))
            self.assertEqual((info.header_offset + 30 + name + extra) % 64, 0, info.filename)


if __name__ == "__main__":
    RoundTrip.probe = Probe(sys.argv.pop(1))
    unittest.main()
