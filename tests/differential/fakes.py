# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of torch that its pickles name, and classes that only these tests have: with them
Python's own pickler writes what torch.save would, where there is no torch."""

import collections
import sys
import types

# Storage class: element type, bytes of an element.
TYPED = {"DoubleStorage": ("float64", 8), "FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2),
         "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
         "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1),
         "BoolStorage": ("bool", 1), "ComplexDoubleStorage": ("complex128", 16),
         "ComplexFloatStorage": ("complex64", 8)}
# Types without a storage class: they are stored in untyped storages.
UNTYPED = {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1,
           "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1, "float8_e8m0fnu": 1}


def module(name, **members):
    made = types.ModuleType(name)
    for key, value in members.items():
        if isinstance(value, (type, types.FunctionType)):
            value.__module__, value.__qualname__, value.__name__ = name, key, key
        setattr(made, key, value)
    sys.modules[name] = made
    return made


class Storage:
    """The storage that a persistent id refers to."""

    def __init__(self, kind, key, count):
        self.kind, self.key, self.count = kind, key, count


class DType:
    def __init__(self, name):
        self.name = name
        self.__module__ = "torch"

    def __reduce__(self):
        return self.name


class Size(tuple):
    def __reduce__(self):
        return Size, (tuple(self),)


def _named(name):
    return types.FunctionType((lambda *_: None).__code__, {}, name)


REBUILD = {name: _named(name) for name in (
    "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
    "_rebuild_parameter_with_state", "_rebuild_device_tensor_from_cpu_tensor")}
from_type = _named("_rebuild_from_type_v2")


class Tensor:
    """\\param form  how torch pickles it: old, v2, v3, parameter, state, typed, device"""

    def __init__(self, form, storage, place, attributes=None, requires_grad=False):
        self.form, self.storage, self.place = form, storage, place
        self.attributes, self.requires_grad = attributes, requires_grad
        self.inner = None
        if form in ("parameter", "state", "device"):
            self.inner = Tensor("v2", storage, place)

    def __reduce_ex__(self, _):
        hooks = collections.OrderedDict()
        if self.form == "old":
            return REBUILD["_rebuild_tensor"], (self.storage, *self.place)
        if self.form == "v2":
            return REBUILD["_rebuild_tensor_v2"], (self.storage, *self.place, self.requires_grad, hooks)
        if self.form == "v3":
            dtype = getattr(sys.modules["torch"], self.attributes)
            return (REBUILD["_rebuild_tensor_v3"],
                    (self.storage, *self.place, self.requires_grad, hooks, dtype))
        if self.form == "parameter":
            return REBUILD["_rebuild_parameter"], (self.inner, self.requires_grad, hooks)
        if self.form == "state":
            return (REBUILD["_rebuild_parameter_with_state"],
                    (self.inner, self.requires_grad, hooks, self.attributes))
        if self.form == "device":
            dtype = getattr(sys.modules["torch"], TYPED[self.storage.kind.__name__][0])
            return REBUILD["_rebuild_device_tensor_from_cpu_tensor"], (self.inner, dtype, "cuda:0", True)
        arguments = (self.storage, *self.place, self.requires_grad, hooks)
        return from_type, (REBUILD["_rebuild_tensor_v2"], Tensor, arguments, self.attributes)


class Parameter:
    pass


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Outer:
    class Inner(Plain):
        class Deeper(Plain):
            pass


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __getstate__(self):
        return None, {"left": self.left, "right": self.right}


class Newly:
    """Built by __new__ with arguments, of which some have names."""

    def __new__(cls, *args, **kwargs):
        made = object.__new__(cls)
        made.given = (args, kwargs)
        return made

    def __getnewargs_ex__(self):
        return self.given


class Items(list):
    pass


class Entries(dict):
    pass


class Reduced:
    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return Reduced, self.args


TYPED_STORAGES = {name: type(name, (), {}) for name in TYPED}
UntypedStorage = type("UntypedStorage", (), {})


def install():
    torch = module("torch", Size=Size, Tensor=Tensor, **TYPED_STORAGES)
    for name in [kind for kind, _ in TYPED.values()] + list(UNTYPED):
        setattr(torch, name, DType(name))
    module("torch._utils", **REBUILD)
    module("torch._tensor", _rebuild_from_type_v2=from_type)
    module("torch.storage", UntypedStorage=UntypedStorage)
    module("torch.nn.parameter", Parameter=Parameter)
    sample = module("sample", Plain=Plain, Outer=Outer, Slots=Slots, Newly=Newly, Items=Items,
                    Entries=Entries, Reduced=Reduced)
    for cls, name in ((Outer.Inner, "Outer.Inner"), (Outer.Inner.Deeper, "Outer.Inner.Deeper")):
        cls.__module__, cls.__qualname__ = sample.__name__, name
