# SPDX-License-Identifier: Apache-2.0
"""Modules with more in their state dicts than parameters and buffers in row-major order."""

import io

import torch
from torch import nn

# Results of get_extra_state() of a module: libraries use each of these.
STATES = [
    lambda: None,
    lambda: {"seen": 3, "history": torch.arange(4.0), "names": ["a", ("b", 2.5)]},
    lambda: io.BytesIO(b"amax\0history\xff"),
    lambda: torch.arange(5, dtype=torch.uint8),
]


def same(a, b):
    """True if two extra states are of one type and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


class ExtraState(nn.Module):
    """Returns the state of one kind, and notes whether it gets the same back."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.loaded = kind % len(STATES), "not loaded"

    def forward(self, x):
        return x

    def get_extra_state(self):
        return STATES[self.kind]()

    def set_extra_state(self, state):
        self.loaded = "" if same(state, self.get_extra_state()) else f"{state!r} loaded"


class Quantised(nn.Module):
    """A frozen weight with quantisation state next to it, as bitsandbytes saves them."""

    def __init__(self, index):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0) + index, requires_grad=False)
        self.absmax, self.loaded = torch.tensor([0.5, 2.0 + index]), "not loaded"

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.absmax

    def _load_from_state_dict(self, state_dict, prefix, *others):
        absmax = state_dict.pop(prefix + "weight.absmax", None)
        self.loaded = "" if same(absmax, self.absmax) else f"{absmax!r} loaded"
        super()._load_from_state_dict(state_dict, prefix, *others)


def add_to(block, index):
    """Gives a block an entry of every kind."""
    block.extras = nn.ModuleList(ExtraState(index + kind) for kind in range(len(STATES)))
    block.quantised = Quantised(index)
    block.register_buffer("turned", (torch.arange(6.0) + index).reshape(2, 3).t())
    block.register_buffer("columns", (torch.arange(12.0) + index).reshape(3, 4)[:, 1:3])


def wrong(module):
    """The entries that have not come back from a checkpoint."""
    return [f"{name}: {part.loaded}" for name, part in module.named_modules() if getattr(part, "loaded", "")]
