# SPDX-License-Identifier: Apache-2.0
"""State dicts of random form as pickles."""

import argparse
import collections
import datetime
import io
import pathlib
import pickle
import pickletools
import struct
import types
import uuid

import fakes
from fakes import TYPED, UNTYPED, Storage, Tensor

fakes.install()

WORDS = ("weight", "bias", "layers", "attn", "mlp", "exp_avg", "step", "gate", "experts", "norm")


class Maker:
    """Makes one state dict out of a random.Random."""

    def __init__(self, choose):
        self.choose = choose
        self.made = []  # objects that may occur again: containers, tensors, objects
        self.storages = []

    def name(self):
        kind = self.choose.randrange(12)
        if kind < 6:
            return ".".join(self.choose.choice(WORDS) for _ in range(self.choose.randrange(1, 5)))
        if kind == 6:
            return "".join(chr(self.choose.choice((0x41, 0xe4, 0x3b1, 0x65e5, 0x1f600, 0x7f, 0x80, 0x7ff, 0x800,
                                                   0xffff, 0x10ffff))) for _ in range(self.choose.randrange(9)))
        if kind == 7:
            return "x" * self.choose.choice((0, 1, 255, 256, 257, 1000))
        if kind == 8:
            return self.choose.choice(("\0", "a\nb", "\udc80", "\ud800x", "../up", "/", "__class__", "\ufeff"))
        return f"{self.choose.choice(WORDS)}.{self.choose.randrange(1000)}"

    def number(self):
        bits = self.choose.choice((1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63, 64, 65, 127, 128, 2038))
        edge = self.choose.choice((0, 1, -1, self.choose.getrandbits(bits)))
        return self.choose.choice((1, -1)) * ((1 << bits) + edge) if self.choose.randrange(2) else edge

    def real(self):
        return struct.unpack("<d", self.choose.choice((
            struct.pack("<d", self.choose.uniform(-1, 1)), self.choose.randbytes(8),
            b"\0\0\0\0\0\0\0\x80", b"\0\0\0\0\0\0\xf0\x7f", b"\1\0\0\0\0\0\xf8\x7f")))[0]

    def leaf(self):
        return self.choose.choice((
            lambda: None, lambda: True, lambda: False, self.number, self.number, self.real, self.name,
            lambda: self.choose.randbytes(self.choose.choice((0, 1, 5, 255, 256, 300))), self.tensor,
            lambda: fakes.Size(self.choose.randrange(9) for _ in range(self.choose.randrange(4)))))()

    def key(self):
        return self.choose.choice((self.name, self.name, self.name, self.number, self.real, lambda: None,
                                   lambda: (self.name(), self.number()), lambda: self.choose.randbytes(3),
                                   lambda: frozenset((self.name(), 2))))()

    def storage(self):
        if self.storages and self.choose.randrange(3) == 0:
            return self.choose.choice(self.storages)
        count = self.choose.choice((0, 1, 7, 64, 1000))
        key = str(len(self.storages))
        if self.choose.randrange(5) == 0:
            made = Storage(fakes.UntypedStorage, key, 8 * count)
        else:
            made = Storage(fakes.TYPED_STORAGES[self.choose.choice(list(TYPED))], key, count)
        self.storages.append(made)
        return made

    def tensor(self):
        storage = self.storage()
        untyped = storage.kind.__name__ == "UntypedStorage"
        dtype = self.choose.choice(list(UNTYPED)) if untyped else None
        room = storage.count // UNTYPED[dtype] if untyped else storage.count
        place = self.place(room)
        form = "v3" if untyped else self.choose.choice(
            ("old", "v2", "v2", "v2", "parameter", "state", "typed", "device"))
        attributes = dtype
        if form in ("state", "typed"):
            attributes = {self.name(): self.leaf() for _ in range(self.choose.randrange(3))}
        made = Tensor(form, storage, place, attributes, bool(self.choose.randrange(2)))
        self.made.append(made)
        return made

    def place(self, room):
        """Offset, sizes and strides inside a storage of `room` elements."""
        sizes = tuple(self.choose.randrange(0 if self.choose.randrange(6) == 0 else 1, 5)
                      for _ in range(self.choose.randrange(4)))
        strides, step = [], 1
        for size in reversed(sizes):
            strides.append(step)
            step *= max(size, 1)
        strides = tuple(reversed(strides))
        if self.choose.randrange(3) == 0:  # another view: turned, or spread over one element
            turned = self.choose.sample(range(len(sizes)), len(sizes))
            sizes, strides = tuple(sizes[i] for i in turned), tuple(strides[i] for i in turned)
            strides = strides if self.choose.randrange(2) else (0,) * len(sizes)
        span = 0 if 0 in sizes else 1 + sum((s - 1) * t for s, t in zip(sizes, strides))
        if span > room:
            return 0, (0,), (1,)
        return self.choose.randrange(room - span + 1), sizes, strides

    def value(self, depth):
        if self.made and self.choose.randrange(6) == 0:
            return self.choose.choice(self.made)
        if depth == 0 or self.choose.randrange(3) == 0:
            return self.leaf()
        made = self.choose.choice((self.dictionary, self.dictionary, self.sequence, self.sequence, self.odd))(depth - 1)
        if not isinstance(made, tuple):
            self.made.append(made)
        return made

    def dictionary(self, depth):
        kind = self.choose.choice((dict, dict, collections.OrderedDict))
        made = kind()
        for _ in range(self.choose.choice((0, 1, 2, 3, 5, 8))):
            made[self.key()] = self.value(depth)
        if kind is collections.OrderedDict and self.choose.randrange(4) == 0:
            made._metadata = {"version": 1}  # as state dicts of modules have it
        return made

    def sequence(self, depth):
        items = [self.value(depth) for _ in range(self.choose.choice((0, 1, 2, 3, 4, 6)))]
        if self.choose.randrange(60) == 0:
            items = list(range(self.choose.choice((999, 1000, 1001, 2500))))  # batches of the pickler
        return items if self.choose.randrange(2) else tuple(items)

    def odd(self, depth):
        """Objects, sets and other values that state dicts carry."""
        keyed = {f"a{i}": self.value(depth) for i in range(self.choose.randrange(4))}
        items = list(keyed.values())
        return self.choose.choice((
            lambda: {self.key() for _ in range(3)}, lambda: frozenset(self.key() for _ in range(3)),
            lambda: bytearray(self.choose.randbytes(self.choose.randrange(400))),
            lambda: fakes.Plain(**keyed), lambda: argparse.Namespace(**keyed), lambda: types.SimpleNamespace(**keyed),
            lambda: fakes.Outer.Inner(**keyed), lambda: fakes.Outer.Inner.Deeper(**keyed),
            lambda: fakes.Slots(items, 2), lambda: fakes.Newly(*items), lambda: fakes.Newly(**keyed),
            lambda: fakes.Items(items), lambda: fakes.Entries(keyed), lambda: fakes.Reduced(*items),
            lambda: collections.deque(items, 7), lambda: collections.defaultdict(list, keyed),
            lambda: collections.Counter("abca"), lambda: 1 + 2j, lambda: range(1, 9, 2), lambda: slice(1, None, 2),
            lambda: datetime.datetime(2020, 1, 2, 3), lambda: uuid.UUID(int=5), lambda: pathlib.PurePosixPath("/a/b"),
            lambda: [int, dict, fakes.Plain, fakes.Outer.Inner], lambda: collections.OrderedDict(keyed)))()


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return identity(obj)


class PurePickler(pickle._Pickler):  # pylint: disable=protected-access
    def persistent_id(self, obj):
        return identity(obj)


def identity(obj):
    return ("storage", obj.kind, obj.key, "cpu", obj.count) if isinstance(obj, Storage) else None


def make(choose, depth=4):
    """\\returns the state dict, its storages"""
    maker = Maker(choose)
    root = {maker.name(): maker.value(depth) for _ in range(choose.randrange(1, 7))}
    return root, maker.storages


def write(choose, root, protocol):
    """One of the ways in which Python writes a pickle."""
    out = io.BytesIO()
    how = choose.randrange(8)
    (PurePickler if how < 3 else Pickler)(out, protocol).dump(root)
    data = out.getvalue()
    return pickletools.optimize(data) if how in (2, 3) and protocol >= 2 else data
