# SPDX-License-Identifier: Apache-2.0
"""The state of a trainer with experts, as an elastic run keeps it: in the memory of nodes, and in checkpoints of
torch.distributed.checkpoint."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ._errors import IO, MISMATCH, UNSUPPORTED, USAGE, Error
from ._group import Group, moving
from ._load import load
from ._node_memory import State
from ._optimizers import STEP
from ._shards import buffers_of, plain_name

DENSE = "dense"  # key of everything that is not an expert
BUFFER = "buffer:"  # in labels, in place of an optimizer state
Expert = tuple[int, int]  # layer, expert
Tensor = TypeVar("Tensor", bound=torch.Tensor)
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
        self._experts = experts
        self.names = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self.parameters = self._by_key(self.names)

    def _by_key(self, named: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Returns {key: {name in the key: tensor}}. Raises UsageError if two tensors of an expert have one name there."""
        found: dict[str, dict[str, Tensor]] = {DENSE: {}}
        for name, tensor in named.items():
            expert = self._experts.search(name)
            key, inside = (DENSE, name) if expert is None else (key_of((int(expert[1]), int(expert[2]))), name[expert.end():])
            if inside in found.setdefault(key, {}):
                raise Error(USAGE, f'"{name}": another tensor of layer {key.replace(" ", " expert ")} has the name "{inside}", too; pass '
                                   "names= with a pattern that only the trained experts match")
            found[key][inside] = tensor
        return found

    def _buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the model's current buffers by key. Modules may replace them."""
        return self._by_key(dict(buffers_of(self.model)))

    def experts(self) -> set[Expert]:
        return {expert_of(key) for key in self.parameters if key != DENSE}

    def parts(self) -> Keyed:
        """Returns the tensors of each key with their labels, in one order on all ranks. They are the trainer's own."""
        found: Keyed = {}
        buffers = self._buffers()
        for key, parameters in self.parameters.items():
            labels, tensors = found.setdefault(key, ([], []))
            for name, parameter in sorted(parameters.items()):
                for slot, value in [("", parameter.detach()), *sorted(self._states(name, parameter))]:
                    labels.append(f"{name} {slot}")
                    tensors.append(value)
            for name, value in sorted(buffers.get(key, {}).items()):
                labels.append(f"{name} {BUFFER}")
                tensors.append(value)
        return found

    def _states(self, name: str, parameter: torch.nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
        for slot, value in self.optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or slot != STEP and value.shape != parameter.shape:
                raise Error(UNSUPPORTED, f'"{name}": optimizer state {slot} is not a tensor with the shape of its parameter')
            yield slot, value

    def _groups(self) -> dict[int, dict[str, Any]]:
        """Returns the optimizer's current group of each parameter, by id() of the parameter."""
        return {id(one): group for group in self.optimizer.param_groups for one in group["params"]}

    def adopt(self, state: Keyed) -> None:
        """Fills the tensors of keys. Raises MismatchError unless the labels of a key name its parameters and buffers."""
        buffers = self._buffers()
        for key, (labels, _) in state.items():
            own = {f"{name} " for name in self.parameters[key]} | {f"{name} {BUFFER}" for name in buffers.get(key, {})}
            run = {label for label in labels if label.rpartition(" ")[2] in ("", BUFFER)}
            if odd := own ^ run:
                name, _, kind = min(odd).rpartition(" ")
                which = "the model lacks this" if min(odd) in run else "the run has no such"
                raise Error(MISMATCH, f'"{name}" ({key}): {which} {"buffer" if kind else "parameter"}; the model has changed, so use '
                                      "another folder")
        groups = self._groups()
        with torch.no_grad():
            for key, (labels, tensors) in state.items():
                for label, tensor in zip(labels, tensors):
                    name, _, slot = label.rpartition(" ")
                    if slot == BUFFER:
                        buffers[key][name].copy_(tensor)
                        continue
                    parameter = self.parameters[key][name]
                    if slot == "":
                        parameter.copy_(tensor)
                    else:
                        # A step count stays on the CPU, as in a new optimizer, except with these options.
                        group = groups[id(parameter)]
                        moves = slot != STEP or group.get("fused") or group.get("capturable")
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
        model = {name: one.detach() for name, one in self.names.items()} | dict(buffers_of(self.model))
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str, group: Group) -> None:
        """Writes a checkpoint. Collective. Raises TransferError if a rank is gone or cannot write."""
        try:
            moving(lambda: dcp.save(self.saved(), checkpoint_id=path, process_group=group.for_tensors()))
        except dcp.api.CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            raise Error(IO, f"{path}: rank {rank}: {type(failure).__name__}: {failure}") from error

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
            read, lost = loaded.bytes_read, [one for one in loaded.missing if one.endswith(('"', '" buffer', '" frozen'))]
            if readers is not None:
                dist.destroy_process_group(readers)
        for one in moving(lambda: group.gather(lost)):
            if one:
                raise Error(MISMATCH, f"{path}: lacks {one[0]}; the model has changed, so use another folder")
        return int(max(moving(lambda: group.gather(read))))

    def _only(self, keys: set[str]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Returns a model and an optimizer that have these tensors only. They share them and their states with the trainer's."""
        chosen = {id(one) for key in keys for one in self.parameters[key].values()}
        model = torch.nn.Module()
        for name, parameter in self.names.items():
            if id(parameter) in chosen:
                module, last = _module(model, name)
                module.register_parameter(last, parameter)
        buffers = self._buffers()
        filled = {id(one) for key in keys for one in buffers.get(key, {}).values()}
        for name, value in buffers_of(self.model):
            if id(value) in filled:
                module, last = _module(model, name)
                module.register_buffer(last, value)
        groups = [{**group, "params": [one for one in group["params"] if id(one) in chosen]} for group in self.optimizer.param_groups]
        # Shares `state` and the attributes of the optimizer's class. Its hooks and a scheduler's counter are for real steps.
        optimizer = object.__new__(type(self.optimizer))
        optimizer.__dict__ = {
            **{name: value for name, value in vars(self.optimizer).items() if name != "step"},
            "param_groups": [group for group in groups if group["params"]],
            "_optimizer_step_pre_hooks": collections.OrderedDict(), "_optimizer_step_post_hooks": collections.OrderedDict()}
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
