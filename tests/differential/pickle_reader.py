# SPDX-License-Identifier: Apache-2.0
"""Reads the objects that Python finds in a pickle, with a restricted unpickler that knows as few classes as this
project."""

import collections
import io
import pickle
import pickletools
import struct

from fakes import TYPED, UNTYPED, Storage

# Types that Python's unpickler returns unchanged.
KEPT = {kind.__name__: kind for kind in (set, frozenset, bytes, bytearray)}


class Refused(pickle.UnpicklingError):
    pass


class Meta(type):
    def __call__(cls, *args):
        return Record.build(cls, "reduce", args)


class Record(metaclass=Meta):
    """A call that is not run."""

    def __new__(cls, *args, **kwargs):
        return Record.build(cls, "newobjex", (args, kwargs)) if kwargs else Record.build(cls, "newobj", args)

    @staticmethod
    def build(cls, how, args):
        made = object.__new__(cls)
        made.__dict__.update(how=how, args=args, has_state=False, state=None, items=[], entries=[])
        return made

    def __setstate__(self, state):
        if self.has_state:
            raise Refused("BUILD twice")
        self.__dict__.update(has_state=True, state=state)

    def append(self, item):
        self.items.append(item)

    def extend(self, items):
        self.items.extend(items)

    def __setitem__(self, key, value):
        self.entries += [key, value]


class Ordered(collections.OrderedDict):
    dotted = "collections.OrderedDict"
    has_state = False
    state = None

    def __setstate__(self, state):
        self.has_state, self.state = True, state


class SizeRead:
    dotted = "torch.Size"

    def __new__(cls, extents):
        if type(extents) is not tuple or not all(type(extent) is int for extent in extents):
            raise Refused("size")
        made = object.__new__(cls)
        made.extents = extents
        return made


class TensorRead:
    def __init__(self, storage, dtype, place, grad=False, parameter=False, attributes=None):
        self.storage, self.dtype, self.place = storage, dtype, place
        self.grad, self.parameter, self.attributes = grad, parameter, attributes or None

    def again(self, **changes):
        made = TensorRead(self.storage, self.dtype, self.place, self.grad, self.parameter, self.attributes)
        made.__dict__.update(changes)
        return made


def tensor_read(storage, offset, sizes, strides, grad=False, hooks=None, *more):
    if not isinstance(storage, Storage) or hooks or type(grad) is not bool:
        raise Refused("arguments of a tensor")
    sizes, strides = (one.extents if isinstance(one, SizeRead) else one for one in (sizes, strides))
    for number in (offset, *sizes, *strides):
        if type(number) is not int or number < 0:
            raise Refused("place of a tensor")
    dtype = more[0].dotted.removeprefix("torch.") if more and isinstance(more[0], type) else None
    kind = storage.kind.dotted.rsplit(".", 1)[1]
    if (kind == "UntypedStorage") != (dtype is not None) or (dtype and dtype not in SIZES):
        raise Refused("type of a tensor")
    room = storage.count // SIZES[dtype] if dtype else storage.count
    last = offset + sum((s - 1) * t for s, t in zip(sizes, strides)) if 0 not in sizes else -1
    if last >= room or len(sizes) != len(strides):
        raise Refused("a tensor outside its storage")
    return TensorRead(storage, dtype or TYPED[kind][0], (offset, sizes, strides), grad)


def parameter_read(tensor, grad, hooks, attributes=None):
    if not isinstance(tensor, TensorRead) or hooks or type(grad) is not bool:
        raise Refused("arguments of a parameter")
    return tensor.again(parameter=True, grad=grad, attributes=attributes or None)


def from_type_read(rebuild, cls, arguments, attributes):
    made = rebuild(*arguments)
    if getattr(cls, "dotted", "") not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise Refused("type of a tensor")
    made.parameter = made.parameter or cls.dotted != "torch.Tensor"
    made.attributes = attributes or None
    return made


def device_read(tensor, dtype, _device, grad):
    if dtype.dotted != "torch." + tensor.dtype:
        raise Refused("device tensor of another type")
    return tensor.again(grad=grad)


