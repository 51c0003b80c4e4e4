"""DeepSpeed's engines: which tensors of a rank are which part of which parameter.

At stages 1 and 2 and with BF16_Optimizer the parameters of a group lie in one row, in the order of that optimizer, which
the ranks share out in equal partitions. (What parameters say of themselves there, `_hp_mapping`, does not hold with
round_robin_gradients.) At stage 3 it follows from the partition of a parameter and from where the optimizer keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error
from ._held import Held, buffers_of, flat_piece, piece, plain_name
from ._library import value_of
from ._optimizers import STEP, Told, materialise, set_step, states_of

EXPERT = re.compile(r"^(.*\.deepspeed_moe\.experts)\.deepspeed_experts\.(\d+)\.(.*)$")
# What an engine keeps in its model files for itself: the rest is the client's state.
ENGINE_KEYS = {"global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_config", "num_experts",
               "csr_tensor_module_names", "sparse_tensor_module_names", "data_sampler", "random_ltd", "ds_autoep_layers"}

# A flat tensor of an optimizer, its state, and its parameters: each with the place of its elements in the flat tensor,
# how many there are, and the first of them in the parameter.
Flat = tuple[torch.Tensor, list[tuple[torch.Tensor, int, int, int]]]


def _partition(flat: torch.Tensor, group: list, begins: list[int] | None, ranks: Any) -> list[tuple]:
    """What this rank's partition of a row of parameters holds of each; `begins` are their places in the row."""
    begin = torch.distributed.get_rank(ranks) * flat.numel()
    end, held, place = begin + flat.numel(), [], 0
    for number, param in enumerate(group):
        place = place if begins is None else begins[number]
        first, last = max(begin, place), min(end, place + param.numel())
        if first < last:
            held.append((param, first - begin, last - first, first - place))
        place += param.numel()
    return held


def _trains_nothing(optimizer: Any) -> bool:
    """Whether an engine has none, or a stand-in of DeepSpeed for one: DummyOptim, or at stage 3 DeepSpeedZeRoOffload."""
    names = {type(optimizer).__name__, type(getattr(optimizer, "optimizer", None)).__name__}
    return optimizer is None or bool(names & {"DummyOptim", "DeepSpeedZeRoOffload"})


