# SPDX-License-Identifier: Apache-2.0
"""Trainers without DeepSpeed, with parameters that are separate tensors: FSDP2, tensor parallelism, DDP, one process."""

from __future__ import annotations

from typing import Any

import torch

from ._deepspeed import client_state_of
from ._errors import UNSUPPORTED, USAGE, Error
from ._library import value_of
from ._optimizers import SavedOptimizer, forget, materialise, set_step, states_of
from ._owners import refuse_engine_parameters
from ._shards import Shard, buffers_of, plain_name, shard_of


class TorchTrainer:
    """A model and its optimizer. optimizer: None to load weights only."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if not isinstance(model, torch.nn.Module):
            swapped = "; the model comes first" if isinstance(optimizer, torch.nn.Module) else ""
            raise Error(USAGE, f"(model, optimizer): a model expected, found {type(model).__name__}{swapped}")
        if hasattr(model, "zero_optimization_stage"):
            raise Error(USAGE, "(model, optimizer): a DeepSpeed engine contains its optimizer: pass the engine alone, load(engine, source)")
        while isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise Error(USAGE, f"(model, optimizer): a PyTorch optimizer expected, found {type(optimizer).__name__}")
        refuse_engine_parameters(model)
        self.model, self.optimizer = model, optimizer
        self.names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        self.client_state: dict[str, object] = {}
        self.not_set: list[str] = []
        self._created: list[torch.Tensor] = []  # parameters with states of this load

    def shards(self) -> list[Shard]:
        """Returns this rank's shards of weights, buffers and optimizer states. Creates missing optimizer states."""
        found = []
        for name, param in self.model.named_parameters():
            if type(param).__name__ == "FlatParameter" or "_flat_param" in name:
                raise Error(UNSUPPORTED, f'"{name}": a flat parameter of FSDP1; use fully_shard (FSDP2)')
            found.append(shard_of(self.names[id(param)], "param" if param.requires_grad else "frozen", param))
        found += [shard_of(name, "buffer", buffer) for name, buffer in buffers_of(self.model)]
        if self.optimizer is not None:
            self._created = materialise(self.optimizer)
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    name = self._name(param)
                    found += [shard_of(name, key, value) for key, value in
                              states_of(self.optimizer.state.get(param, {}), param.shape, f'"{name}"')]
        return [one for one in found if one is not None]

    def _name(self, param: torch.Tensor) -> str:
        if id(param) not in self.names:
            raise Error(UNSUPPORTED, f"the optimizer has a parameter of shape {tuple(param.shape)} that does not belong to the model")
        return self.names[id(param)]

    def set_state(self, saved: SavedOptimizer, answer: dict[str, Any]) -> None:
        """Sets step counts and hyper-parameters, after the tensors were filled. Lists a DeepSpeed engine's state as not set."""
        kept = value_of(answer["engine"]) or {}
        self.client_state = client_state_of(kept)
        if self.client_state:
            self.not_set.append(f"the client state ({', '.join(sorted(self.client_state))}): the attribute client_state has it")
        self.not_set += [f"{key} of DeepSpeed's engine" for key in ("lr_scheduler", "data_sampler", "random_ltd") if kept.get(key)]
        if self.optimizer is None:
            return
        missing, created = set(answer["missing"]), {id(param) for param in self._created}
        self._created = []
        for group in self.optimizer.param_groups:
            names = [self.names[id(param)] for param in group["params"]]
            for param, name in zip(group["params"], names):
                state = self.optimizer.state.get(param, {})
                labels = {f'"{name}" {key}' for key, _ in states_of(state, param.shape, name)}
                step = saved.step([name])
                if labels and labels <= missing:  # the checkpoint has none: its first step is still to come
                    forget(self.optimizer, [param] if id(param) in created else [])
                elif step is not None and state:
                    set_step(state, step)
            self.not_set += saved.set_group(group, names)

    def release(self) -> None:
        """Ends a load, also after an error, or if nothing was loaded."""
        if self.optimizer is not None:
            forget(self.optimizer, self._created)
