# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines: maps the flat tensors of a rank to ranges of parameters.

At stages 1 and 2 and with BF16_Optimizer, the parameters of a group are concatenated in the order of the optimizer. The ranks
divide the result into equal partitions. (The `_hp_mapping` of parameters is wrong with round_robin_gradients, so it is not used.)
At stage 3 the mapping follows from the partition of each parameter and from its position in the optimizer's flat tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error
from ._library import value_of
from ._optimizers import STEP, SavedOptimizer, forget, materialise, set_step, states_of
from ._shards import Shard, buffers_of, flat_shard, plain_name, shard_of

EXPERT = re.compile(r"^(.*\.deepspeed_moe\.experts)\.deepspeed_experts\.(\d+)\.(.*)$")
# Keys of the model files that belong to the engine. All other keys are client state.
ENGINE_KEYS = {"global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_config", "num_experts",
               "csr_tensor_module_names", "sparse_tensor_module_names", "data_sampler", "random_ltd", "ds_autoep_layers"}


def client_state_of(kept: dict[str, object]) -> dict[str, object]:
    """Returns the client state in the contents of a model file: all that does not belong to the engine."""
    return {key: value for key, value in kept.items() if key not in ENGINE_KEYS}


# A flat tensor of an optimizer and its parameters: (parameter, position of its elements in the flat tensor, number of elements,
# first element in the parameter).
Flat = tuple[torch.Tensor, list[tuple[torch.Tensor, int, int, int]]]


def _partition(flat: torch.Tensor, group: list[torch.Tensor], begins: list[int] | None, ranks: Any,
               ) -> list[tuple[torch.Tensor, int, int, int]]:
    """Returns the ranges of parameters in this rank's partition of concatenated parameters, as in Flat. `begins` are the positions of
    the parameters. None: each begins where the previous one ends."""
    begin = torch.distributed.get_rank(ranks) * flat.numel()
    end, found, place = begin + flat.numel(), [], 0
    for number, param in enumerate(group):
        place = place if begins is None else begins[number]
        first, last = max(begin, place), min(end, place + param.numel())
        if first < last:
            found.append((param, first - begin, last - first, first - place))
        place += param.numel()
    return found


def _trains_nothing(optimizer: Any) -> bool:
    """Returns true for no optimizer, and for DeepSpeed's placeholders: DummyOptim, and DeepSpeedZeRoOffload at stage 3."""
    names = {type(optimizer).__name__, type(getattr(optimizer, "optimizer", None)).__name__}
    return optimizer is None or bool(names & {"DummyOptim", "DeepSpeedZeRoOffload"})


