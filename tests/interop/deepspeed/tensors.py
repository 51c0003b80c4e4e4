# SPDX-License-Identifier: Apache-2.0
"""The logical tensors of a running engine, whole and on every rank: NAME/fp32, NAME/<state of the
optimizer>, NAME/computed (the weights that are computed with), NAME/frozen and NAME/buffer.

They are cut from the flat partitions themselves: DeepSpeed's getters for single parameters go by
mappings that do not hold with round_robin_gradients or after its universal loader.
"""

import re

import deepspeed
import torch
import torch.distributed as dist

from model import make_model


def gathered(mine, group):
    """The tensors that the ranks of the group hold, in their order."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return parts


def own_states(optimizer, master):
    """Master weights and their states of the same length, sorted by name: callers gather them in this order, and
    DeepSpeed's universal loader adds states in the order of a set, which differs between ranks.
    """
    states = {name: state.detach() for name, state in sorted(optimizer.state.get(master, {}).items())
              if name != "step" and torch.is_tensor(state) and state.numel() == master.numel()}
    return {"fp32": master.detach()} | states


def stages_1_and_2(engine, names):
    """A group is one row of parameters, cut into equal partitions."""
    outer = engine.optimizer
    bf16 = hasattr(outer, "bf16_groups")
    groups = outer.bf16_groups if bf16 else outer.round_robin_bit16_groups
    flats = outer.fp32_groups_flat_partition if bf16 else outer.single_partition_of_fp32_groups
    found = {}
    for index, weights in enumerate(groups):
        for state, mine in own_states(outer.optimizer, flats[index]).items():
            row = torch.cat(gathered(mine, outer.real_dp_process_group[index]))
            for weight in weights:
                found[f"{names[id(weight)]}/{state}"] = row[:weight.numel()].reshape(weight.shape)
                row = row[weight.numel():]
    return found


def stage_3(engine, names):
    """A sub-group holds a piece of each of its parameters."""
    outer = engine.optimizer
    found = {}
    for weights, flat in zip(outer.fp16_groups, outer.fp32_partitioned_groups_flat):
        for state, mine in own_states(outer.optimizer, flat).items():
            parts = gathered(mine, outer.dp_process_group)
            begin = 0
            for weight in weights:
                end = begin + weight.partition_numel()
                row = torch.cat([part[begin:end] for part in parts])
                found[f"{names[id(weight)]}/{state}"] = row[:weight.ds_numel].reshape(weight.ds_shape)
                begin = end
    return found


def stage_0(engine, names):
    """The optimizer holds whole parameters, or whole copies of them in fp32."""
    optimizer, masters = engine.optimizer, {}
    if hasattr(optimizer, "fp32_groups"):
        for weights, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups):
            masters |= {id(weight): copy for weight, copy in zip(weights, copies)}
        optimizer = optimizer.optimizer
    found = {}
    for weight in (w for w in engine.module.parameters() if w.requires_grad):
        master = masters.get(id(weight), weight)
        found |= {f"{names[id(weight)]}/{state}": mine for state, mine in own_states(optimizer, master).items()}
    return found


def own_tensors(engine, case):
    """The tensors of this rank, under its own names and in its own shapes."""
    names = {}
    for name, weight in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), name)
    read = {0: stage_0, 1: stages_1_and_2, 2: stages_1_and_2, 3: stage_3}[case["zero"]]
    found = read(engine, names)
    for name, weight in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=case["zero"] == 3):
            found[f"{name}/{'computed' if weight.requires_grad else 'frozen'}"] = weight.detach().clone()
    found |= {f"{name}/buffer": buffer for name, buffer in engine.module.named_buffers()}
    return {name: tensor.detach().float().clone() for name, tensor in found.items()}


def global_expert_names(found, case, rank):
    """Experts are numbered within their rank; the number in the whole model replaces it."""
    first = rank % case["ep"] * (case["experts"] // case["ep"])
    number = re.compile(r"(?<=deepspeed_experts\.)\d+(?=\.)")
    return {number.sub(lambda match: str(first + int(match[0])), name): tensor for name, tensor in found.items()}


def join_slices(slices, shape, name):
    """The whole tensor of the slices that tensor-parallel ranks hold."""
    differing = [dim for dim, (a, b) in enumerate(zip(slices[0].shape, shape)) if a != b]
    if not differing:
        return slices[0]
    if ".attend." in name:  # three matrices in one, each cut for itself
        slices = [piece for pieces in zip(*(one.chunk(3) for one in slices)) for piece in pieces]
    return torch.cat(slices, differing[0])


def logical_tensors(engine, case):
    """Collective; raises if ranks that hold the same tensor hold different values."""
    mine = own_tensors(engine, case)
    if case["experts"]:
        mine = global_expert_names(mine, case, dist.get_rank())
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if case["tp"] > 1:  # tensor-parallel ranks have consecutive numbers
        shapes = {name: weight.shape for name, weight in make_model(case).named_parameters()}
        joined = []
        for first in range(0, len(ranks), case["tp"]):
            peers = ranks[first:first + case["tp"]]
            joined.append({name: join_slices([peer[name] for peer in peers], shapes.get(name.rsplit("/", 1)[0], ()), name)
                           for name in peers[0]})
        ranks = joined
    whole = {}
    for found in ranks:
        for name, tensor in found.items():
            if not torch.equal(whole.setdefault(name, tensor), tensor):
                raise AssertionError(f"ranks hold different values of {name}")
    return whole


def unequal(got, want):
    """Compares tensors by name. Returns a line for each difference."""
    found = []
    for name, tensor in want.items():
        if name not in got:
            found.append(f"{name}: missing")
        elif got[name].shape != tensor.shape or got[name].dtype != tensor.dtype:
            found.append(f"{name}: {got[name].dtype} {list(got[name].shape)} for {tensor.dtype} {list(tensor.shape)}")
        elif not torch.equal(got[name], tensor):
            found.append(f"{name}: off by up to {(got[name] - tensor).abs().max().item():.3g}")
    return found + [f"{name}: unexpected" for name in got if name not in want]
