"""shardwright.PartialCheckpoints"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import stat
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _errors
from ._agent import Connection, user_id
from ._agent_process import OwnAgent
from ._deepspeed import DeepSpeed
from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._far import wait_for_devices
from ._files import HeaderEngine, NoCopies, Part
from ._group import Group
from ._idle import IdleTimes
from ._library import call, expanded
from ._load import Loaded, load
from ._lossless import GradientLog
from ._tokens import TokenLog, count_tokens

# What no later snapshot can be free of; anything else is a warning, and training goes on.
LASTING = {USAGE, _errors.BAD_INPUT, MISMATCH, UNSUPPORTED}
OLDEST = (0, 19, 3)  # DeepSpeed, whose files of experts say where everything lies
PATIENCE = 300  # seconds until all ranks have copied their tensors beside the training: an agent waits for twice as long
MARK = "hand-over.json"  # names what a trainer is about to put into the folder, for the next one to remove


class Snapshot(int):
    """What PartialCheckpoints.step returns where a snapshot was due: true if it was taken, or with overlap if it has begun.

    iteration: of the snapshot.
    where: "memory" where the agent's memory has it or is getting it, from where the agent saves it into the store; "nowhere" where
        it was not taken.
    stored: iteration of the last snapshot that this agent had saved into the store when step() was called; None: none yet, or the
        agent did not answer.
    """

    iteration: int
    where: str
    stored: int | None

    def __repr__(self) -> str:
        return f"Snapshot({bool(self)}, iteration={self.iteration}, where={self.where!r}, stored={self.stored})"


class PartialCheckpoints:
    """Checkpoints of a few experts at a time, out of a running DeepSpeed engine into an agent's memory and a store.

        pec = shardwright.PartialCheckpoints(engine, "store/", k=2, every=10)
        step = int(pec.load())       # goes on from the newest of memory and store; 0 at the beginning of a run
        ...
        pec.step()                   # after each step of the optimizer
        ...
        pec.close()

    All ranks make it, step it and close it alike; they are on one machine. The trainer writes no checkpoint of its own:
    the first snapshot has every expert, each later one everything but the experts, and k experts of each MoE layer.

    store: as of pec-save, ~ expanded. Where nothing has that name a store is begun there. Raises Error where the parent folder is
        missing, or where it is anything but a store, or cannot be written to.
    k: experts of each MoE layer in a snapshot; None: as the agent has it.
    every: steps of the optimizer between snapshots.
    agent: where an agent listens, unix:PATH, whose folder of checkpoints is there for this alone. Default: one of this
        object's own, which outlives a trainer that is killed and is found again by the store's path.
    trust_user: with agent=, a user, by name or number, whose agent is accepted besides those of this process's user and of
        root. Its folder of checkpoints and its log of tokens are used only where checkpoints= and tokens= name the same.
    checkpoints: with agent=, the agent's folder of checkpoints. Default: what the agent reports, if that folder is this user's.
    flags: further flags of pec-save agent, for an agent of its own: ["--policy", "load-aware", "--peer", "node8:4711"].
    tokens: the log of tokens per expert; default the agent's, for an agent of its own STORE.tokens.jsonl.
    command: the program pec-save, for an agent of its own.
    overlap: training goes on while its tensors are copied, until the optimizer's next step waits for that. Between step() and
        that nothing else may change parameters or states of the optimizer. Default: where they are on a device.
    lossless: each step() also hands the gradients of experts over that the optimizer has used, so that a restore can make
        its steps again and nothing is lost (docs/lossless.md). With flags=["--policy", "replay"] those that a snapshot makes
        unnecessary are not written. log_zstd, log_memory: zstd= and memory= of GradientLog.

    Attributes: agent, the address; handed_bytes, what all ranks have copied for the last snapshot, small tensors apart.
    """

    agent: str
    handed_bytes: int

    def __init__(self, engine: Any, store: str | os.PathLike[str], *, k: int | None = 1, every: int = 1,
                 agent: str | None = None, trust_user: int | str | None = None,
                 checkpoints: str | os.PathLike[str] | None = None, flags: Sequence[str] = (),
                 tokens: str | os.PathLike[str] | None = None, command: str = "pec-save",
                 overlap: bool | None = None, lossless: bool = False, log_zstd: int = 0, log_memory: int | str = 1 << 30, group: Any = None,
                 deadline: float = 600) -> None:
        self._engine, self._group = engine, Group(group)
        self._own: OwnAgent | None = None
        self._waiting: threading.Thread | None = None
        self._late: Error | None = None  # what the agent has said after training had gone on
        self._filling: threading.Thread | None = None
        self._overlap, self._hook = overlap, None
        self._wrong: str | None = None  # with what step() was called
        self._deadline = deadline
        self._asks = {"store": os.path.realpath(expanded(store)), "k": k, "every": every, "agent": agent,
                      "trust_user": user_id(trust_user), "flags": list(flags), "lossless": lossless, "overlap": overlap}
        self.gradients: GradientLog | None = None
        self._idle: IdleTimes | None = None
        self._counts = count_tokens(engine.module)
        try:
            self._group.meet("PartialCheckpoints()", deadline)
            self._same(self._group.agree(self._check))
            self.agent, self._folder, self._log_path, mark = self._group.agree(lambda: self._open(command, tokens, checkpoints))[0]
            self._group.agree(lambda: self._see_folder(mark))
            if self._overlap:
                self._hook = DeepSpeed(engine).base.register_step_pre_hook(lambda *_: self._filled())
            if lossless:
                self.gradients = GradientLog(engine, self.agent, every=every, zstd=log_zstd, memory=log_memory, group=self._group,
                                             trust_user=self._asks["trust_user"])
        except BaseException:
            if self._own is not None and self._own.started:
                with contextlib.suppress(Exception):  # what was wrong is what is told
                    self._own.stop()
            self._release()
            raise
        self._log = TokenLog(self._log_path)  # that rank 0 writes
        self.handed_bytes = 0
        self._last: int = engine.global_steps
        self._pending: list[tuple[int, list[list[int]]]] = []  # of steps since the last snapshot
        self._due: int | None = None  # iteration of the last snapshot that was due
        self._stored: int | None = None  # as of Snapshot.stored
        self._failed_saves = 0  # of the agent, that were warned of

    def load(self, **options: Any) -> Loaded:
        """As shardwright.load out of the store and the agent's memory; 0 where the run begins. Collective."""
        self._filled()
        options = {"agents": [self.agent], "trust_user": self._asks["trust_user"], "begin": True,
                   "deadline": self._deadline} | options
        if self.gradients is not None:
            self.gradients.end()
        loaded = load(self._engine, self._asks["store"], **options)
        if self.gradients is not None and loaded.restored is not None and loaded.restored["iteration"] is not None:
            self._begin_log()
        self._last, self._pending, self._due = self._engine.global_steps, [], None
        self._counts.clear()
        self._log = TokenLog(self._log_path)  # what was logged of later iterations goes
        return loaded

    def step(self, tokens: Any = None, client_state: dict[str, Any] | None = None) -> Snapshot | None:
        """After each step of the optimizer; it may be called after micro steps too. Collective.

        tokens: how many tokens this rank has sent to each expert since the last step, [MoE layer][expert]; those of all
            ranks are added up. Default: counted by hooks on DeepSpeed's MoE layers, which see a forward pass that
            activation checkpointing repeats twice.
        client_state: as of DeepSpeed's save_checkpoint.
        Returns None where no snapshot was due, else a Snapshot: false where none was taken. Then a warning says why, training goes
        on, and the next one is tried as ever. Raises Error where no later one could be taken either.
        """
        iteration = self._engine.global_steps
        if iteration == self._last:
            return None
        counted = self._counts.take()
        if tokens is not None:
            given = [torch.as_tensor(layer).tolist() for layer in tokens]
            found = tuple(map(len, given))
            if found == self._counts.shape:
                counted = given
            else:  # said where all ranks hear of it
                self._wrong = f"tokens of iteration {iteration}: experts of each layer {self._counts.shape} expected, found {found}"
        self._last = iteration
        if self.gradients is not None:
            self.gradients.step(iteration)  # before a snapshot of it: a persist waits for what was handed over
        self._pending.append((iteration, counted))
        if iteration % self._asks["every"]:
            return None
        self._due = iteration
        taken = Snapshot(self._quietly(lambda: self._snapshot(iteration, client_state or {})))
        taken.iteration, taken.stored = iteration, self._stored
        taken.where = "memory" if taken else "nowhere"
        return taken

    def idle(self) -> IdleTimes:
        """For `with`, around what this rank waits in: the agent copies and saves while ranks idle. Local; a rank that has never
        asked for it is not waited for."""
        if self._idle is None:
            # One rank alone must not end for that.
            self._idle = IdleTimes(self.agent, self._group.rank, strict=False, trust_user=self._asks["trust_user"])
        return self._idle

    def close(self) -> int | None:
        """Waits until the newest snapshot is in the store, and ends an agent of its own. Collective.

        Returns the store's newest iteration, None where it has none. Raises Error where that is older than the last snapshot that was
        due.
        """
        def end() -> int | None:
            self._filled()
            if self._group.rank != 0:
                return None
            self._wait()
            self._warn_late()
            with self._connect(self.agent) as agent:
                agent.send("flush")
                stored = agent.answer()
            if self._own is not None:
                self._own.stop()
            newest = None if stored == "none" else int(stored)
            if self._due is not None and (newest is None or newest < self._due):
                found = "has no checkpoint" if newest is None else f"ends with iteration {newest}"
                raise Error(_errors.IO, f"{self._asks['store']}: the last snapshot, of iteration {self._due}, is not in the store, which "
                                        f"{found}: save with save_checkpoint what must not be lost; earlier warnings say why")
            return newest

        try:
            self._group.meet("PartialCheckpoints.close", self._deadline)
            if self.gradients is not None:
                self.gradients.close()
            return self._group.agree(end)[0]
        finally:
            self._release()

    def _release(self) -> None:
        self._filled()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._idle is not None:
            self._idle.close()
        if self.gradients is not None:
            self.gradients.release()
        self._counts.close()
        self._group.close()

    # What follows is collective where it says so; the others are of one rank.

    def _check(self) -> dict[str, Any]:
        """Refuses what cannot be handed over; what this rank asks for."""
        engine, asks = self._engine, self._asks
        DeepSpeed(engine)  # refuses what it does not know
        if engine.zero_optimization_stage() not in (1, 2):
            raise Error(UNSUPPORTED, f"stage {engine.zero_optimization_stage()} of DeepSpeed: snapshots of experts are "
                                     "for stages 1 and 2 and BF16_Optimizer")
        if not self._counts.layers:
            raise Error(UNSUPPORTED, "a model without MoE layers of DeepSpeed: there are no experts to choose from")
        import deepspeed
        version = tuple(int(number) for number in re.findall(r"\d+", deepspeed.__version__)[:3])
        if version < OLDEST:
            raise Error(UNSUPPORTED, f"DeepSpeed {deepspeed.__version__}: {'.'.join(map(str, OLDEST))} or newer is needed")
        if not isinstance(asks["every"], int) or asks["every"] < 1:
            raise Error(USAGE, f"every={asks['every']}: one or more steps expected")
        hooks = hasattr(DeepSpeed(engine).base, "register_step_pre_hook")
        if asks["overlap"] and not hooks:
            raise Error(UNSUPPORTED, f"overlap=True: optimizer {type(DeepSpeed(engine).base).__name__} has no hooks before its steps")
        if asks["overlap"] is None:
            self._overlap = hooks and any(not param.is_cpu for param in engine.module.parameters())
        if asks["k"] is not None and (not isinstance(asks["k"], int) or asks["k"] < 1):
            raise Error(USAGE, f"k={asks['k']}: one or more experts expected, or None")
        if asks["k"] is not None and asks["k"] > min(self._counts.shape):
            raise Error(USAGE, f"k={asks['k']}: a MoE layer of the model has {min(self._counts.shape)} experts")
        return asks

    def _connect(self, address: str) -> Connection:
        return Connection(address, user=self._asks["trust_user"])

    def _open(self, command: str, tokens: Any, checkpoints: Any) -> tuple[str, str, str | None, str]:
        """Rank 0 finds the agent: its address, its folder, the log of tokens, and what it has marked the folder with."""
        if self._group.rank != 0:
            return "", "", None, ""
        asks = self._asks
        if asks["agent"] is None:
            log = os.path.realpath(expanded(tokens) if tokens else asks["store"] + ".tokens.jsonl")
            self._own = OwnAgent(asks["store"], expanded(command),
                                 ["--k", str(asks["k"] or 1), "--tokens", log, *asks["flags"]])
            call("prepare_store", {"store": asks["store"]})
            self._own.start()
            tokens = log
        elif asks["flags"]:
            raise Error(USAGE, "flags= are for an agent of its own, agent= names another one")
        if asks["agent"] is None and (checkpoints is not None or asks["trust_user"] is not None):
            raise Error(USAGE, "trust_user= and checkpoints= are for agent=: an agent of its own is this user's")
        address = asks["agent"] or self._own.address
        with self._connect(address) as connection:
            status = connection.status()
            foreign = connection.user not in (os.geteuid(), 0)
        if "checkpoints" not in status:
            raise Error(UNSUPPORTED, f"{address}: an agent of an older version, which takes nothing out of trainers")
        for key, kind in (("store", str), ("checkpoints", str), ("tokens", str), ("k", int)):
            if not isinstance(status.get(key), kind):
                raise Error(_errors.BAD_INPUT, f"{address}: status: \"{key}\" is {status.get(key)!r}, a {kind.__name__} expected")
        found = os.path.realpath(status["store"])
        if found != asks["store"]:
            raise Error(MISMATCH, f"{address}: saves into {found}, not into {asks['store']}")
        if asks["k"] is not None and status["k"] != asks["k"]:
            raise Error(MISMATCH, f"{address}: takes {status['k']} experts of each layer, k={asks['k']} is asked for")
        if status.get("policy") == "replay" and not asks["lossless"]:
            raise Error(USAGE, f"{address}: --policy replay needs the gradients of every step: lossless=True")
        log = os.path.realpath(status["tokens"]) if status["tokens"] else None
        if tokens is not None and os.path.realpath(expanded(tokens)) != log:
            raise Error(MISMATCH, f"{address}: reads tokens from {log}, tokens={tokens} is asked for")
        if foreign and tokens is None and log is not None:
            raise Error(USAGE, f"{address}: an agent of user {connection.user} reads tokens from {log}; give tokens= to write there")
        named = checkpoints if self._own is None else self._own.folder
        folder = status["checkpoints"]
        if named is not None and os.path.realpath(expanded(named)) != os.path.realpath(folder):
            raise Error(MISMATCH, f"{address}: has its checkpoints in {folder!r}, {os.fspath(named)!r} is expected")
        if named is None:
            _check_folder(address, folder, foreign)
        elif not os.path.isdir(folder):
            raise Error(_errors.NOT_FOUND, f"{address}: no folder of checkpoints, {folder!r}")
        if os.path.exists(os.path.join(folder, "latest")):
            raise Error(USAGE, f"{folder}: has checkpoints of its own (latest); an agent with a folder for this alone is needed")
        if self._own is None and not foreign:
            call("prepare_store", {"store": asks["store"]})
        self._remove_leftovers(folder)
        return address, folder, log, self._mark(folder, [])

    def _see_folder(self, mark: str) -> None:
        """All ranks must see what rank 0 has just written: there are no other ways for their tensors."""
        seen = ""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, MARK), encoding="utf-8") as file:
            seen = json.load(file)["id"]
        if seen != mark:
            raise Error(UNSUPPORTED, f"rank {self._group.rank} does not see {self._folder} of rank 0: all ranks have to be on "
                                     "one machine")

    def _snapshot(self, iteration: int, client_state: dict[str, Any]) -> None:
        """Collective. Header, choice, tensors: training waits until its tensors are copied."""
        tag = f"global_step{iteration}"
        logs = self.gradients is None or self.gradients.active

        def begin() -> tuple[dict[str, Any], list[tuple[int, list[list[int]]]], bool]:
            self._filled()
            counted = self._counted()
            self._make_room(tag)
            wait_for_devices({param.device for param in self._engine.module.parameters()})
            return self._asks | {"iteration": iteration}, counted, logs

        self._group.meet("PartialCheckpoints.step", self._deadline)
        told = self._group.agree(begin)
        self._same([asks for asks, *_ in told])
        headers = HeaderEngine()
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, headers
        try:
            with NoCopies(self._counts.layers):
                self._engine.save_checkpoint(self._folder, tag=tag, client_state=client_state, save_latest=False)
        finally:
            self._engine.checkpoint_engine = before
        offered: Connection | None = None

        def offer() -> tuple[dict[str, list[tuple[int, int]]], int | None] | None:
            """What the agent takes, by file, and what it has saved last."""
            nonlocal offered
            if self._group.rank == 0:
                self._write_log([pending for _, pending, _ in told])
            if headers.failure is not None:
                raise headers.failure
            if self._group.rank != 0:
                return None
            offered = self._connect(self.agent)
            stored = self._saved_last(offered.status())
            offered.send(f"offer {tag}")
            wanted: dict[str, list[tuple[int, int]]] = {}
            for line in offered.text().splitlines():
                first, count, name = line.split(" ", 2)
                # Before the names of files may be that of the checkpoint's folder.
                wanted.setdefault(os.path.basename(name), []).append((int(first), int(count)))
            return wanted, stored

        self._pending = []
        try:
            wanted, self._stored = self._group.agree(offer)[0]
            later: dict[str, list[Part]] = {}  # what the next step of the optimizer waits for

            def take() -> dict[str, int]:
                """Of each file of this rank the bytes that are asked for; what may change before that step is copied here."""
                mine = {name: headers.files[name].parts(wanted[name]) for name in wanted.keys() & headers.files.keys()}
                buffers = {buffer.data_ptr() for buffer in self._engine.module.buffers()}
                for name, parts in mine.items():
                    if self._overlap:
                        later[name] = [part for part in parts if part.tensor.data_ptr() not in buffers]
                        headers.files[name].fill([part for part in parts if part.tensor.data_ptr() in buffers])
                    else:
                        headers.files[name].fill(parts)
                return {name: sum(part.last - part.first for part in parts) for name, parts in mine.items()}

            taken = self._group.agree(take)
            if nobodys := wanted.keys() - {name for files in taken for name in files}:
                raise Error(_errors.INTERNAL, f"no rank has what the agent asks for: {sorted(nobodys)}")
            self.handed_bytes = sum(sum(files.values()) for files in taken)
            if not self._overlap:
                self._group.agree(lambda: offered.send("filled") if offered is not None else None)
        except BaseException:
            if offered is not None:
                offered.close()  # the agent gives it up
            if self._group.rank == 0:
                self._remove(tag)
            raise
        if self._overlap:
            self._filling = threading.Thread(target=self._fill_beside, args=(headers, later, tag))
            self._filling.start()
        if offered is not None:
            self._waiting = threading.Thread(target=self._await_answer, args=(offered, tag), daemon=True)
            self._waiting.start()
        if self._idle is not None:
            self._idle.check()  # the agent may be another one
        if not all(active for *_, active in told):
            self._begin_log()

    def _saved_last(self, status: dict[str, Any]) -> int | None:
        """Rank 0. The iteration that the agent has saved last; warns where saves have failed since the last look."""
        failed = status.get("persists_failed", 0)
        if failed > self._failed_saves:
            warnings.warn(f"the agent has failed to save into {self._asks['store']} and tries again; memory alone holds what is newer: "
                          f"{status.get('last_error', '')}", stacklevel=6)
        self._failed_saves = failed
        return status.get("persisted")

    def _begin_log(self) -> None:
        """Collective. From the next step on; where it cannot begin it does with a later snapshot."""
        assert self.gradients is not None
        try:
            self.gradients.begin()
        except Error as error:
            if error.code in LASTING:
                raise
            if self._group.rank == 0:
                warnings.warn(f"no log of gradients: {error}", stacklevel=4)

    def _fill_beside(self, headers: HeaderEngine, later: dict[str, list[Part]], tag: str) -> None:
        """Beside the training. The file that it leaves says to rank 0 that it is done, or why it is not."""
        said = ""
        try:
            devices = {part.tensor.device for parts in later.values() for part in parts if not part.tensor.is_cpu}
            with contextlib.ExitStack() as stack:
                for device in devices:  # a stream of its own, which does not wait for what training queues from now on
                    stack.enter_context(torch.Stream(device))
                for name, parts in later.items():
                    headers.files[name].fill(parts)
        except Exception as error:
            said = str(error) or type(error).__name__
        path = self._done_path(tag, self._group.rank)
        with contextlib.suppress(OSError):
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(said)
            os.replace(path + ".new", path)

    def _filled(self) -> None:
        """Waits for this rank's tensors to be copied. Local."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.join()

    def _done_path(self, tag: str, rank: int) -> str:
        return os.path.join(self._folder, f"{tag}.filled-{rank}")

    def _await_filled(self, tag: str) -> None:
        """Rank 0, beside the training: until all ranks have copied their tensors."""
        end = time.monotonic() + PATIENCE
        for rank in range(self._group.size):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    with open(self._done_path(tag, rank), encoding="utf-8") as file:
                        said = file.read()
                    break
                if time.monotonic() > end:
                    raise Error(_errors.IO, f"rank {rank} has not copied its tensors within {PATIENCE} s")
                time.sleep(0.002)
            if said:
                raise Error(_errors.IO, f"rank {rank}: {said}")

    def _await_answer(self, offered: Connection, tag: str) -> None:
        """Rank 0, beside the training: until the agent has its copy."""
        try:
            with offered:
                if self._overlap:
                    self._await_filled(tag)
                    offered.send("filled")
                offered.answer()
        except Error as error:
            self._late = error
        finally:
            self._remove(tag)

    def _make_room(self, tag: str) -> None:
        """Waits for the snapshot before, and says what is about to be written."""
        if self._group.rank != 0:
            return
        self._wait()
        if self._own is not None:
            self._own.start()
        self._remove(tag)
        self._mark(self._folder, [tag])

    def _wait(self) -> None:
        if self._waiting is not None:
            self._waiting.join()
            self._waiting = None

    def _counted(self) -> list[tuple[int, list[list[int]]]]:
        """Tokens of this rank since the last snapshot."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            raise Error(USAGE, wrong)
        return self._pending

    def _write_log(self, pending: list[list[tuple[int, list[list[int]]]]]) -> None:
        for ranks in pending[1:]:
            if [iteration for iteration, _ in ranks] != [iteration for iteration, _ in pending[0]]:
                raise Error(USAGE, "ranks have called step() at different iterations: "
                                   f"{[[iteration for iteration, _ in ranks] for ranks in pending]}")
        self._log.add({ranks[0][0]: [[sum(ranks) for ranks in zip(*layers)] for layers in zip(*(tokens for _, tokens in ranks))]
                       for ranks in zip(*pending)})

    def _remove_leftovers(self, folder: str) -> None:
        """Of a trainer that was killed: what its mark names."""
        with contextlib.suppress(FileNotFoundError):
            with open(os.path.join(folder, MARK), encoding="utf-8") as file:
                tags = json.load(file)["tags"]
            for tag in tags:
                if re.fullmatch(r"global_step\d+", tag):
                    self._remove(tag, folder)

    def _mark(self, folder: str, tags: list[str]) -> str:
        path, mark = os.path.join(folder, MARK), uuid.uuid4().hex
        with open(f"{path}.{mark}", "x", encoding="utf-8") as file:
            json.dump({"id": mark, "tags": tags}, file)
        os.replace(f"{path}.{mark}", path)
        return mark

    def _remove(self, tag: str, folder: str | None = None) -> None:
        folder = folder or self._folder
        shutil.rmtree(os.path.join(folder, tag), ignore_errors=True)
        for path in glob.glob(os.path.join(glob.escape(folder), f"{tag}.filled-*")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _warn_late(self) -> None:
        """Of a snapshot that has failed after training had gone on."""
        late, self._late = self._late, None
        if late is not None:
            warnings.warn(f"the snapshot before was not taken: {late}", stacklevel=4)

    def _quietly(self, work: Callable[[], None]) -> bool:
        """Collective. What a snapshot meets that a later one may not is a warning."""
        self._warn_late()
        try:
            work()
        except Error as error:
            if error.code in LASTING:
                raise
            if self._group.rank == 0:
                warnings.warn(f"no snapshot of iteration {self._last}: {error}", stacklevel=3)
            return False
        return True

    def _same(self, told: list[dict[str, Any]]) -> None:
        """Raises where ranks ask for different things."""
        for rank, asks in enumerate(told):
            for key, value in told[0].items():
                if asks[key] != value:
                    raise Error(USAGE, f"{key}: rank 0 asks for {value}, rank {rank} for {asks[key]}")


def _check_folder(address: str, folder: str, foreign: bool) -> None:
    """Refuses a folder, named by an agent alone, in which another user could have planted files or links."""
    try:
        found = os.lstat(folder)
    except OSError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise Error(_errors.NOT_FOUND, f"{address}: no folder of checkpoints, {folder!r}")
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if foreign or found.st_uid != os.geteuid() or open_to_all:
        raise Error(MISMATCH, f"{address}: would have checkpoints in {folder}: a folder of user {os.geteuid()} that not all may "
                              f"write to is expected, found one of user {found.st_uid} with mode "
                              f"{stat.S_IMODE(found.st_mode):04o}; if it is the right one, name it: checkpoints={folder!r}")