class DeepSpeedTrainer:
    """A DeepSpeed engine. optimizer: the engine's optimizer, None if it has none."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.model, self.optimizer = engine, engine.module, engine.optimizer
        self.stage = engine.zero_optimization_stage()
        self._partitions = engine.optimizer  # stage 3: partitions the parameters
        if _trains_nothing(engine.optimizer):
            self.optimizer = None
        self.client_state: dict[str, object] = {}
        self.not_set: list[str] = []
        self._created: list[torch.Tensor] = []  # parameters with states of this load
        self._refuse()
        self.names = {id(param): self._name(plain_name(name)) for name, param in self.model.named_parameters()}
        # The optimizer that makes the steps. DeepSpeed's optimizer may wrap it.
        self.base = getattr(self.optimizer, "optimizer", self.optimizer)

    def _refuse(self) -> None:
        engine = self.engine
        if type(engine).__name__ == "PipelineEngine":
            raise Error(UNSUPPORTED, "DeepSpeed's pipeline engine is not supported; convert with ucp-load and use load_checkpoint")
        if getattr(engine, "mp_world_size", 1) > 1:
            raise Error(UNSUPPORTED, f"DeepSpeed's tensor parallelism over {engine.mp_world_size} ranks is not supported, because its "
                                     "parameters do not record how they are sharded; convert with ucp-load and use load_checkpoint")
        if self.stage == 3 and self.optimizer is not None and not hasattr(self.optimizer, "fp32_partitioned_groups_flat"):
            raise Error(UNSUPPORTED, f"DeepSpeed stage 3 with {type(self.optimizer).__name__} as its optimizer is not supported")
        if self.stage == 3 and self._on_nvme():
            raise Error(UNSUPPORTED, "offload to NVMe is not supported")
        if self.stage == 3 and any(getattr(param, "ds_secondary_tensor", None) is not None
                                   for param in self.model.parameters()):
            raise Error(UNSUPPORTED, "secondary partitions of parameters (zero_hpz_partition_size) are not supported")
        if type(self.optimizer).__name__ == "MiCS_Optimizer":
            raise Error(UNSUPPORTED, "MiCS is not supported")

    def _on_nvme(self) -> bool:
        """Stage 3: returns true if parameters or states are offloaded to files."""
        if self.optimizer is None:
            return str(getattr(self._partitions.offload_device, "value", "")) == "nvme"
        return self.optimizer.swap_optimizer or self.optimizer.params_in_nvme_and_cpu

    def _name(self, name: str) -> str:
        """Replaces the local number of an expert in a parameter name by its global number."""
        found = EXPERT.match(name)
        if not found:
            return name
        from deepspeed.utils import groups
        experts = self.model.get_submodule(found[1])
        group = next(param.group_name for param in experts.parameters())
        number = groups._get_expert_parallel_rank(group) * experts.num_local_experts + int(found[2])
        return f"{found[1]}.deepspeed_experts.{number}.{found[3]}"

    def _weights(self) -> Iterator[Shard | None]:
        for param in self.model.parameters():
            name, kind = self.names[id(param)], "param" if param.requires_grad else "frozen"
            if self.stage != 3:
                yield shard_of(name, kind, param)
                continue
            first, count = self._share(param)
            yield flat_shard(name, kind, param.ds_shape, param.ds_tensor.narrow(0, 0, count), first)
        for name, buffer in buffers_of(self.model):
            yield shard_of(name, "buffer", buffer)

    def _share(self, param: Any) -> tuple[int, int]:
        """Stage 3: returns the first element of a parameter in this rank's partition, and the number of elements."""
        share = param.partition_numel()
        first = min(param.ds_numel, torch.distributed.get_rank(param.ds_process_group) * share)
        return first, min(share, param.ds_numel - first)

    def _flats(self) -> Iterator[Flat]:
        """Yields the flat tensors of master weights with their parameters. Raises UnsupportedError for an unknown optimizer."""
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
        elif hasattr(own, "fp32_groups"):  # the same, with one tensor for each parameter
            for masters, group in zip(own.fp32_groups, own.fp16_groups):
                for master, param in zip(masters, group):
                    yield master, [(param, 0, param.numel(), 0)]
        else:
            raise Error(UNSUPPORTED, f"DeepSpeed's optimizer {type(own).__name__} is not supported")

    def _shape(self, param: Any) -> tuple[int, ...]:
        return tuple(param.ds_shape if self.stage == 3 else param.shape)

    def _flat_shards(self, value: torch.Tensor, kind: str, places: list) -> Iterator[Shard]:
        whole = value.detach().view(-1)
        for param, place, count, first in places:
            yield flat_shard(self.names[id(param)], kind, self._shape(param), whole.narrow(0, place, count), first)

    def _is_plain(self) -> bool:
        """Returns true for a PyTorch optimizer that works on the parameters directly, without master weights."""
        return isinstance(self.optimizer, torch.optim.Optimizer) and self.base is self.optimizer

    def shards(self) -> list[Shard]:
        """Returns this rank's shards of weights, buffers, master weights and optimizer states. Creates missing optimizer states.
        Stage 3: partitions the parameters first; release() undoes this."""
        if self.stage == 3 and self.optimizer is None:
            self._partitions.partition_all_parameters()
        elif self.stage == 3:
            self.optimizer.checkpoint_event_prologue()  # weights are partitioned from here on
        found = list(self._weights())
        if self.optimizer is None:
            return [one for one in found if one is not None]
        self._materialise()
        if self._is_plain():
            for group in self.base.param_groups:
                for param in group["params"]:
                    name = self.names[id(param)]
                    states = states_of(self.base.state.get(param, {}), param.shape, f'"{name}"')
                    found += [shard_of(name, key, value) for key, value in states]
            return [one for one in found if one is not None]
        flats = list(self._flats())
        for flat, places in flats:
            found += self._flat_shards(flat, "fp32", places)
        for flat, places in flats:
            for key, value in states_of(self.base.state.get(flat, {}), flat.shape, "a flat group of parameters"):
                found += self._flat_shards(value, key, places)
        return [one for one in found if one is not None]

    def _materialise(self) -> None:
        if self.stage != 3:
            self._created = materialise(self.base)
            return
        self.optimizer._set_fp32_optimizer_param_groups()  # DeepSpeed sets them during steps only
        try:
            self._created = materialise(self.base)
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()

    def release(self) -> None:
        """Ends a load, also after an error, or if nothing was loaded. Stage 3: gathers the parameters that the engine keeps
        gathered."""
        if self.optimizer is not None:
            forget(self.base, self._created)
        if self.stage == 3 and self.optimizer is not None:
            self.optimizer.checkpoint_event_epilogue()
        elif self.stage == 3 and self._partitions.persistent_parameters:
            self._partitions.persistent_parameters[0].all_gather(self._partitions.persistent_parameters)

    def set_state(self, saved: SavedOptimizer, answer: dict[str, Any]) -> None:
        """Sets step counts, hyper-parameters, counters, learning rate scheduler and loss scaler, after the tensors were filled."""
        self._created = []
        if self.optimizer is not None:
            self._set_steps(saved)
            self._set_scaler(value_of(answer["scaler"]) or {})
        self._set_counters(value_of(answer["engine"]), answer)

    def _set_steps(self, saved: SavedOptimizer) -> None:
        if self._is_plain():
            groups = [(group, [self.names[id(param)] for param in group["params"]]) for group in self.base.param_groups]
            for param, state in self.base.state.items():
                self._set_step(state, saved.step([self.names[id(param)]]))
        else:
            flats = list(self._flats())
            for flat, places in flats:
                names = [self.names[id(param)] for param, *_ in places]
                self._set_step(self.base.state.get(flat, {}), saved.step(names))
            groups = list(zip(self.base.param_groups, self._names_by_group(flats)))
        for group, names in groups:
            self.not_set += saved.set_group(group, names)

    def _set_step(self, state: dict[str, Any], step: float | None) -> None:
        if step is not None and STEP in state:
            set_step(state, step)

    def _names_by_group(self, flats: list[Flat]) -> list[list[str]]:
        """Returns the names of all parameters of each group, including parameters without elements on this rank."""
        own = self.optimizer
        if self.stage == 3:
            groups: list[list[str]] = [[] for _ in self.base.param_groups]
            for number, params in enumerate(own.fp16_groups):
                groups[own.sub_group_to_group_id[number]] += [self.names[id(param)] for param in params]
            return groups
        params = getattr(own, "bit16_groups", None) or getattr(own, "bf16_groups", None) or own.fp16_groups
        return [[self.names[id(param)] for param in group] for group in params]

    def _set_scaler(self, saved: dict[str, Any]) -> None:
        """Sets the loss scale in all attributes of the optimizer that store it."""
        nested = saved.get("loss_scaler")
        values = {**saved, **(nested if isinstance(nested, dict) else {})}
        homes = [home for home in (getattr(self.optimizer, "loss_scaler", None),
                                   getattr(self.optimizer, "loss_scale_config", None)) if home is not None]
        fp16 = getattr(self.engine, "fp16_enabled", lambda: False)()
        if not fp16 or not homes or "cur_scale" not in values:
            return
        for key, value in values.items():
            for home in homes:
                if key in vars(home) and key != "loss_scaler":
                    setattr(home, key, value)

    def _set_counters(self, kept: dict[str, Any] | None, answer: dict[str, Any]) -> None:
        engine = self.engine
        kept = kept or {}
        if kept.get("global_steps", answer["step"]) is not None:
            engine.global_steps = kept.get("global_steps", answer["step"])
            samples = kept.get("global_samples", answer["samples"])
            engine.global_samples = engine.global_steps * engine.train_batch_size() if samples is None else samples
        engine.skipped_steps = kept.get("skipped_steps", 0)
        if engine.lr_scheduler is not None:
            if kept.get("lr_scheduler") is None:
                self.not_set.append("the learning rate scheduler: the checkpoint has no state for it")
            else:
                engine.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        self.client_state = client_state_of(kept)