def nested(base, name):
    """A class inside another, as protocol 2 names it."""
    made = Meta(name, (Record,), {})
    made.origin, made.dotted = (base, name), None
    return made


def encoded(text, encoding):
    if encoding not in ("latin1", "latin-1"):
        raise Refused("encoding")
    return text.encode("latin1")


class Known:
    """A function that is called, and has a name where it is a value."""

    def __init__(self, dotted, call):
        self.dotted, self.call = dotted, call

    def __call__(self, *args):
        return self.call(*args)


SIZES = {**dict(TYPED.values()), **UNTYPED}
CALLS = {"torch._utils._rebuild_tensor": tensor_read, "torch._utils._rebuild_tensor_v2": tensor_read,
         "torch._utils._rebuild_tensor_v3": tensor_read, "torch._utils._rebuild_parameter": parameter_read,
         "torch._utils._rebuild_parameter_with_state": parameter_read,
         "torch._tensor._rebuild_from_type_v2": from_type_read,
         "torch._utils._rebuild_device_tensor_from_cpu_tensor": device_read,
         "_codecs.encode": encoded, "builtins.getattr": nested,
         "copyreg.__newobj__": lambda cls, *args: cls.__new__(cls, *args),
         "copyreg.__newobj_ex__": lambda cls, args, kwargs: Record.build(cls, "newobjex", (args, kwargs))}
VALUES = {"collections.OrderedDict": Ordered, "torch.Size": SizeRead,
          **{dotted: Known(dotted, call) for dotted, call in CALLS.items()}}


class Unpickler(pickle._Unpickler):  # pylint: disable=protected-access
    """Python's own machine over a closed table of names."""

    dispatch = dict(pickle._Unpickler.dispatch)  # pylint: disable=protected-access

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.classes, self.storages = {}, {}

    def find_class(self, module, name):
        if self.proto < 3:
            module, name = pickle._compat_pickle.NAME_MAPPING.get(  # pylint: disable=protected-access
                (module, name), (pickle._compat_pickle.IMPORT_MAPPING.get(module, module), name))
        if module == "torch.tensor":  # as releases before 1.9 called it
            module = "torch._tensor"
        key = f"{module}.{name}"
        if key in VALUES:
            return VALUES[key]
        if module == "builtins" and name in KEPT:
            return KEPT[name]
        first, *rest = name.split(".")
        made = self.classes.get((module, first))
        if made is None:
            made = self.classes[module, first] = Meta(first, (Record,), {})
            made.dotted, made.origin = f"{module}.{first}", None
        for inner in rest:
            made = nested(made, inner)
        return made

    def load_reduce(self):
        self.no_sizes()
        super().load_reduce()

    def load_newobj(self):
        self.no_sizes()
        super().load_newobj()

    def no_sizes(self):
        """bytes(10**12) is not a text."""
        called, args = self.stack[-2:]
        if called in (bytes, bytearray) and any(type(arg) not in (bytes, str) for arg in args):
            raise Refused("bytes of a number")

    def load_newobj_ex(self):
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.append(Record.build(cls, "newobjex", (args, kwargs)))

    dispatch.update({pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_newobj,
                     pickle.NEWOBJ_EX[0]: load_newobj_ex})

    def persistent_load(self, pid):
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(kind, type) or type(count) is not int or count < 0:
            raise Refused("persistent id")
        known = self.storages.setdefault(key, Storage(kind, key, count))
        if (known.kind, known.count) != (kind, count):
            raise Refused("a storage that is declared twice")
        return known


