# SPDX-License-Identifier: Apache-2.0
"""Builds the model, the parameter groups and the optimizer of a description (draw.py)."""

import io
import zlib

import torch
from torch import nn

RATE = 2e-2
BASE = 7     # the seed of the weights of the run that makes a checkpoint
SAMPLES = 6  # of a step, over all ranks


class Part(nn.Module):
    """A module with features. What get_extra_state returns counts the calls, so that it differs from a fresh model's."""

    def __init__(self, case, part):
        super().__init__()
        self.width, self.part, self.calls = case["width"], part, 0
        if "extra" in part:  # only a module that has them puts extra states into its state dict
            self.__class__ = type("ExtraPart", (type(self),), {"get_extra_state": Part.extra, "set_extra_state": Part.set_extra})
        for kind in part.get("buffers", ()):
            self.add_buffer(kind)

    def add_buffer(self, kind):
        w = self.width
        value = {"float": lambda: torch.rand(w), "int": lambda: torch.arange(3), "bool": lambda: torch.tensor([True, False]),
                 "scalar": lambda: torch.tensor(0.5), "strided": lambda: torch.rand(3, 4).t(), "temporary": lambda: torch.linspace(0, 1, 3),
                 "absent": lambda: None, "column": lambda: torch.rand(4, 3)[:, 1]}[kind]()
        self.register_buffer(f"{kind}_buffer", value, persistent=kind != "temporary")

    def extra(self):
        kind = self.part["extra"]
        if kind == "tensor":
            return torch.full((5,), self.calls, dtype=torch.uint8)
        if kind == "empty":
            return torch.empty(0, dtype=torch.uint8)
        if kind == "dict":
            return {"calls": self.calls, "history": torch.arange(3.0) * self.calls, "names": ["a", None]}
        return io.BytesIO(b"calls %d" % self.calls) if kind == "bytes" else None

    def set_extra(self, state):
        kind = self.part["extra"]
        if kind == "tensor":
            self.calls = int(state[0])
        elif kind == "dict":
            self.calls = state["calls"]
        elif kind == "bytes":
            state.seek(0)
            self.calls = int(state.read().split()[1])

    def forward(self, h):
        self.calls += 1
        for name, buffer in self.named_buffers(recurse=False):  # buffers of kind "absent" are not among them
            h = h * (1 + buffer.float().mean().to(h.dtype) / 20)
            if self.training and name == "int_buffer":
                buffer += 1
        if self.part.get("extra") in ("tensor", "dict", "bytes"):
            h = h * (1 + self.calls / 100)  # a wrong extra state changes the loss
        return h + 0.3 * torch.tanh(self.use(h))


class Linear(Part):
    def __init__(self, case, part):
        super().__init__(case, part)
        self.weight = nn.Parameter(torch.randn(self.width, self.width) / 2)
        if part["bias"]:
            self.bias = nn.Parameter(torch.randn(self.width) / 4)

    def use(self, h):
        return nn.functional.linear(h, self.weight, self.bias if self.part["bias"] else None)


class Mlp(Part):
    def __init__(self, case, part):
        super().__init__(case, part)
        self.wide = nn.Linear(self.width, part["inner"], bias=part["bias"])
        self.narrow = nn.Linear(part["inner"], self.width)

    def use(self, h):
        return self.narrow(nn.functional.gelu(self.wide(h)))


class Norm(Part):
    def __init__(self, case, part):
        super().__init__(case, part)
        self.norm = nn.LayerNorm(self.width, bias=part["bias"])

    def use(self, h):
        return self.norm(h)


class Vector(Part):
    """Parameters of one dimension, of one element too."""

    def __init__(self, case, part):
        super().__init__(case, part)
        self.gain = nn.Parameter(torch.randn(self.width))
        self.one = nn.Parameter(torch.ones(1))

    def use(self, h):
        return h * self.gain * self.one


class List(Part):
    def __init__(self, case, part):
        super().__init__(case, part)
        self.rows = nn.ParameterList(torch.randn(self.width) for _ in range(1 + part["inner"] % 3))

    def use(self, h):
        return sum(h * row for row in self.rows)


class Dict(Part):
    def __init__(self, case, part):
        super().__init__(case, part)
        slash = "/" if "/" in part["path"] else "_"
        self.maps = nn.ParameterDict({f"in{slash}q": torch.randn(part["inner"], self.width) / 2, "out": torch.randn(
            self.width, part["inner"]) / 2})

    def use(self, h):
        first, second = self.maps.values()
        return h @ first.t() @ second.t()


class Cube(Part):
    """Matrices in one parameter of three dimensions."""

    def __init__(self, case, part):
        super().__init__(case, part)
        self.stack = nn.Parameter(torch.randn(2, self.width, self.width) / 2)

    def use(self, h):
        return h @ self.stack[0] + torch.relu(h @ self.stack[1])


