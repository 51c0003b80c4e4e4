# SPDX-License-Identifier: Apache-2.0
"""Submits the gradients that an optimizer has used to an agent, which logs them: docs/lossless.md."""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ._agent import Connection
from ._deepspeed import DeepSpeedTrainer
from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._group import Group
from ._library import call, size_of
from ._load import trainer_of
from ._parameter_ranges import Piece, check_cover, share_of
from ._square_roots import square_roots
from ._submission import ITEM, GradientMemory, Submission
from ._types import Trainer, User

CHOICES = {"DEFAULT": False, "AVX2": True, "AVX512": True}  # torch's CPU kernels; true: a multiply-add rounds once (FMA)
PLACES = 8  # largest number of steps that the agent may be behind


class _Tensor:
    """A tensor of the optimizer, and the runs of elements to copy: (first in the tensor, first in a place, number of elements)."""

    def __init__(self, number: int, runs: list[tuple[int, int, int]]) -> None:
        self.number, self.runs = number, runs
        self.count = 0.0  # step count at the last submission


class GradientLog:
    """Submits the gradients of experts that a trainer's optimizer has used to an agent, step by step. A restore can then replay the
    steps exactly. PartialCheckpoints with lossless=True creates such a log. Use this class if the checkpoints reach the agent in
    other ways.

        log = shardwright.GradientLog((model, optimizer), "unix:/run/user/1/pec.sock")
        log.begin(step)      # the agent or its store has a checkpoint, and the trainer is in this or a later state
        ...
        log.step(iteration)  # after each optimizer step, before a checkpoint of that iteration
        ...
        log.close()

    Collective: all ranks must create, begin and close it in the same way.

    Args:
        target: a DeepSpeed engine (stages 1 and 2, BF16_Optimizer) or (model, optimizer).
        agent: address of the agent of this rank, unix:PATH.
        every: iterations between snapshots, for policy gradient-log, which buffers gradients that the next snapshot makes
            unnecessary. 0: unknown or not constant.
        zstd: compression level. 0: gradients are not compressed.
        memory: limit of the memory that a rank shares with the agent, in bytes or as text such as "1.5GB". It limits how many
            steps the agent may be behind. Two steps always fit.
        group: process group of the ranks. Default: all ranks.
        trust_user: name or number of a user: accept its agent, in addition to those of the user of this process and of root.

    Attributes:
        active: true while gradients are submitted.
        handed_bytes: size of the gradients that this rank has submitted.
        waited_seconds: time that training on this rank has waited for the agent.

    Raises:
        UnsupportedError: the steps of the optimizer, its options or this processor cannot be replayed exactly.
        UsageError: the target is not a trainer.

    Documentation: lossless.md in shardwright.DOCS
    """

    active: bool
    handed_bytes: int

    def __init__(self, target: Trainer, agent: str, *, every: int = 0, zstd: int = 0, memory: int | str = 1 << 30,
                 group: dist.ProcessGroup | Group | None = None, trust_user: User | None = None) -> None:
        self._trainer, self._agent, self._every = trainer_of(target), agent, every
        self._user = trust_user
        self._zstd, self._memory = zstd, size_of(memory)
        self._ranks = group if isinstance(group, Group) else Group(group)
        self._own_group = self._ranks is not group
        self._optimizer: Any = self._trainer.optimizer
        if isinstance(self._trainer, DeepSpeedTrainer):
            self._optimizer = self._trainer.base
        self._over: Submission | None = None
        self._tensors: dict[int, _Tensor] = {}
        self._last = 0
        self._place: int | None = None
        self._used: dict[int, dict[str, Any]] = {}  # by tensor: the step of this iteration
        self._fresh: set[int] = set()  # tensors without momentum before the step
        self._roots: str | None = None
        self._wrong: str | None = None
        self.active = False
        self.handed_bytes = 0
        self._waited = 0.0
        self._hooks: list[Any] = []
        try:
            self._ranks.agree(self._check)
        except BaseException:
            self.release()
            raise
        self._fused = CHOICES[torch.backends.cpu.get_cpu_capability()]
        self._hooks = [self._optimizer.register_step_pre_hook(self._before),
                       self._optimizer.register_step_post_hook(self._after)]

    @property
    def waited_seconds(self) -> float:
        """Seconds that training on this rank has waited for the agent."""
        return self._waited + (self._over.waited if self._over is not None else 0.0)

    def begin(self, iteration: int | None = None) -> None:
        """Starts to submit gradients with the next step. Collective. Call it again after a load, and after a warning that the log has
        ended.

        Args:
            iteration: number of steps that the run has made. Default: that of the DeepSpeed engine.

        Raises:
            UsageError: `iteration` is missing. MismatchError: the parameters of experts differ from those of the agent's model, or
            the ranks do not have each element exactly once. NotFoundError, TransferError: the agent is gone.

        Documentation: lossless.md#logging-gradients-in-a-trainer in shardwright.DOCS
        """
        self.end()
        engine = getattr(self._trainer, "engine", None)
        if iteration is None and engine is None:
            raise Error(USAGE, "begin(): pass iteration, the number of steps that the run has made")
        self._last = engine.global_steps if iteration is None else iteration
        where = self._ranks.gather((socket.gethostname(), self._agent))
        lead = where.index(where[self._ranks.rank])  # this rank asks for all ranks of its machine
        experts, roots = self._ranks.agree(lambda: self._ask() if lead == self._ranks.rank else None)[lead]
        pieces = self._ranks.agree(lambda: self._pieces({name: elems for _, name, elems in experts["params"]}))
        self._ranks.agree(lambda: check_cover(experts["params"], pieces))
        self._roots = roots
        try:
            self._ranks.agree(lambda: self._connect(experts, pieces[self._ranks.rank]))
        except BaseException:
            self.end()
            raise
        self.active = True

    def step(self, iteration: int) -> bool:
        """Submits the gradients of an optimizer step. Local. Call it after each step, also after a skipped one.

        Args:
            iteration: number of steps that the run has made.

        Returns:
            True if the gradients were submitted. False if the log has ended for this rank; then a warning states the reason. It
            does not raise, because the other ranks continue.

        Documentation: lossless.md#logging-gradients-in-a-trainer in shardwright.DOCS
        """
        if not self.active:
            return False
        try:
            if self._wrong is not None:
                raise Error(USAGE, self._wrong)
            if iteration != self._last + 1:
                raise Error(USAGE, f"step {iteration} after {self._last}: call step() after every optimizer step")
            self._last = iteration
            if self._over is not None:
                self._submit(iteration)
            return True
        except Exception as error:  # not raised, as in _after
            self.end()
            warnings.warn(f"the gradient log ends before iteration {iteration}: {error}", stacklevel=2)
            return False

    def end(self) -> None:
        """Stops submitting gradients, until begin(). Local. Steps that the agent has not acknowledged may be missing in the log.
        Documentation: lossless.md#logging-gradients-in-a-trainer in shardwright.DOCS"""
        over, self._over, self.active = self._over, None, False
        self._tensors, self._used, self._place, self._wrong = {}, {}, None, None
        if over is not None:
            self._waited += over.waited
            over.close()

    def close(self) -> None:
        """Waits until the agent has logged everything, then releases the log. Collective. If a rank fails, raises its error on all
        ranks. Documentation: lossless.md#logging-gradients-in-a-trainer in shardwright.DOCS"""
        try:
            def drain() -> None:
                if self._over is not None:
                    with contextlib.suppress(Error):  # a lost agent was already reported, or ends with the run
                        self._over.drain()
            self._ranks.agree(drain)
        finally:
            self.release()

    def release(self) -> None:
        """Ends the log without waiting for the agent, and removes the hooks. Local.
        Documentation: lossless.md#logging-gradients-in-a-trainer in shardwright.DOCS"""
        self.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._own_group:
            self._ranks.close()

    # Before the first step.

    def _check(self) -> None:
        """Raises UnsupportedError for optimizers, options and processors that lib/partial/optimizer_steps does not support."""
        optimizer = self._optimizer
        kind = type(optimizer)
        if kind.__name__ == "DeepSpeedCPUAdam" or not kind.__module__.startswith("torch.optim"):
            raise Error(UNSUPPORTED, f"optimizer {kind.__module__}.{kind.__name__}: its steps cannot be replayed exactly; "
                                     "with DeepSpeed, pass an optimizer of torch.optim, or set \"torch_adam\": true")
        if isinstance(self._trainer, DeepSpeedTrainer) and self._trainer.stage not in (1, 2):
            raise Error(UNSUPPORTED, f"DeepSpeed stage {self._trainer.stage}: only gradients of stages 1 and 2 can be logged")
        if getattr(self._trainer.optimizer, "cpu_offload", False):
            raise Error(UNSUPPORTED, "an offloaded optimizer (ZeRO-Offload) is not supported by the gradient log")
        capability = torch.backends.cpu.get_cpu_capability()
        if platform.machine() != "x86_64" or capability not in CHOICES:
            raise Error(UNSUPPORTED, f"torch's kernels for {platform.machine()} {capability}: only those for x86-64 can be replayed exactly")
        if (torch.full((1,), 1e-39, device="cpu") * 1).item() == 0:
            raise Error(UNSUPPORTED, "torch.set_flush_denormal(True): steps cannot be replayed exactly; leave denormals on")
        for group in optimizer.param_groups:
            call("check_step", self._options_of(group))
            for param in group["params"]:
                local = getattr(param, "_local_tensor", param)
                if local.device.type != "cpu" or local.dtype != torch.float32:
                    raise Error(UNSUPPORTED, f"an optimizer tensor of shape {tuple(param.shape)} is {local.dtype} on {local.device}: only "
                                             "steps in float32 on the CPU can be replayed exactly")

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of an optimizer group in the form of lib/partial/optimizer_steps."""
        options: dict[str, float] = {}
        for name in self._optimizer.defaults:
            value = group[name]
            if name == "betas":
                options["beta1"], options["beta2"] = map(self._number, value)
            elif value is not None and name != "initial_accumulator_value":  # None: torch selects
                options[name] = self._number(value)
        return {"optimizer": type(self._optimizer).__name__, "options": options}

    def _number(self, value: Any) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        raise Error(UNSUPPORTED, f"options of {type(self._optimizer).__name__}: a number expected, found a {type(value).__name__}")

    def _ask(self) -> tuple[dict[str, Any], str | None]:
        """Requests the experts of the agent's model, and submits this machine's table of square roots. Returns the experts, and the
        name of the table, None if the agent needs no table."""
        with Connection(self._agent, user=self._user) as agent:
            agent.send("experts")
            experts = agent.json()
            roots, last = square_roots()
            memory = GradientMemory(roots.numel() * ITEM)
            try:
                memory.floats.copy_(roots)
                agent.send(f"roots {last}")
                agent.answer()
                agent.send_descriptor(memory.descriptor)
                digest = agent.answer()
            finally:
                memory.close()
        return experts, None if digest == "none" else digest

    def _pieces(self, elems: dict[str, int]) -> list[tuple[int, list[Piece]]]:
        """Returns the ranges that belong to experts, for each tensor of the optimizer: (number of the tensor, ranges).
        elems: number of elements of each parameter of an expert."""
        found: list[tuple[int, list[Piece]]] = []
        numbers = {id(param): number for number, param in enumerate(self._params())}
        for tensor, ranges in self._ranges():
            pieces = []
            for name, whole, first, place, count in ranges:
                if name not in elems:
                    continue
                if whole != elems[name]:
                    raise Error(MISMATCH, f'"{name}": has {whole} elements, in the agent\'s model {elems[name]}')
                pieces.append((name, whole, first, place, count))
            if pieces:
                found.append((numbers[id(tensor)], sorted(pieces, key=lambda piece: piece[3])))
        return found

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _ranges(self) -> Iterator[tuple[torch.Tensor, list[Piece]]]:
        """Yields each tensor of the optimizer with its ranges of parameters."""
        names = self._trainer.names
        if isinstance(self._trainer, DeepSpeedTrainer):
            for flat, places in self._trainer._flats():
                yield flat, [(names[id(param)], param.numel(), first, place, count) for param, place, count, first in places]
            return
        for param in self._params():
            share = share_of(param, names[id(param)], self._ranks.rank)
            if share is not None:
                yield param, [(names[id(param)], param.numel(), share[0], 0, share[1])]

    def _connect(self, experts: dict[str, Any], pieces: list[tuple[int, list[Piece]]]) -> None:
        """Connects to the agent, and sends the layout of this rank's gradients in a place."""
        params = list(self._params())
        by_param: dict[str, list[dict[str, Any]]] = {}
        end = 0  # end of the layout so far, in elements
        for index, (number, ranges) in enumerate(pieces):
            runs: list[tuple[int, int, int]] = []
            for name, whole, first, place, count in ranges:
                if runs and runs[-1][0] + runs[-1][2] == place:
                    runs[-1] = runs[-1][0], runs[-1][1], runs[-1][2] + count
                else:
                    runs.append((place, end, count))
                by_param.setdefault(name, []).append({"param": name, "elems": whole, "first": first, "count": count,
                                                      "dtype": "float32", "offset": end * ITEM, "tensor": index})
                end += count
            tensor = self._tensors[id(params[number])] = _Tensor(index, runs)
            tensor.count = self._made(params[number])
        self._used, self._place = {}, None
        if end == 0:
            return
        modules: dict[str, list[dict[str, Any]]] = {}
        for module, name, _ in experts["params"]:
            modules.setdefault(module, []).extend(by_param.get(name, []))
        description = {"recovery": experts["recovery"], "begun": self._last, "every": self._every, "zstd": self._zstd,
                       "tensors": len(pieces),
                       "modules": [{"name": name, "pieces": found} for name, found in modules.items() if found]}
        size = -(-end * ITEM // 4096) * 4096
        places = max(2, min(PLACES, self._memory // size))
        self._over = Submission(self._agent, self._user, self._ranks.rank, description, size, places)

    # In each step.

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._over is not None and "momentum" in optimizer.defaults:
            self._fresh = {id(param) for group in optimizer.param_groups for param in group["params"]
                           if optimizer.state.get(param, {}).get("momentum_buffer") is None}

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Copies the gradients after a step, in the form that the step used. Stores an error instead of raising it, because other
        ranks are in their steps."""
        if self._over is None or self._wrong is not None:
            return
        try:
            for group in optimizer.param_groups:
                options: dict[str, Any] | None = None
                for param in group["params"]:
                    tensor = self._tensors.get(id(param))
                    if tensor is None or param.grad is None:
                        continue
                    options = options or self._options_of(group)
                    self._keep(optimizer, param, tensor, options)
        except Exception as error:  # any error: this rank alone must not leave its step
            self._wrong = str(error)

    def _keep(self, optimizer: torch.optim.Optimizer, param: torch.Tensor, tensor: _Tensor, options: dict[str, Any]) -> None:
        """Copies a gradient into the current place, and records the step that used it."""
        assert self._over is not None and param.grad is not None
        if tensor.number in self._used:
            raise Error(USAGE, "the optimizer has made two steps since the last call of step(); call step() after each of them")
        grad = getattr(param.grad, "_local_tensor", param.grad).detach()
        if grad.dtype != torch.float32 or grad.layout != torch.strided:
            raise Error(UNSUPPORTED, f"a gradient in float32 and torch.strided expected, found {grad.dtype}, {grad.layout}")
        flat = grad.reshape(-1)
        if self._place is None:
            self._place = self._over.take()
        to = self._over.place(self._place)
        for first, place, count in tensor.runs:
            to[place:place + count].copy_(flat[first:first + count])
            self.handed_bytes += count * ITEM
        self._used[tensor.number] = options | {
            "count": _count_of(optimizer.state[param]),
            "first_momentum": options["options"].get("momentum", 0) != 0 and id(param) in self._fresh}

    def _submit(self, iteration: int) -> None:
        """Submits the gradients of an iteration. Raises UsageError if a step was not seen."""
        over = self._over
        assert over is not None
        texts: list[str] = [""] * len(self._tensors)
        cache: dict[str, str] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                tensor = self._tensors.get(id(param))
                if tensor is None:
                    continue
                used = self._used.get(tensor.number)
                step = {"fused": self._fused, "gradient_factor": 1.0, "skipped": used is None} | (
                    used or self._options_of(group) | {"count": _count_of(self._optimizer.state.get(param, {})),
                                                       "first_momentum": False})
                expected = tensor.count + (0 if used is None else 1)
                if step["count"] is None:  # SGD does not count its steps, and others do so from their first step
                    step["count"] = expected
                if self._roots is not None:
                    step["roots"] = self._roots
                if step["count"] not in (expected, 1 << 24):
                    raise Error(USAGE, f"the optimizer has made {step['count']} steps, expected {expected}: the gradient of a step "
                                       "was not seen")
                tensor.count = step["count"]
                key = json.dumps(step)
                texts[tensor.number] = cache.setdefault(key, key)
        if self._place is None:
            self._place = over.take()  # the step was skipped
        over.send(iteration, self._place, f"[{','.join(texts)}]")
        self._used, self._place = {}, None

    def _made(self, param: torch.Tensor) -> float:
        """Returns the number of steps that the optimizer has made of a parameter before the first submission."""
        count = _count_of(self._optimizer.state.get(param, {}))
        if count is not None or type(self._optimizer).__name__ != "SGD":
            return count or 0.0
        engine = getattr(self._trainer, "engine", None)
        return float(self._last - (engine.skipped_steps if engine is not None else 0))


def _count_of(state: dict[str, Any]) -> float | None:
    """Returns the step count in an optimizer state, None if it has none."""
    count = state.get("step")
    return None if count is None else float(count)
