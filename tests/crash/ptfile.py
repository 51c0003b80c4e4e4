# SPDX-License-Identifier: Apache-2.0
"""Reads and writes .pt files with the standard library alone: objects of unknown classes become
stand-ins that are written back as they were. For tests that make checkpoints, whole or broken."""

import codecs
import collections
import io
import pathlib
import pickle
import struct
import sys
import types
import zipfile

REAL = {("collections", "OrderedDict"): collections.OrderedDict, ("pathlib", "PosixPath"): pathlib.PosixPath,
        ("_codecs", "encode"): codecs.encode}


class Constant:
    """A global that is not called: torch.float32."""

    def __init__(self, module, name):
        self.__module__ = module
        self.name = name

    def __reduce__(self):
        return self.name


class Object:
    """An instance of a class that is not there."""

    def __new__(cls, *args, **_):
        self = super().__new__(cls)
        self.args = args
        self.state = None
        return self

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.state = state

    def __reduce__(self):
        return (type(self), self.args) if self.state is None else (type(self), self.args, self.state)


def register(module, name, value):
    """Makes module.name importable, as the pickler asks for it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], name, value)
    return value


def find(module, name):
    if (module, name) in REAL:
        return REAL[module, name]
    known = getattr(sys.modules.get(module), name, None)
    if isinstance(known, Constant) or (isinstance(known, type) and issubclass(known, Object)):
        return known
    if module == "torch" and name[0].islower() and name != "device":  # a function
        return register(module, name, Constant(module, name))
    if module in ("builtins", "__builtin__") and name in ("set", "frozenset", "slice"):
        return getattr(__builtins__, name) if hasattr(__builtins__, name) else __builtins__[name]
    stand_in = type(name, (Object,), {"__module__": module, "__qualname__": name})
    return register(module, name, stand_in)


class Storage:
    """The bytes behind tensors. `kind` is the class: torch.FloatStorage."""

    def __init__(self, kind, key, elements, data, location="cpu"):
        self.kind = kind
        self.key = key
        self.elements = elements
        self.data = data
        self.location = location


class Reader(pickle.Unpickler):
    def __init__(self, file, storages):
        super().__init__(file)
        self.storages = storages
        self.known = {}

    def find_class(self, module, name):
        return find(module, name)

    def persistent_load(self, pid):
        _, kind, key, location, elements = pid
        if key not in self.known:
            self.known[key] = Storage(kind, key, elements, self.storages[key], location)
        return self.known[key]


class Writer(pickle._Pickler):  # pylint: disable=protected-access
    """The pickler in Python: the one in C refuses names that are not importable."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = {}

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        key = self.storages.setdefault(id(obj), (str(len(self.storages)), obj))[0]
        return ("storage", obj.kind, key, obj.location, obj.elements)


def load(path):
    """\\returns the object"""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        folder = names[0].split("/")[0]
        storages = {name.rsplit("/", 1)[1]: archive.read(name)
                    for name in names if name.startswith(folder + "/data/")}
        return Reader(io.BytesIO(archive.read(f"{folder}/data.pkl")), storages).load()


def dumps(obj):
    """\\returns the pickle, the storages' bytes by key"""
    out = io.BytesIO()
    writer = Writer(out)
    writer.dump(obj)
    return out.getvalue(), {key: storage.data for key, storage in writer.storages.values()}


def save(path, obj):
    text, storages = dumps(obj)
    write(path, text, storages)


def write(path, text, storages, folder="archive", extra=()):
    """A .pt file with a pickle and storages; `extra` are members (name, bytes) of any kind."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        put(archive, f"{folder}/data.pkl", text)
        for key, data in storages.items():
            put(archive, f"{folder}/data/{key}", data)
        put(archive, f"{folder}/version", b"3\n")
        for name, data in extra:
            put(archive, name, data)


def put(archive, name, data):
    """Aligned to 64 bytes with an extra field, as the trainer's own writer does it."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    start = archive.fp.tell() + 30 + len(name.encode()) + 4
    fill = -start % 64
    info.extra = struct.pack("<2sH", b"FB", fill) + b"Z" * fill
    archive.writestr(info, data)


def tensor(kind, data, shape, elem_bytes):
    """A tensor of its own storage. \\param kind  torch.FloatStorage's name: "FloatStorage" """
    elements = len(data) // elem_bytes
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    rebuild = find("torch._utils", "_rebuild_tensor_v2")
    storage = Storage(find("torch", kind), "", elements, data)
    return rebuild(storage, 0, tuple(shape), tuple(strides), False, collections.OrderedDict())


def size(*extents):
    return find("torch", "Size")(tuple(extents))