class Quant(Part):
    """A frozen weight of eight bits with scales that are in the state dict but neither parameter nor buffer."""

    def __init__(self, case, part):
        super().__init__(case, part)
        self.weight = nn.Parameter(torch.randint(0, 255, (self.width, self.width), dtype=torch.uint8), requires_grad=False)
        self.absmax, self.quant_map = torch.rand(self.width), torch.arange(16) / 8
        # PyTorch's get_state_dict wants every key to be the path of an attribute.
        self.inside = "" if case["program"] == "torch" else "weight."

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{self.inside}absmax"] = self.absmax
        destination[f"{prefix}{self.inside}quant_map"] = self.quant_map

    def _load_from_state_dict(self, state, prefix, local, strict, missing, *more):
        for name in ("absmax", "quant_map"):
            key = f"{prefix}{self.inside}{name}"
            if key in state:
                setattr(self, name, state.pop(key).clone())
            elif strict:
                missing.append(key)
        super()._load_from_state_dict(state, prefix, local, strict, missing, *more)

    def use(self, h):
        weight = (self.weight.float() / 255 - 0.5) * self.absmax[:, None]
        return h @ weight.to(h.dtype) * self.quant_map[3].to(h.dtype)


KINDS = {"linear": Linear, "mlp": Mlp, "norm": Norm, "vector": Vector, "list": List, "dict": Dict, "cube": Cube, "quant": Quant}


class Box(nn.Module):
    """A level of the tree."""


class Model(nn.Module):
    """The parts of a description in their order, each below its path."""

    def __init__(self, case):
        super().__init__()
        self.order = []  # parts that are used, by index; a plain list: they are modules below their paths only
        made = []
        for part in case["parts"]:
            module = made[part["share"]] if "share" in part else KINDS[part["kind"]](case, part)
            if "tie" in part:
                module.weight = made[part["tie"]].weight
            elif "share" not in part:
                set_up(module, part)
            *above, name = part["path"].split(".")
            box = self
            for word in above:
                if word not in box._modules:
                    box.add_module(word, Box())
                box = box._modules[word]
            box.add_module(name, module)
            made.append(module)
            if "unused" not in part:
                self.order.append(part["path"])

    def forward(self, x, y):
        for path in self.order:
            x = self.at(path)(x)
        return (x.float() - y).square().mean()

    def at(self, path):
        module = self
        for word in path.split("."):
            module = module._modules[word]
        return module


def set_up(module, part):
    """Freezes parameters that are frozen from the start, and makes matrices a part of wider ones if requested."""
    weights = list(module.parameters())
    if part.get("frozen"):
        for weight in weights if part["frozen"] == "all" else weights[:1]:
            weight.requires_grad_(False)
    if part.get("strided"):
        for weight in weights:
            if weight.dim() > 1:
                weight.data = torch.cat([weight.data, torch.rand(*weight.shape[:-1], 2)], -1)[..., :weight.shape[-1]]


def make_model(case, seed):
    torch.manual_seed(seed)
    return Model(case)


def load_base(model, case):
    """Weights that are left out of checkpoints are those of a base model, here of the run that makes the checkpoint."""
    base = dict(make_model(case, BASE).named_parameters())
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            weight.data.copy_(base[name].data)


def late_weights(model, case):
    """Parameters that are frozen while the run continues."""
    return [weight for part in case["parts"] if part.get("late") and "share" not in part
            for weight in model.at(part["path"]).parameters()]


def first_names(model):
    """The first name of every parameter and buffer, by each of its names."""
    first, found = {}, {}
    for each in (model.named_parameters, model.named_buffers):
        for name, tensor in each(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def names_of(model):
    """The first name of every parameter, by its id."""
    names = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), name)
    return names


def make_groups(model, case):
    """Parameter groups with hyper-parameters of their own, by name if the description requests it."""
    names, wanted = names_of(model), case["optimizer"]
    members = [[] for _ in range(wanted["groups"])]
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        members[zlib.crc32(f"{wanted['salt']}{names[id(weight)]}".encode()) % len(members)].append(weight)
    hyper = [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": rate(case, RATE / 2)}, {"weight_decay": 0.02, "lr": rate(case, RATE / 3)}]
    return [{"params": weights, **values} for weights, values in zip(members, hyper) if weights]


def rate(case, value):
    return torch.tensor(value) if case["optimizer"]["kind"] == "tensor_lr" else value


def make_optimizer(groups, case):
    kind = case["optimizer"]["kind"]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    more = {"amsgrad": {"amsgrad": True}, "tensor_lr": {"foreach": False}}.get(kind, {})
    return torch.optim.AdamW(groups, lr=rate(case, RATE), betas=(0.9, 0.95), **more)


def batch(case, step, rank, ranks):
    """This rank's samples of a step, which do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(SAMPLES, case["width"], generator=generator)
    y = torch.randn(SAMPLES, case["width"], generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]
