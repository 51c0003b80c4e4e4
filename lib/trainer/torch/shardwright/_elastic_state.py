# SPDX-License-Identifier: Apache-2.0
"""The state of a trainer with experts, as an elastic run keeps it: in the memory of nodes, and in checkpoints of
torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._group import Group, moving
from ._load import load
from ._node_memory import State
from ._shards import buffers_of, plain_name

DENSE = "dense"  # key of everything that is not an expert
Expert = tuple[int, int]  # layer, expert
Keyed = dict[str, tuple[list[str], list[torch.Tensor]]]  # labels and tensors of each key


def key_of(expert: Expert) -> str:
    return f"{expert[0]} {expert[1]}"


def expert_of(key: str) -> Expert:
    layer, _, expert = key.partition(" ")
    return int(layer), int(expert)


class Trained:
    """A model and its optimizer. experts: pattern of the names of experts' parameters, with the numbers of layer and expert as its
    groups."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experts: re.Pattern[str]) -> None:
        while isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        self.model, self.optimizer = model, optimizer
        self.parameters: dict[str, dict[str, torch.nn.Parameter]] = {DENSE: {}}  # {key: {name in the key: parameter}}
        self.names: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            name = plain_name(name)
            found = experts.search(name)
            key, inside = (DENSE, name) if found is None else (key_of((int(found[1]), int(found[2]))), name[found.end():])
            self.parameters.setdefault(key, {})[inside] = parameter
            self.names[name] = parameter
        self.buffers = {name: value for name, value in buffers_of(model)}

    def experts(self) -> set[Expert]:
        return {expert_of(key) for key in self.parameters if key != DENSE}

    def parts(self) -> Keyed:
        """Returns the tensors of each key with their labels, in one order on all ranks. They are the trainer's own."""
        found: Keyed = {}
        for key, parameters in self.parameters.items():
            labels, tensors = found.setdefault(key, ([], []))
            for name, parameter in sorted(parameters.items()):
                for slot, value in [("", parameter.detach()), *sorted(self._states(name, parameter))]:
                    labels.append(f"{name} {slot}")
                    tensors.append(value)
        labels, tensors = found[DENSE]
        for name, value in sorted(self.buffers.items()):
            labels.append(f"{name} buffer:")
            tensors.append(value)
        return found

    def _states(self, name: str, parameter: torch.nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
        for slot, value in self.optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise Error(UNSUPPORTED, f'"{name}": optimizer state {slot} is not a tensor')
            yield slot, value

    def _groups(self) -> dict[int, dict[str, Any]]:
        """Returns the optimizer's current group of each parameter, by id() of the parameter."""
        return {id(one): group for group in self.optimizer.param_groups for one in group["params"]}

    def adopt(self, state: Keyed) -> None:
        """Fills the tensors of keys. Raises MismatchError if the labels of a key lack one of its parameters."""
        for key, (labels, _) in state.items():
            if lost := set(self.parameters[key]) - {label.rpartition(" ")[0] for label in labels}:
                raise Error(MISMATCH,
                            f'"{min(lost)}" ({key}): the run has no such parameter; the model has changed, so use another folder')
        groups = self._groups()
        with torch.no_grad():
            for key, (labels, tensors) in state.items():
                for label, tensor in zip(labels, tensors):
                    name, _, slot = label.rpartition(" ")
                    if slot == "buffer:":
                        self.buffers[name].copy_(tensor)
                        continue
                    parameter = self.parameters[key][name]
                    if slot == "":
                        parameter.copy_(tensor)
                    else:
                        # A step count stays on the CPU, as in a new optimizer, except with these options.
                        group = groups[id(parameter)]
                        moves = tensor.dim() > 0 or group.get("fused") or group.get("capturable")
                        self.optimizer.state[parameter][slot] = tensor.to(parameter.device if moves else tensor.device, copy=True)

    def saved(self) -> dict[str, Any]:
        """Returns what torch.distributed.checkpoint saves: the entries of all ranks together are the whole state."""
        optimizer: dict[str, Any] = {}
        groups = self._groups()
        for name, parameter in self.names.items():
            for slot, value in self._states(name, parameter):
                optimizer[f"state.{name}.{slot}"] = value
            for option, value in groups.get(id(parameter), {}).items():
                if option != "params":
                    optimizer[f"param_groups.{name}.{option}"] = value
        model = {name: one.detach() for name, one in self.names.items()} | self.buffers
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str, group: Group) -> None:
        """Writes a checkpoint. Collective."""
        moving(lambda: dcp.save(self.saved(), checkpoint_id=path, process_group=group.for_tensors()))

    def load(self, path: str, keys: set[str], group: Group) -> int:
        """Fills the tensors of these keys, which may differ between ranks, from a checkpoint. Collective. Returns the number of bytes
        that all ranks have read. Raises MismatchError if the checkpoint lacks a parameter or a buffer."""
        wanted = [rank for rank, needed in enumerate(moving(lambda: group.gather(bool(keys)))) if needed]
        if not wanted:
            return 0
        read, lost = 0, []
        if keys:
            ranks = [group.ranks[one] for one in wanted]
            readers = dist.new_group(ranks, backend="gloo", use_local_synchronization=True) if group.size > 1 else None
            loaded = load(self._only(keys), path, strict=False, group=readers)
            read, lost = loaded.bytes_read, [one for one in loaded.missing if one.endswith(('"', '" buffer'))]
            if readers is not None:
                dist.destroy_process_group(readers)
        for one in moving(lambda: group.gather(lost)):
            if one:
                raise Error(MISMATCH, f"{path}: lacks {one[0]}; the model has changed, so use another folder")
        return int(max(moving(lambda: group.gather(read))))

    def _only(self, keys: set[str]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Returns a model and an optimizer that have these parameters only. They share them and their states with the trainer's."""
        chosen = {id(one) for key in keys for one in self.parameters[key].values()}
        model = torch.nn.Module()
        for name, parameter in self.names.items():
            if id(parameter) in chosen:
                module, last = _module(model, name)
                module.register_parameter(last, parameter)
        for name, value in self.buffers.items() if DENSE in keys else ():
            module, last = _module(model, name)
            module.register_buffer(last, value)
        optimizer = copy.copy(self.optimizer)  # shares `state`
        optimizer.param_groups = [{**group, "params": [one for one in group["params"] if id(one) in chosen]}
                                  for group in self.optimizer.param_groups]
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return model, optimizer


def _module(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Returns the module that has a parameter of this name, and the last part of the name. Creates modules."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root, last


def copy_dense(state: State | None, group: Group) -> tuple[tuple[list[str], list[torch.Tensor]], int]:
    """Copies the tensors that all ranks share from the first rank that has them to those that do not. Collective.

    Returns labels and tensors, and the bytes that arrived here.
    """
    mine = None if state is None else state[DENSE]
    have = moving(lambda: group.gather(None if mine is None else
                                       (mine[0], [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in mine[1]])))
    source = next(rank for rank, one in enumerate(have) if one is not None)
    labels, forms = have[source]
    if all(one is not None for one in have):
        assert mine is not None
        return mine, 0
    targets = [rank for rank, one in enumerate(have) if one is None]
    tensors = mine[1] if mine is not None else [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]
    pairs: list[Any] = []
    if group.rank == source:
        pairs = [group.pair(dist.isend, one, target) for target in targets for one in tensors if one.numel()]
    elif mine is None:
        pairs = [group.pair(dist.irecv, one, source) for one in tensors if one.numel()]
    _carry_out(pairs)
    return (labels, tensors), bytes_of(tensors) if mine is None else 0


def copy_experts(state: State | None, wanted: set[Expert], group: Group) -> tuple[State, int]:
    """Copies experts between the ranks that have them and those that want them. Collective.

    Returns those experts of `wanted` that a rank has, and the bytes that arrived here.
    """
    mine = {key: of for key, of in (state or {}).items() if key != DENSE}
    forms = {key: (labels, [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors])
             for key, (labels, tensors) in mine.items()}
    told = moving(lambda: group.gather((forms, sorted(map(key_of, wanted)))))
    found, pairs, arrived = State(), [], 0
    for key in sorted({key for _, needed in told for key in needed}):
        holders = [rank for rank, (has, _) in enumerate(told) if key in has]
        targets = [rank for rank, (has, needed) in enumerate(told) if key in needed and key not in has]
        if not holders:
            continue
        if key in mine and key in told[group.rank][1]:
            found[key] = mine[key]
        for number, target in enumerate(targets):
            source = holders[number % len(holders)]
            if group.rank == source:
                pairs += [group.pair(dist.isend, one, target) for one in mine[key][1] if one.numel()]
            elif group.rank == target:
                labels, shapes = told[source][0][key]
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
                pairs += [group.pair(dist.irecv, one, source) for one in tensors if one.numel()]
                found[key] = labels, tensors
                arrived += bytes_of(tensors)
    _carry_out(pairs)
    return found, arrived


def _carry_out(pairs: list[Any]) -> None:
    for request in moving(lambda: dist.batch_isend_irecv(pairs)) if pairs else []:
        moving(request.wait)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def check_experts(trained: Trained, wanted: set[Expert], where: str) -> None:
    """Raises UsageError unless the model has the experts of the plan on this rank."""
    found = trained.experts()
    if found != wanted:
        layer, expert = min(found ^ wanted)
        raise Error(USAGE, f"{where}: layer {layer} expert {expert}: "
                           f"{'the model has it, but the plan does not place it' if (layer, expert) in found else 'the model lacks it'}"
                           " on this rank")
