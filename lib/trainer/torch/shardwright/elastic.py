# SPDX-License-Identifier: Apache-2.0
"""Elastic training of models with replicated experts: nodes may fail and join while torchrun keeps the run going.

    run = shardwright.elastic.Elastic("run/", layers=2, experts=8, slots=6)   # plans for the nodes that are there
    model = build(run.plan)                                                 # this rank's experts
    step = run.load(model, optimizer)                                       # from the memory of nodes, or from storage
    for step in range(step, steps):
        ...
        run.step(tokens)                                                    # after each optimizer step
    run.close()

Each node is started with `python -m shardwright.elastic node`, and one process of the job with `python -m shardwright.elastic
controller`. Documentation: elastic.md in shardwright.DOCS
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._elastic_node import MEMORY, NODE, Steps, main
from ._elastic_plan import make_plan
from ._elastic_state import DENSE, Expert, Keyed, Trained, bytes_of, check_experts, copy_dense, copy_experts, expert_of, key_of
from ._errors import BAD_INPUT, MISMATCH, USAGE, Error
from ._group import Group, moving
from ._library import expanded
from ._migrate import migrate
from ._node_memory import NodeClient, Slot, State
from ._plans import ExpertPlan
from ._types import Path, TokenCounts

__all__ = ["Elastic"]

NAMES = r"layers\.(\d+)\.experts\.(\d+)\."
RECORD = "checkpoint.json"  # names the newest whole checkpoint
RESTARTS = "restarts.jsonl"


class Elastic:
    """An elastic run of a trainer with experts, on one rank. Collective, like all methods.

    Each node that `python -m shardwright.elastic node` starts keeps the newest states of its ranks in memory. After a change of the
    nodes torchrun starts the training processes again. The constructor then plans the placement of experts for the nodes that
    are there, and load() fills the model: from the memory of this node, from other nodes, and from storage only what no node has.

    The state is always that of one iteration. If the remaining nodes have all experts of a newer iteration than the newest
    checkpoint, it is that one. Otherwise it is that of the checkpoint, and nodes still provide what they have of it in memory.

    Args:
        folder: directory of the run, on storage that all nodes see. It is created if the name is free. ~ is expanded.
        layers: number of MoE layers.
        experts: number of experts of each layer.
        slots: experts of each layer that a GPU can hold.
        names: pattern of the names of experts' parameters, with the numbers of layer and expert as its first two groups.
        faults: nodes that may fail at once without the loss of an expert, as in moe-replace. If the nodes have too few slots, the
            largest possible number is used.
        save_every: steps between checkpoints in the folder.
        memory_every: steps between copies into the memory of nodes. A failure repeats at most this many steps if no expert is lost.
        flags: more flags of moe-replace.
        command: the program moe-replace.
        wait: seconds to wait for more joining nodes after the first one. They join after the next copy into memory.
        group: process group of the ranks. Default: all ranks.

    Attributes:
        plan: ExpertPlan for the ranks of the group. Build the model for it before you call load.
        restart: what the last load did: "source" ("memory", "storage" or "start"), "iteration", "nodes", "experts", "bytes" and
            "seconds". Complete after the first step().

    Raises:
        UsageError: the process was not started by `python -m shardwright.elastic node`, or an argument is invalid. MismatchError:
        the folder belongs to another model. Error with code 10: the experts do not fit on the nodes.

    Documentation: elastic.md in shardwright.DOCS
    """

    plan: ExpertPlan
    restart: dict[str, object]

    def __init__(self, folder: Path, *, layers: int, experts: int, slots: int, names: str = NAMES, faults: int = 1,
                 save_every: int = 100, memory_every: int = 1, flags: Sequence[str] = (), command: str = "moe-replace",
                 wait: float = 120, group: dist.ProcessGroup | None = None) -> None:
        began = time.time()
        self._group = Group(group)
        self._folder = os.path.abspath(expanded(folder))
        self._names = re.compile(names)
        self._shape = {"layers": layers, "experts": experts}
        self._save_every, self._memory_every = save_every, memory_every
        self._trained: Trained | None = None
        self._iteration, self._era = 0, ""
        self._stepped: float | None = None
        self._seconds: dict[str, float] = {}
        ranks = moving(lambda: self._group.agree(self._open))
        self._job = moving(lambda: self._group.agree(self._job_of))[0]
        self._record = moving(lambda: self._group.agree(self._read_record))[0]
        self._choose(ranks)
        planning = time.time()
        counted = moving(lambda: self._group.gather(None if self._state is None else self._state.tokens))
        self._tokens: list[list[int]] = next((one for one in counted if one is not None), [[1] * experts for _ in range(layers)])
        self._old = self._old_plan()
        nodes = list(dict.fromkeys(name for name, _, _ in ranks))
        if [name for name, _, _ in ranks] != [name for name in nodes for _ in range(len(ranks) // len(nodes))]:
            raise Error(USAGE, f"{self._folder}: equal numbers of ranks on all nodes expected, in the order of nodes")
        self._text = moving(lambda: self._group.agree(lambda: make_plan(
            self._texts, nodes, len(ranks) // len(nodes), slots, self._tokens, faults, None if self._old is None else self._old.path,
            [*map(str, flags)], expanded(command)) if self._group.rank == 0 else ""))[0]
        self.plan = ExpertPlan.read(self._write("plan.json", self._text), self._group._given)
        self._seconds["agree"], self._seconds["plan"] = planning - began, time.time() - planning
        self._nodes, self._began = nodes, began
        self._steps = Steps(wait) if self._group.rank == 0 else None

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Fills the model and its optimizer with the newest state of the run.

        Collective. Call it once, before the first step. At the start of a run it changes nothing.

        Args:
            model: has exactly the experts that the plan places on this rank. May be wrapped by DistributedDataParallel.
            optimizer: a PyTorch optimizer of its parameters.

        Returns:
            The number of optimizer steps that the run has made.

        Raises:
            UsageError: the model does not match the plan, or `names` matches two parameters of one expert. MismatchError: the run
            has another model. TransferError: a rank is gone. CorruptInputError: the checkpoint is corrupt. After an error no
            state was lost: start the processes again.

        Documentation: elastic.md#steps-of-a-restart in shardwright.DOCS
        """
        began = time.time()
        wanted = {(layer, expert) for layer in self.plan.layers for expert, ranks in enumerate(self.plan.state(layer))
                  if self._group.rank in ranks}
        made: list[Trained] = []

        def take() -> None:
            made.append(Trained(model, optimizer, self._names))
            check_experts(made[0], wanted, self._folder)

        moving(lambda: self._group.agree(take))
        trained = made[0]
        own = {key_of(one) for one in wanted} & set(self._state or ())
        counts = {"kept": len(own), "moved": 0, "stored": 0}
        sizes = {"own_memory": 0 if self._state is None else self._state.bytes, "other_nodes": 0, "storage": 0}
        if self._chosen is not None:
            self._fill(trained, wanted, counts, sizes)
        self._iteration = 0 if self._chosen is None else self._chosen[0]
        # All ranks have the state now. Nodes discard newer states only from here on.
        self._era = moving(lambda: self._group.gather(uuid.uuid4().hex))[0]
        self._client.discard(self._job, self._iteration)
        self._trained = trained
        self._seconds["load"] = time.time() - began
        told = moving(lambda: self._group.gather((counts, sizes)))
        self.restart = {
            "source": self._source, "iteration": self._iteration, "nodes": self._nodes, "ranks": self._group.size,
            "experts": {key: sum(one[key] for one, _ in told) for key in counts},
            "bytes": {key: max(one[key] for _, one in told) if key == "storage" else sum(one[key] for _, one in told)
                      for key in sizes},
            "began": self._began, "seconds": self._seconds}
        self._state = None
        self._stepped = time.time()
        return self._iteration

    def step(self, tokens: TokenCounts | None = None) -> None:
        """Copies the state into the memory of the nodes, and writes a checkpoint if one is due.

        Collective. Call it after each optimizer step.

        Args:
            tokens: tokens that this rank's gates have sent to each expert in the step, [layer][expert]. The values of all ranks are
                added, for the next plan. Default: the counts of the last call with tokens.

        Raises:
            UsageError: load() was not called, or tokens have the wrong shape. UnsupportedError: the optimizer has other states
            than a step count and tensors with the shape of their parameter. TransferError: a rank is gone, or cannot write a
            checkpoint.

        Documentation: elastic.md#the-trainer in shardwright.DOCS
        """
        if self._trained is None:
            raise Error(USAGE, "Elastic.step: load() must be called first")
        self._iteration += 1
        if tokens is not None:
            counts = torch.stack([torch.as_tensor(one, device="cpu").to(torch.int64) for one in tokens])
            if list(counts.shape) != [self._shape["layers"], self._shape["experts"]]:
                raise Error(USAGE, f"tokens: [layers][experts] expected, found {list(counts.shape)}")
            if self._group.size > 1:
                moving(lambda: dist.all_reduce(counts, group=self._group.for_tensors(counts)))
            self._tokens = counts.tolist()
        save = self._iteration % self._save_every == 0
        if save or self._iteration % self._memory_every == 0:
            self._client.put(Slot(self._job, self._iteration, self._era, self._local, save), self._trained.parts(), self._text,
                             self._tokens)
        if save:
            self._save()
        if self._stepped is not None:
            self._seconds["first_step"] = time.time() - self._stepped
            self._stepped = None
            if self._group.rank == 0:
                _append(os.path.join(self._folder, RESTARTS), {**self.restart, "ended": time.time()})
        if self._steps is not None:
            self._steps.made(self._iteration, self._iteration % self._memory_every == 0 or save)

    def close(self) -> None:
        """Ends the run: nodes that wait to join end. Collective. The states of the last checkpoint stay in the folder."""
        moving(lambda: self._group.gather(None))
        if self._steps is not None:
            self._steps.done()
        self._client.close()
        self._group.close()

    # The methods below are local unless their comments state that they are collective.

    def _open(self) -> tuple[str, int, list[Slot]]:
        """Returns the node of this rank, its local rank and its states."""
        if not os.environ.get(MEMORY):
            raise Error(USAGE, f"{MEMORY} is not set: start each node with python -m shardwright.elastic node")
        self._local = int(os.environ.get("LOCAL_RANK", "0"))
        self._client = NodeClient(os.environ[MEMORY], self._local)
        self._texts = f"{os.environ[MEMORY]}.plans-{self._local}"  # in the launcher's folder, which it removes
        os.makedirs(self._texts, exist_ok=True)
        return os.environ[NODE], self._local, self._client.slots()

    def _job_of(self) -> str:
        """Rank 0: returns the identifier of the run in the folder. Creates it in a new folder."""
        if self._group.rank != 0:
            return ""
        os.makedirs(self._folder, exist_ok=True)
        path, job = os.path.join(self._folder, "job.json"), {"job": uuid.uuid4().hex, **self._shape}
        if not os.path.exists(path):
            _replace(path, job)
        found = _read(path)
        for key, value in self._shape.items():
            if found.get(key) != value:
                raise Error(MISMATCH, f"{path}: the run in this folder has {key}={found.get(key)}, this trainer {value}: use another "
                                      "folder")
        return str(found["job"])

    def _read_record(self) -> dict[str, Any] | None:
        """Rank 0: returns the record of the newest checkpoint."""
        path = os.path.join(self._folder, RECORD)
        if self._group.rank != 0 or not os.path.exists(path):
            return None
        record = _read(path)
        if record.get("job") != self._job:
            raise Error(MISMATCH, f"{path}: a checkpoint of another run")
        return record

    def _choose(self, ranks: list[tuple[str, int, list[Slot]]]) -> None:
        """Collective. Chooses the state to continue from: its iteration and era, and whether nodes have all of it."""
        mine = [slot for slot in ranks[self._group.rank][2] if slot.job == self._job]
        names = sorted({slot.name for _, _, of in ranks for slot in of if slot.job == self._job}, reverse=True)
        saved = None if self._record is None else (int(self._record["iteration"]), str(self._record["era"]))
        self._chosen: tuple[int, str] | None = None
        self._source, self._state = "start", None
        for name in names:
            if saved is not None and name[0] < saved[0]:
                break
            state = next((self._client.get(slot) for slot in mine if slot.name == name), None)
            if self._covered(ranks, state):
                self._chosen, self._source, self._state = name, "memory", state
                return
        if saved is not None:
            self._chosen, self._source = saved, "storage"
            self._state = next((self._client.get(slot) for slot in mine if slot.name == saved), None)

    def _covered(self, ranks: list[tuple[str, int, list[Slot]]], state: State | None) -> bool:
        """Collective. Returns whether the ranks with this state have all of it, and no node of its plan that is still there lacks it."""
        told = moving(lambda: self._group.gather(None if state is None else (state.plan, sorted(state))))
        plans = {one[0] for one in told if one is not None}
        if len(plans) != 1:  # ranks cannot have several: one plan belongs to an era
            return False
        members = {node["name"] for node in json.loads(plans.pop())["cluster"]["nodes"]}
        if any(one is None and ranks[rank][0] in members for rank, one in enumerate(told)):
            return False
        have = {key for one in told if one is not None for key in one[1]}
        return have == {DENSE} | {key_of((layer, expert)) for layer in range(self._shape["layers"])
                                  for expert in range(self._shape["experts"])}

    def _old_plan(self) -> ExpertPlan | None:
        """Collective. Returns the plan of the state in memory, None if storage has to provide a part of it."""
        texts = moving(lambda: self._group.gather(None if self._state is None else self._state.plan))
        text = next((one for one in texts if one is not None), None)
        if text is None or self._source != "memory":
            return None
        plan = json.loads(text)
        return ExpertPlan._of_old_ranks(self._write("old.json", text), sum(len(node["gpus"]) for node in plan["cluster"]["nodes"]))

    def _write(self, name: str, text: str) -> str:
        path = os.path.join(self._texts, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def _fill(self, trained: Trained, wanted: set[Expert], counts: dict[str, int], sizes: dict[str, int]) -> None:
        """Collective. Fills the trainer with the chosen state."""
        missing = {key_of(one) for one in wanted}
        memory = self._state or {}  # of this node
        adopted: Keyed = {}
        if self._old is not None:
            held = {expert_of(key): tensors for key, (_, tensors) in memory.items() if key != DENSE}
            labels = moving(lambda: self._group.gather({key: names for key, (names, _) in memory.items() if key != DENSE}))
            for expert, tensors in migrate(self._old, self.plan, held, self._group._given).items():
                key = key_of(expert)
                adopted[key] = next(one[key] for one in labels if key in one), tensors
                if key not in memory:
                    sizes["other_nodes"] += bytes_of(tensors)
        else:
            found, arrived = copy_experts(self._state, wanted, self._group)
            adopted.update(found)
            sizes["other_nodes"] += arrived
        counts["moved"] += len(adopted.keys() - memory.keys())
        missing -= adopted.keys()
        if moving(lambda: self._group.any(self._state is not None)):
            adopted[DENSE], arrived = copy_dense(self._state, self._group)
            sizes["other_nodes"] += arrived
        else:
            missing.add(DENSE)
        trained.adopt(adopted)
        if moving(lambda: self._group.any(bool(missing))):
            if self._record is None:
                raise Error(BAD_INPUT, f"{self._folder}: no checkpoint has what the nodes lack")  # _choose prevents it
            sizes["storage"] = trained.load(os.path.join(self._folder, str(self._record["path"])), missing, self._group)
            counts["stored"] = len(missing - {DENSE})

    def _save(self) -> None:
        """Collective. Writes a checkpoint, and makes it the newest one once it is whole."""
        assert self._trained is not None
        name = f"step-{self._iteration:08d}-{self._era[:8]}"
        path = os.path.join(self._folder, name)
        self._trained.save(path, self._group)

        def record() -> None:
            if self._group.rank == 0:
                if self._read_record() != self._record:  # this process was stalled while the others were started again
                    raise Error(MISMATCH, f"{self._folder}: other processes continue this run")
                _sync_folder(path)  # torch.distributed.checkpoint syncs the files, but not their names
                self._record = {"job": self._job, "iteration": self._iteration, "era": self._era, "path": name}
                _replace(os.path.join(self._folder, RECORD), self._record)

        moving(lambda: self._group.agree(record))
        self._client.settle((self._iteration, self._era))
        if self._group.rank == 0:
            for other in os.listdir(self._folder):
                if re.fullmatch(r"step-\d{8}-[0-9a-f]{8}", other) and other != name:
                    shutil.rmtree(os.path.join(self._folder, other), ignore_errors=True)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found, dict):
            raise ValueError("an object expected")
        return found
    except ValueError as error:
        raise Error(BAD_INPUT, f"{path}: {error}") from error


def _replace(path: str, value: dict[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    _sync_folder(os.path.dirname(path))


def _sync_folder(path: str) -> None:
    """Makes the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _append(path: str, value: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