class Render:
    """The text that differential_probe makes of a graph."""

    def __init__(self, keys=None):
        self.out, self.numbers, self.numbered, self.keys, self.alive = [], {}, True, keys or {}, []

    def named(self, value):
        if not self.numbered:
            return False
        fresh = id(value) not in self.numbers
        number = self.numbers.setdefault(id(value), len(self.numbers))
        self.alive.append(value)
        self.out.append(("#" if fresh else "@") + str(number))
        return not fresh

    def items(self, begin, values, end):
        self.out.append(begin)
        for value in values:
            self.add(value)
            self.out.append(" ")
        self.out.append(end)

    def set(self, values):
        before, numbered = self.out, self.numbered
        self.numbered, texts = False, set()
        for value in values:
            self.out = []
            self.add(value)
            texts.add("".join(self.out))
        self.out, self.numbered = before, numbered
        self.out.append("{~" + "".join(text + " " for text in sorted(texts)) + "}")

    def entries(self, value):
        return [one for entry in value.items() for one in entry]

    def object(self, callable_text, how, args, value=None):
        self.out.append(f"<{how} ")
        self.add(callable_text)
        self.items("(", args, ")")
        if value is not None:
            if value.has_state:
                self.out.append("/")
                self.add(value.state)
            if value.items:
                self.items("[", value.items, "]")
            if value.entries:
                self.items("{", value.entries, "}")
        self.out.append(">")

    def tensor(self, value):
        offset, sizes, strides = value.place
        numbers = "".join("(" + "".join(f"{n} " for n in part) + ")" for part in (sizes, strides))
        key = hexed(self.keys.get(value.storage.key, value.storage.key))
        flags = "".join("T" if flag else "F" for flag in (value.grad, value.parameter))
        self.out.append(f"T({key} {value.dtype} {offset} {numbers}{flags}")
        if value.attributes is not None:
            self.add(value.attributes)
        self.out.append(")")

    def add(self, value):
        out = self.out
        if value is None:
            out.append("N")
        elif value is True or value is False:
            out.append("T" if value else "F")
        elif type(value) is int:
            out.append(f"i{value}" if -(1 << 63) <= value < 1 << 63 else "l" + pickle.encode_long(value).hex())
        elif type(value) is float:
            out.append("f" + str(struct.unpack("<Q", struct.pack("<d", value))[0]))
        elif type(value) is str:
            out.append("s" + hexed(value))
        elif type(value) is bytes:
            out.append("b" + value.hex())
        elif type(value) is tuple:
            self.items("(", value, ")")
        elif isinstance(value, SizeRead):
            self.items("S(", value.extents, ")")
        elif type(value) is frozenset:
            out.append("z")
            self.set(value)
        elif isinstance(value, type) and value in KEPT.values():
            out.append(f"gbuiltins.{value.__name__}")
        elif isinstance(value, Known) or value in (Ordered, SizeRead) or (isinstance(value, Meta) and not value.origin):
            out.append("g" + value.dotted)
        elif not self.named(value):
            self.numbered_value(value)

    def numbered_value(self, value):
        out = self.out
        if type(value) is bytearray:
            out.append("a" + value.hex())
        elif type(value) is list:
            self.items("[", value, "]")
        elif type(value) is set:
            self.set(value)
        elif type(value) is dict:
            self.items("{", self.entries(value), "}")
        elif isinstance(value, Ordered):
            self.items("O{", self.entries(value), "}")
            if value.has_state:
                out.append("/")
                self.add(value.state)
        elif isinstance(value, TensorRead):
            self.tensor(value)
        elif isinstance(value, Meta):
            out.append("<reduce gbuiltins.getattr")
            self.items("(", value.origin, ")")
            out.append(">")
        elif isinstance(value, Record):
            self.object(type(value), value.how, value.args, value)
        else:
            raise Refused(f"a value of {type(value)}")


def hexed(text):
    return (text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).hex()


def read(data, keys=None):
    """\\returns the canonical text of a pickle as Python reads it. \\param keys  other names of storages"""
    end = None
    try:
        for opcode, _, place in pickletools.genops(data):
            end = place if opcode.name == "STOP" else None
    except UnicodeDecodeError:  # of names of classes, which the unpickler reads as UTF-8
        end = len(data) - 1
    if end != len(data) - 1:
        raise Refused("bytes after STOP")
    root = Unpickler(data).load()
    render = Render(keys)
    render.add(root)
    return "".join(render.out)