class DeepSpeed:
    """An engine. optimizer: that of the engine, None for one without."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.model, self.optimizer = engine, engine.module, engine.optimizer
        self.stage = engine.zero_optimization_stage()
        self._partitions = engine.optimizer  # stage 3: what partitions the parameters
        if _trains_nothing(engine.optimizer):
            self.optimizer = None
        self.client_state: dict[str, object] = {}
        self.not_set: list[str] = []
        self._refuse()
        self.names = {id(param): self._name(plain_name(name)) for name, param in self.model.named_parameters()}
        # The optimizer that does the steps; ours may wrap it.
        self.base = getattr(self.optimizer, "optimizer", self.optimizer)

    def _refuse(self) -> None:
        engine = self.engine
        if type(engine).__name__ == "PipelineEngine":
            raise Error(UNSUPPORTED, "a pipeline engine of DeepSpeed: convert with ucp-load and use load_checkpoint")
        if getattr(engine, "mp_world_size", 1) > 1:
            raise Error(UNSUPPORTED, f"tensor parallelism of {engine.mp_world_size} ranks in DeepSpeed: its parameters do "
                                     "not say how they are cut; convert with ucp-load and use load_checkpoint")
        if self.stage == 3 and self.optimizer is not None and not hasattr(self.optimizer, "fp32_partitioned_groups_flat"):
            raise Error(UNSUPPORTED, f"stage 3 with {type(self.optimizer).__name__} in place of an optimizer")
        if self.stage == 3 and self._on_nvme():
            raise Error(UNSUPPORTED, "offload to NVMe")
        if self.stage == 3 and any(getattr(param, "ds_secondary_tensor", None) is not None
                                   for param in self.model.parameters()):
            raise Error(UNSUPPORTED, "secondary partitions of parameters (zero_hpz_partition_size)")
        if type(self.optimizer).__name__ == "MiCS_Optimizer":
            raise Error(UNSUPPORTED, "MiCS")

    def _on_nvme(self) -> bool:
        """Stage 3: whether parameters or states are offloaded to files."""
        if self.optimizer is None:
            return str(getattr(self._partitions.offload_device, "value", "")) == "nvme"
        return self.optimizer.swap_optimizer or self.optimizer.params_in_nvme_and_cpu

    def _name(self, name: str) -> str:
        """With the global number of an expert in place of that of this rank."""
        found = EXPERT.match(name)
        if not found:
            return name
        from deepspeed.utils import groups
        experts = self.model.get_submodule(found[1])
        group = next(param.group_name for param in experts.parameters())
        number = groups._get_expert_parallel_rank(group) * experts.num_local_experts + int(found[2])
        return f"{found[1]}.deepspeed_experts.{number}.{found[3]}"

    def _weights(self) -> Iterator[Held | None]:
        for param in self.model.parameters():
            name, kind = self.names[id(param)], "param" if param.requires_grad else "frozen"
            if self.stage != 3:
                yield piece(name, kind, param)
                continue
            first, count = self._share(param)
            yield flat_piece(name, kind, param.ds_shape, param.ds_tensor.narrow(0, 0, count), first)
        for name, buffer in buffers_of(self.model):
            yield piece(name, "buffer", buffer)

    def _share(self, param: Any) -> tuple[int, int]:
        """Stage 3: the first element of a parameter in this rank's partition, and how many there are."""
        share = param.partition_numel()
        first = min(param.ds_numel, torch.distributed.get_rank(param.ds_process_group) * share)
        return first, min(share, param.ds_numel - first)

    def _flats(self) -> Iterator[Flat]:
        """The flat tensors of master weights."""
        own = self.optimizer
        if self.stage == 3:
            for flat, group in zip(own.fp32_partitioned_groups_flat, own.fp16_groups):
                places = [own.grad_position[own.get_param_id(param)][1] for param in group]
                yield flat, [(param, place, *reversed(self._share(param))) for param, place in zip(group, places)]
        elif hasattr(own, "single_partition_of_fp32_groups"):
            offsets = getattr(own, "round_robin_bit16_offsets", [None] * len(own.round_robin_bit16_groups))
            for flat, group, begins, ranks in zip(own.single_partition_of_fp32_groups, own.round_robin_bit16_groups, offsets,
                                                  own.real_dp_process_group):
                yield flat, _partition(flat, group, begins, ranks)
        elif hasattr(own, "fp32_groups_flat_partition"):  # BF16_Optimizer
            for flat, group, ranks in zip(own.fp32_groups_flat_partition, own.bf16_groups, own.real_dp_process_group):
                yield flat, _partition(flat, group, None, ranks)
        elif hasattr(own, "fp32_groups_flat"):  # fp16 or bf16 without ZeRO
            for flat, group in zip(own.fp32_groups_flat, own.fp16_groups):
                places, end = [], 0
                for param in group:
                    places.append((param, end, param.numel(), 0))
                    end += param.numel()
                yield flat, places
        elif hasattr(own, "fp32_groups"):  # the same, tensor by tensor
            for masters, group in zip(own.fp32_groups, own.fp16_groups):
                for master, param in zip(masters, group):
                    yield master, [(param, 0, param.numel(), 0)]
        else:
            raise Error(UNSUPPORTED, f"optimizer {type(own).__name__} of DeepSpeed")

    def _shape(self, param: Any) -> tuple[int, ...]:
        return tuple(param.ds_shape if self.stage == 3 else param.shape)

    def _pieces(self, flat: torch.Tensor, value: torch.Tensor, kind: str, places: list) -> Iterator[Held]:
        whole = value.detach().view(-1)
        for param, place, count, first in places:
            yield flat_piece(self.names[id(param)], kind, self._shape(param), whole.narrow(0, place, count), first)

    def _is_plain(self) -> bool:
        """The optimizer is one of PyTorch, over the parameters themselves."""
        return isinstance(self.optimizer, torch.optim.Optimizer) and self.base is self.optimizer

    def held(self) -> list[Held]:
        if self.stage == 3 and self.optimizer is None:
            self._partitions.partition_all_parameters()
        elif self.stage == 3:
            self.optimizer.checkpoint_event_prologue()  # weights are where they are partitioned
        found = list(self._weights())
        if self.optimizer is None:
            return [one for one in found if one is not None]
        self._materialise()
        if self._is_plain():
            for group in self.base.param_groups:
                for param in group["params"]:
                    name = self.names[id(param)]
                    states = states_of(self.base.state.get(param, {}), param.shape, f'"{name}"')
                    found += [piece(name, key, value) for key, value in states]
            return [one for one in found if one is not None]
        flats = list(self._flats())
        for flat, places in flats:
            found += self._pieces(flat, flat, "fp32", places)
        for flat, places in flats:
            for key, value in states_of(self.base.state.get(flat, {}), flat.shape, "a flat group of parameters"):
                found += self._pieces(flat, value, key, places)
        return [one for one in found if one is not None]

    def _materialise(self) -> None:
        if self.stage != 3:
            materialise(self.base)
            return
        self.optimizer._set_fp32_optimizer_param_groups()  # they are there during steps only
        try:
            materialise(self.base)
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()

    def release(self) -> None:
        """Also after an error."""
        if self.stage == 3 and self.optimizer is not None:
            self.optimizer.checkpoint_event_epilogue()
        elif self.stage == 3 and self._partitions.persistent_parameters:
            self._partitions.persistent_parameters[0].all_gather(self._partitions.persistent_parameters)

    def take(self, told: Told, answer: dict[str, Any]) -> None:
        """After the tensors: steps, hyper-parameters, counters, scheduler, loss scaler."""
        if self.optimizer is not None:
            self._take_steps(told)
            self._take_scaler(value_of(answer["scaler"]) or {})
        self._take_counters(value_of(answer["engine"]), answer)

    def _take_steps(self, told: Told) -> None:
        if self._is_plain():
            groups = [(group, [self.names[id(param)] for param in group["params"]]) for group in self.base.param_groups]
            for param, state in self.base.state.items():
                self._set_step(state, told.step([self.names[id(param)]]))
        else:
            flats = list(self._flats())
            for flat, places in flats:
                names = [self.names[id(param)] for param, *_ in places]
                self._set_step(self.base.state.get(flat, {}), told.step(names))
            groups = list(zip(self.base.param_groups, self._names_by_group(flats)))
        for group, names in groups:
            told.set_group(group, names)

    def _set_step(self, state: dict[str, Any], step: float | None) -> None:
        if step is not None and STEP in state:
            set_step(state, step)

    def _names_by_group(self, flats: list[Flat]) -> list[list[str]]:
        """Of all parameters of a group, also those of which this rank has nothing."""
        own = self.optimizer
        if self.stage == 3:
            groups: list[list[str]] = [[] for _ in self.base.param_groups]
            for number, params in enumerate(own.fp16_groups):
                groups[own.sub_group_to_group_id[number]] += [self.names[id(param)] for param in params]
            return groups
        params = getattr(own, "bit16_groups", None) or getattr(own, "bf16_groups", None) or own.fp16_groups
        return [[self.names[id(param)] for param in group] for group in params]

    def _take_scaler(self, told: dict[str, Any]) -> None:
        """Of all places where an optimizer of DeepSpeed may keep its scale, those that this one has."""
        nested = told.get("loss_scaler")
        values = {**told, **(nested if isinstance(nested, dict) else {})}
        homes = [home for home in (getattr(self.optimizer, "loss_scaler", None),
                                   getattr(self.optimizer, "loss_scale_config", None)) if home is not None]
        fp16 = getattr(self.engine, "fp16_enabled", lambda: False)()
        if not fp16 or not homes or "cur_scale" not in values:
            return
        for key, value in values.items():
            for home in homes:
                if key in vars(home) and key != "loss_scaler":
                    setattr(home, key, value)

    def _take_counters(self, kept: dict[str, Any] | None, answer: dict[str, Any]) -> None:
        engine = self.engine
        kept = kept or {}
        if kept.get("global_steps", answer["step"]) is not None:
            engine.global_steps = kept.get("global_steps", answer["step"])
            samples = kept.get("global_samples", answer["samples"])
            engine.global_samples = engine.global_steps * engine.train_batch_size() if samples is None else samples
        engine.skipped_steps = kept.get("skipped_steps", 0)
        if engine.lr_scheduler is not None:
            if kept.get("lr_scheduler") is None:
                self.not_set.append("the learning rate scheduler: the checkpoint has nothing for it")
            else:
                engine.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        self.client_state = {key: value for key, value in kept.items() if key not in ENGINE_KEYS}
