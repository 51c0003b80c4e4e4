# SPDX-License-Identifier: Apache-2.0
"""Trees of trainers' states: dicts, lists, tensors and other values, and where two of them differ."""

import copy
import io

import torch


def copied(value):
    """A copy of its own; tensors are detached, whole and contiguous."""
    if torch.is_tensor(value):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(one) for one in value)
    if isinstance(value, io.BytesIO):
        return io.BytesIO(value.getvalue())
    return copy.deepcopy(value)


def differences(got, want, where=""):
    """Differences of `got` from `want`: lines of the form "path: what". Types, keys, shapes and bits count."""
    if torch.is_tensor(want) and torch.is_tensor(got):
        return tensor_differences(got, want, where)
    if isinstance(want, dict) and isinstance(got, dict):
        lines = [f"{where}/{key}: missing" for key in want if key not in got]
        lines += [f"{where}/{key}: extra ({brief(got[key])})" for key in got if key not in want]
        for key in want.keys() & got.keys():
            lines += differences(got[key], want[key], f"{where}/{key}")
        return sorted(lines)
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(want) != len(got):
            return [f"{where}: {len(got)} entries, expected {len(want)}"]
        return [line for at, pair in enumerate(zip(got, want)) for line in differences(*pair, f"{where}/{at}")]
    if isinstance(want, io.BytesIO) and isinstance(got, io.BytesIO):
        return [] if want.getvalue() == got.getvalue() else [f"{where}: other bytes"]
    return [] if is_number(want) == is_number(got) and type(want) == type(got) and want == got or (
        is_number(want) and is_number(got) and want == got) else [f"{where}: {brief(got)}, expected {brief(want)}"]


def tensor_differences(got, want, where):
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{where}: {brief(got)}, expected {brief(want)}"]
    if torch.equal(got.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8)):
        return []
    off = (got.double() - want.double()).abs().max().item()
    return [f"{where}: values off by up to {off:.3g}"]


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def brief(value):
    if torch.is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)[:60]


def without_tensor_numbers(value):
    """Hyper-parameters that are tensors as their numbers: not every format keeps the type."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {key: without_tensor_numbers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_tensor_numbers(one) for one in value)
    return value


def stateless(states):
    """True if an optimizer has done nothing for a parameter: no states, or only zeros, at any step."""
    return not any(value.count_nonzero() for key, value in states.items() if key not in ("fp32", "step"))


def drop_states(optim, names):
    """Drops, in place, the states of parameters for which the checkpoint has none. PyTorch's loader makes states for all parameters
    by a step with gradients of zero: with weight decay SGD's are not zero, and depend on the weights from before the load."""
    for name in names & optim.keys():
        optim[name] = {key: value for key, value in optim[name].items() if key == "fp32"}


def same_idle_states(got, want):
    """A parameter without a gradient has no states in one engine and zeros in another, with the step of its group:
    makes the two equal, in place."""
    for name in got.keys() & want.keys():
        if stateless(want[name]) and stateless(got[name]):
            for one in (got[name], want[name]):
                for key in [key for key in one if key != "fp32"]:
                    del one[key]
