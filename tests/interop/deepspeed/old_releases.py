# SPDX-License-Identifier: Apache-2.0
"""Substitutes for features that older DeepSpeed and PyTorch releases lack on CPU ranks, to run them in tests: packages
that DeepSpeed before 0.15 insists on and does not need, and operations that ZeRO needs and Gloo of PyTorch before 2.3
has not, made of those that it has. The functions have the parameters of those that they stand for."""

import importlib.machinery
import importlib.util
import os
import sys
import types

import torch
import torch.distributed as dist

ALL_REDUCE, ALL_GATHER, BROADCAST = dist.all_reduce, dist.all_gather, dist.broadcast
ALL_GATHER_INTO = dist.all_gather_into_tensor
HALVES = (torch.bfloat16, torch.float16)


class Done:
    """The handle of an operation that has ended."""

    def wait(self):
        return True

    def is_completed(self):
        return True


def prepare():
    """To be called before DeepSpeed is imported."""
    os.environ.setdefault("LOCAL_SIZE", "1")  # otherwise DeepSpeed runs the program numactl
    if release() >= (0, 15):
        return
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        if importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            module.__version__, module.__spec__ = "0", importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module


def release():
    from importlib.metadata import version
    return tuple(map(int, version("deepspeed").split(".")[:2]))


def is_old():
    """True for a release other than those that scripts/peers installs for every test."""
    return release() < (0, 19)


def widened(tensor):
    """As fp32 where it has 16 bits, which Gloo does not know; not to be written to."""
    return tensor.detach().float() if tensor.dtype in HALVES else tensor.detach().contiguous()


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if tensor.dtype not in HALVES:
        return ALL_REDUCE(tensor, op, group, async_op)
    wide = tensor.detach().float()
    ALL_REDUCE(wide, op, group)
    tensor.data.copy_(wide)
    return Done() if async_op else None


def reduce(tensor, dst, op=dist.ReduceOp.SUM, group=None, async_op=False):
    return all_reduce(tensor, op, group, async_op)


def broadcast(tensor, src, group=None, async_op=False):
    if tensor.dtype not in HALVES:
        return BROADCAST(tensor, src, group, async_op)
    wide = tensor.detach().float()
    BROADCAST(wide, src, group)
    tensor.data.copy_(wide)
    return Done() if async_op else None


def all_gather(tensor_list, tensor, group=None, async_op=False):
    own = widened(tensor)
    parts = [torch.empty(part.shape, dtype=own.dtype) for part in tensor_list]
    ALL_GATHER(parts, own, group)
    for part, wide in zip(tensor_list, parts):
        part.data.copy_(wide)
    return Done() if async_op else None


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    parts = list(output_tensor.data.view(-1).chunk(dist.get_world_size(group)))
    return all_gather(parts, input_tensor.reshape(-1), group, async_op)


def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    whole = input.detach().float() if input.dtype in HALVES else input.detach().clone()
    ALL_REDUCE(whole, op, group)
    output.data.view(-1).copy_(whole.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)])
    return Done() if async_op else None


def all_gather_into_detached(output_tensor, input_tensor, group=None, async_op=False):
    """Gloo of PyTorch before 2.9 cannot write to a tensor that is a view for autograd."""
    return ALL_GATHER_INTO(output_tensor.detach(), input_tensor.detach(), group, async_op)


def by_type(tensors):
    """DeepSpeed before 0.15 looks for the types of its accelerator, which tensors on a processor do not name."""
    return [(kind, [tensor for tensor in tensors if tensor.type() == kind]) for kind in dict.fromkeys(map(torch.Tensor.type, tensors))]


def complete():
    """To be called after DeepSpeed is imported: Gloo for releases that ask for oneCCL, and the missing operations."""
    from deepspeed.accelerator import get_accelerator
    get_accelerator()._communication_backend_name = "gloo"
    if release() < (0, 15):
        import deepspeed.runtime.engine
        deepspeed.runtime.engine.split_half_float_double_sparse = by_type
    with_torch = tuple(map(int, torch.__version__.split(".")[:2]))
    functions = []
    if with_torch < (2, 3):
        functions = [all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor]
    elif with_torch < (2, 9):
        functions = [all_gather_into_detached]
    for function in functions:
        name = function.__name__.replace("detached", "tensor")
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


def stage_1_ignores_round_robin():
    return release() < (0, 13)
