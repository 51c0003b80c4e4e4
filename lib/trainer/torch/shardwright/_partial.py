# SPDX-License-Identifier: Apache-2.0
"""shardwright.PartialCheckpoints: snapshots of experts from a running trainer."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from . import _errors
from ._agent import Connection, user_id
from ._agent_process import OwnAgent
from ._agent_status import check_agent
from ._deepspeed import DeepSpeedTrainer
from ._device_memory import wait_for_devices
from ._errors import MISMATCH, UNSUPPORTED, USAGE, Error
from ._files import HeaderEngine, NoCopies, Part
from ._group import Group
from ._idle import IdleTimes
from ._library import call, expanded
from ._load import Loaded, load
from ._lossless import GradientLog
from ._partial_arguments import check_arguments, check_equal
from ._snapshot import Snapshot
from ._snapshot_folder import await_filled, check_mark, fill_files, remove_leftovers, remove_snapshot, write_mark
from ._tokens import TokenLog, count_tokens
from ._types import ClientState, DeepSpeedEngine, LoadOptions, Path, TokenCounts, User

# Codes of errors that would make every later snapshot fail. Other errors become warnings, and training continues.
LASTING = {USAGE, _errors.BAD_INPUT, MISMATCH, UNSUPPORTED}


class PartialCheckpoints:
    """Takes snapshots of a few experts at a time from a running DeepSpeed engine, into an agent's memory and a store.

        pec = shardwright.PartialCheckpoints(engine, "store/", k=2, every=10)
        step = int(pec.load())       # newest state of memory and store; 0 at the start of a run
        ...
        pec.step()                   # after each optimizer step
        ...
        pec.close()

    Collective: all ranks must create, step and close the object in the same way. All ranks must be on one machine. The trainer needs
    no checkpoints of its own: the first snapshot contains all experts. Each later snapshot contains all other modules, and k experts
    of each MoE layer.

    Args:
        engine: a DeepSpeed engine with MoE layers (stages 1 and 2, BF16_Optimizer).
        store: directory of the store, as for pec-save. It is created if the name is free. ~ is expanded.
        k: experts of each MoE layer in a snapshot. None: the setting of the agent.
        every: optimizer steps between snapshots.
        agent: address unix:PATH of a running agent with a checkpoint folder for this run only. Default: the object starts an agent,
            which survives a killed trainer. The next trainer finds it by the path of the store.
        trust_user: with `agent`, name or number of a user: accept its agent, in addition to those of the user of this process
            and of root. Its checkpoint folder and token log are used only if `checkpoints` and `tokens` name the same paths.
        checkpoints: with `agent`, the agent's checkpoint folder. Default: the folder that the agent reports, if it belongs to this
            user.
        flags: more flags of pec-save agent for the object's own agent: ["--policy", "load-aware", "--peer", "node8:4711"].
        tokens: token log per expert. Default: that of the agent; for the object's own agent STORE.tokens.jsonl.
        command: the program pec-save, for the object's own agent.
        overlap: copy tensors while training continues. The next optimizer step waits for the copies. Until then nothing else may
            change parameters or optimizer states. Default: on if parameters are on a device.
        lossless: also submit the gradients of experts in each step, so that a restore can replay the steps and loses nothing
            (lossless.md). With flags=["--policy", "gradient-log"], gradients that a snapshot makes unnecessary are not written.
        log_zstd, log_memory: `zstd` and `memory` of GradientLog.
        group: process group of the ranks. Default: all ranks.
        deadline: seconds that a rank waits for the others in the constructor, step() and close().

    Attributes:
        agent: address of the agent.
        handed_bytes: bytes that all ranks have copied for the last snapshot, without small tensors.
        gradients: the GradientLog with lossless=True, otherwise None.

    Raises:
        Error: the same on all ranks. UsageError: an argument is invalid, or ranks pass different ones. NotFoundError: no agent, no
        pec-save program, or no parent directory of the store. MismatchError: the agent has another store or another user.
        UnsupportedError: the engine is not supported.

    Documentation: live.md#snapshots-of-experts-from-the-trainer in shardwright.DOCS
    """

    agent: str
    handed_bytes: int
    gradients: GradientLog | None

    def __init__(self, engine: DeepSpeedEngine, store: Path, *, k: int | None = 1, every: int = 1, agent: str | None = None,
                 trust_user: User | None = None, checkpoints: Path | None = None, flags: Sequence[str] = (), tokens: Path | None = None,
                 command: str = "pec-save", overlap: bool | None = None, lossless: bool = False, log_zstd: int = 0,
                 log_memory: int | str = 1 << 30, group: dist.ProcessGroup | None = None, deadline: float = 600) -> None:
        self._engine: Any = engine
        self._group = Group(group, "PartialCheckpoints()", deadline)
        self._own: OwnAgent | None = None
        self._waiting: threading.Thread | None = None
        self._late: Error | None = None  # error of the last snapshot, found while training continued
        self._filling: threading.Thread | None = None
        self._overlap, self._hook = overlap, None
        self._wrong: str | None = None  # error in the arguments of step()
        self._deadline = deadline
        self._asks: dict[str, Any] = {"store": os.path.realpath(expanded(store)), "k": k, "every": every, "agent": agent,
                                      "trust_user": user_id(trust_user), "flags": list(flags), "lossless": lossless,
                                      "overlap": overlap}
        self.gradients = None
        self._idle: IdleTimes | None = None
        self._counts = count_tokens(engine.module)
        try:
            self._group.meet("PartialCheckpoints()", deadline)
            check_equal(self._group.agree(self._check))
            self.agent, self._folder, self._log_path, mark = self._group.agree(lambda: self._open(command, tokens, checkpoints))[0]
            self._group.agree(lambda: check_mark(self._folder, mark, self._group.rank))
            if self._overlap:
                self._hook = DeepSpeedTrainer(engine).base.register_step_pre_hook(lambda *_: self._filled())
            if lossless:
                self.gradients = GradientLog(engine, self.agent, every=every, zstd=log_zstd, memory=log_memory, group=self._group,
                                             trust_user=self._asks["trust_user"])
        except BaseException:
            if self._own is not None and self._own.started:
                with contextlib.suppress(Exception):  # the first error is reported
                    self._own.stop()
            self._release()
            raise
        self._log = TokenLog(self._log_path)  # written by rank 0
        self.handed_bytes = 0
        self._last: int = engine.global_steps
        self._pending: list[tuple[int, list[list[int]]]] = []  # token counts of the steps since the last snapshot
        self._due: int | None = None  # iteration of the last snapshot that was due
        self._stored: int | None = None  # see Snapshot.stored
        self._failed_saves = 0  # failed saves of the agent that a warning has reported

    def load(self, **options: Unpack[LoadOptions]) -> Loaded:
        """Loads the newest state of the store and of the agent's memory into the engine. Collective.

        Args:
            options: keyword arguments of shardwright.load. Defaults that differ: agents and trust_user of this object, begin=True.

        Returns:
            The number of steps of the run, 0 at the start of a run (Loaded).

        Raises:
            Error: as shardwright.load.

        Documentation: live.md#load-from-a-store in shardwright.DOCS
        """
        self._filled()
        arguments: dict[str, Any] = {"agents": [self.agent], "trust_user": self._asks["trust_user"], "begin": True,
                                     "deadline": self._deadline, **options}
        if self.gradients is not None:
            self.gradients.end()
        loaded = load(self._engine, self._asks["store"], **arguments)
        if self.gradients is not None and loaded.restored is not None and loaded.restored["iteration"] is not None:
            self._begin_log()
        self._last, self._pending, self._due = self._engine.global_steps, [], None
        self._counts.clear()
        self._log = TokenLog(self._log_path)  # its first write removes later iterations
        return loaded

    def step(self, tokens: TokenCounts | None = None, client_state: ClientState | None = None) -> Snapshot | None:
        """Takes a snapshot if one is due. Collective. Call it after each optimizer step. Calls after micro steps do nothing.

        Args:
            tokens: tokens that this rank has sent to each expert since the last step, [MoE layer][expert]. The values of all ranks
                are added. Default: counts of hooks on DeepSpeed's MoE layers. The hooks count tokens twice if activation
                checkpointing repeats the forward pass.
            client_state: client state, as in DeepSpeed's save_checkpoint.

        Returns:
            None if no snapshot was due, otherwise a Snapshot. It is false, with a warning, if the snapshot failed. The next one is
            taken as usual.

        Raises:
            UsageError, CorruptInputError, MismatchError, UnsupportedError: every later snapshot would fail too.

        Documentation: live.md#snapshots-of-experts-from-the-trainer in shardwright.DOCS
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
            else:  # raised in the next collective, on all ranks
                self._wrong = f"tokens of iteration {iteration}: numbers of experts by layer {self._counts.shape} expected, found {found}"
        self._last = iteration
        if self.gradients is not None:
            self.gradients.step(iteration)  # before the snapshot of the iteration: saving it waits for its gradients
        self._pending.append((iteration, counted))
        if iteration % self._asks["every"]:
            return None
        self._due = iteration
        taken = Snapshot(self._quietly(lambda: self._snapshot(iteration, dict(client_state or {}))))
        taken.iteration, taken.stored = iteration, self._stored
        taken.where = "memory" if taken else "nowhere"
        return taken

    def idle(self) -> IdleTimes:
        """Returns a context manager for idle intervals of this rank: the agent copies and saves data while ranks are idle. Local.

        The agent does not wait for ranks that have never called it. It does not raise: if no agent accepts the reports, it prints a
        warning. Documentation: live.md#idle-intervals in shardwright.DOCS
        """
        if self._idle is None:
            # Not strict: an error on one rank must not end that rank.
            self._idle = IdleTimes(self.agent, self._group.rank, strict=False, trust_user=self._asks["trust_user"])
        return self._idle

    def close(self) -> int | None:
        """Waits until the newest snapshot is in the store, and stops the object's own agent. Collective.

        Returns:
            The newest iteration of the store, None if it has none.

        Raises:
            TransferError: the last snapshot that was due is not in the store. UsageError: a rank did not call it within `deadline`.

        Documentation: live.md#snapshots-of-experts-from-the-trainer in shardwright.DOCS
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
                                        f"{found}: save the state with save_checkpoint; earlier warnings state the reason")
            return newest

        try:
            self._group.meet("PartialCheckpoints.close", self._deadline)
            if self.gradients is not None:
                self.gradients.close()
            return self._group.agree(end)[0]
        finally:
            self._release()

    def _release(self) -> None:
        """Removes hooks and closes connections, also after an error."""
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

    # The methods below are local unless their comments state that they are collective.

    def _check(self) -> dict[str, Any]:
        """Checks the engine and the arguments. Returns the arguments, to compare them between ranks."""
        self._overlap = check_arguments(self._engine, self._asks, self._counts)
        return self._asks

    def _connect(self, address: str) -> Connection:
        return Connection(address, user=self._asks["trust_user"])

    def _open(self, command: str, tokens: Path | None, checkpoints: Path | None) -> tuple[str, str, str | None, str]:
        """Rank 0: starts or finds the agent and checks its settings. Returns its address, its checkpoint folder, the token log, and
        the mark that it wrote into the folder."""
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
            raise Error(USAGE, "flags= cannot be combined with agent=: they are flags for the object's own agent")
        if asks["agent"] is None and (checkpoints is not None or asks["trust_user"] is not None):
            raise Error(USAGE, "trust_user= and checkpoints= require agent=")
        address = asks["agent"] or self._own.address
        with self._connect(address) as connection:
            status = connection.status()
            foreign = connection.user not in (os.geteuid(), 0)
        token_log = check_agent(address, status, connection.user, asks, tokens, checkpoints if self._own is None else self._own.folder)
        folder = status["checkpoints"]
        if self._own is None and not foreign:
            call("prepare_store", {"store": asks["store"]})
        remove_leftovers(folder)
        return address, folder, token_log, write_mark(folder, [])

    def _snapshot(self, iteration: int, client_state: dict[str, Any]) -> None:
        """Takes a snapshot. Collective. Writes headers, lets the agent select byte ranges, and copies these into the files."""
        tag = f"global_step{iteration}"
        logs = self.gradients is None or self.gradients.active

        def begin() -> tuple[dict[str, Any], list[tuple[int, list[list[int]]]], bool]:
            self._filled()
            counted = self._counted()
            self._prepare(tag)
            wait_for_devices({param.device for param in self._engine.module.parameters()})
            return self._asks | {"iteration": iteration}, counted, logs

        self._group.meet("PartialCheckpoints.step", self._deadline)
        begun = self._group.agree(begin)
        check_equal([asks for asks, *_ in begun])
        headers = HeaderEngine()
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, headers
        try:
            with NoCopies(self._counts.layers):
                self._engine.save_checkpoint(self._folder, tag=tag, client_state=client_state, save_latest=False)
        finally:
            self._engine.checkpoint_engine = before
        submitted: Connection | None = None

        def submit() -> tuple[dict[str, list[tuple[int, int]]], int | None] | None:
            """Rank 0 submits the folder. Returns the byte ranges that the agent requests, by file, and its last saved iteration."""
            nonlocal submitted
            if self._group.rank == 0:
                self._write_log([pending for _, pending, _ in begun])
            if headers.failure is not None:
                raise headers.failure
            if self._group.rank != 0:
                return None
            submitted = self._connect(self.agent)
            stored = self._saved_last(submitted.status())
            submitted.send(f"offer {tag}")
            wanted: dict[str, list[tuple[int, int]]] = {}
            for line in submitted.text().splitlines():
                first, count, name = line.split(" ", 2)
                # The name may begin with the checkpoint's folder.
                wanted.setdefault(os.path.basename(name), []).append((int(first), int(count)))
            return wanted, stored

        self._pending = []
        try:
            wanted, self._stored = self._group.agree(submit)[0]
            later: dict[str, list[Part]] = {}  # copied during training; the next optimizer step waits for it

            def take() -> dict[str, int]:
                """Copies the requested byte ranges. With overlap, copies only buffers, which can change before the next optimizer step.
                Returns the number of bytes of each file of this rank."""
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
            if unknown := wanted.keys() - {name for files in taken for name in files}:
                raise Error(_errors.INTERNAL, f"the agent requests files that no rank has: {sorted(unknown)}")
            self.handed_bytes = sum(sum(files.values()) for files in taken)
            if not self._overlap:
                self._group.agree(lambda: submitted.send("filled") if submitted is not None else None)
        except BaseException:
            if submitted is not None:
                submitted.close()  # the agent discards the snapshot
            if self._group.rank == 0:
                remove_snapshot(self._folder, tag)
            raise
        if self._overlap:
            self._filling = threading.Thread(target=fill_files, args=(self._folder, tag, self._group.rank, headers, later))
            self._filling.start()
        if submitted is not None:
            self._waiting = threading.Thread(target=self._await_answer, args=(submitted, tag), daemon=True)
            self._waiting.start()
        if self._idle is not None:
            self._idle.check()  # the agent may have been restarted
        if not all(active for *_, active in begun):
            self._begin_log()

    def _saved_last(self, status: dict[str, Any]) -> int | None:
        """Rank 0: returns the last iteration that the agent has saved. Warns if saves have failed since the last call."""
        failed = status.get("persists_failed", 0)
        if failed > self._failed_saves:
            warnings.warn(f"the agent has failed to save into {self._asks['store']} and tries again; newer snapshots are only in "
                          f"its memory: {status.get('last_error', '')}", stacklevel=6)
        self._failed_saves = failed
        return status.get("persisted")

    def _begin_log(self) -> None:
        """Starts the gradient log with the next step. Collective. If that fails, a later snapshot tries again."""
        assert self.gradients is not None
        try:
            self.gradients.begin()
        except Error as error:
            if error.code in LASTING:
                raise
            if self._group.rank == 0:
                warnings.warn(f"the gradient log cannot start: {error}", stacklevel=4)

    def _filled(self) -> None:
        """Waits until this rank's tensors are copied."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.join()

    def _await_answer(self, submitted: Connection, tag: str) -> None:
        """Rank 0, in a thread: waits until the agent has its copy, then removes the files."""
        try:
            with submitted:
                if self._overlap:
                    await_filled(self._folder, tag, self._group.size)
                    submitted.send("filled")
                submitted.answer()
        except Error as error:
            self._late = error
        finally:
            remove_snapshot(self._folder, tag)

    def _prepare(self, tag: str) -> None:
        """Rank 0: waits for the previous snapshot, and records which files are about to be written."""
        if self._group.rank != 0:
            return
        self._wait()
        if self._own is not None:
            self._own.start()
        remove_snapshot(self._folder, tag)
        write_mark(self._folder, [tag])

    def _wait(self) -> None:
        """Rank 0: waits until the agent has its copy of the last snapshot."""
        if self._waiting is not None:
            self._waiting.join()
            self._waiting = None

    def _counted(self) -> list[tuple[int, list[list[int]]]]:
        """Returns the token counts of this rank since the last snapshot. Raises UsageError for wrong arguments of step()."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            raise Error(USAGE, wrong)
        return self._pending

    def _write_log(self, pending: list[list[tuple[int, list[list[int]]]]]) -> None:
        """Rank 0: adds the token counts of all ranks and appends them to the log."""
        for ranks in pending[1:]:
            if [iteration for iteration, _ in ranks] != [iteration for iteration, _ in pending[0]]:
                raise Error(USAGE, "ranks have called step() at different iterations: "
                                   f"{[[iteration for iteration, _ in ranks] for ranks in pending]}")
        self._log.add({ranks[0][0]: [[sum(ranks) for ranks in zip(*layers)] for layers in zip(*(tokens for _, tokens in ranks))]
                       for ranks in zip(*pending)})

    def _warn_late(self) -> None:
        """Warns of a snapshot that failed while training continued."""
        late, self._late = self._late, None
        if late is not None:
            warnings.warn(f"the previous snapshot was not taken: {late}", stacklevel=4)

    def _quietly(self, work: Callable[[], None]) -> bool:
        """Runs `work`. Collective. Returns false with a warning for errors that a later snapshot may not meet."""
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
