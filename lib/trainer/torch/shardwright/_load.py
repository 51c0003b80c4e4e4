# SPDX-License-Identifier: Apache-2.0
"""shardwright.load: fills the tensors of a trainer from a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import _errors
from ._agent import user_id
from ._deepspeed import DeepSpeedTrainer
from ._device_memory import staging_for, wait_for_devices
from ._errors import Error
from ._group import Group, moving
from ._library import call, expanded, size_of, value_of
from ._optimizers import SavedOptimizer
from ._owners import refuse_forgotten_optimizer
from ._shards import Shard, check
from ._torch_trainer import TorchTrainer
from ._types import Restored, Source, Trainer, User

UNIT = 1 << 20  # bytes that a thread gathers at once: plan::kUnitBytes
# Store options of a request that failed before they were read.
NO_STORE: dict[str, Any] = {"agents": [], "trust_user": None, "lost_unreachable": False, "at": None, "read_only": False,
                            "weights_only": False, "begin": False}
# Result of a load that loaded nothing: the store of a run that begins.
NOTHING: dict[str, Any] = {"step": 0, "missing": [], "unused": [], "not_carried": [], "origin": "", "bytes_read": 0,
                           "bytes_filled": 0}


class Loaded(int):
    """Result of `load`: the number of steps that the run had made. 0 if the checkpoint does not record it.

    Attributes:
        missing: names of tensors that the trainer has and the checkpoint does not, such as '"layer.weight" exp_avg'.
            They are unchanged.
        unused: names of tensors that the checkpoint has and the trainer does not.
        not_carried: state of the checkpoint that is not a tensor of the model or optimizer and was not set, such as random
            states.
        warnings: warnings from reading the checkpoint.
        client_state: the client state that was passed to DeepSpeed's save_checkpoint, as far as it consists of plain values.
        origin: format of the checkpoint.
        bytes_read, bytes_filled: bytes read from files and bytes written to tensors, totals over all ranks.
        restored: for a store, the result of `pec-restore --json`: the iteration, the version of each expert, lost tokens.
            None for other sources.

    Documentation: live.md#restored-state in shardwright.DOCS
    """

    missing: list[str]
    unused: list[str]
    not_carried: list[str]
    warnings: list[str]
    client_state: dict[str, object]
    origin: str
    bytes_read: int
    bytes_filled: int
    restored: Restored | None


def trainer_of(target: Trainer) -> DeepSpeedTrainer | TorchTrainer:
    """Returns the adapter for a trainer. Raises UsageError for other objects."""
    if isinstance(target, (tuple, list)) and len(target) == 2:
        return TorchTrainer(*target)
    if hasattr(target, "zero_optimization_stage"):
        return DeepSpeedTrainer(target)
    if isinstance(target, torch.nn.Module):
        refuse_forgotten_optimizer(target)
        return TorchTrainer(target, None)
    raise Error(_errors.USAGE, f"a DeepSpeed engine, (model, optimizer) or a model expected, found {type(target).__name__}; "
                               "the trainer comes first, load(trainer, source)")


def _threads() -> int:
    """Returns the default number of threads: the processors divided by the ranks of this node, at most 8."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _many(what: str, value: Any) -> list[str]:
    """Returns the paths or names of an argument as a list, with ~ expanded. Raises UsageError for other types."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        if not isinstance(part, (str, os.PathLike)):
            raise Error(_errors.USAGE, f"{what}: a path or a list of paths expected, found {type(part).__name__}")
    return [expanded(part) for part in parts]


def load(target: Trainer, source: Source, *, strict: bool = True, verify: bool = True, threads: int | None = None,
         memory: int | str = 1 << 30, maps: Sequence[str] = (), map_sizes: str = "", patterns: Sequence[str] = (),
         weights_of: str = "", group: torch.distributed.ProcessGroup | None = None, agents: Sequence[str] = (),
         trust_user: User | None = None, lost_unreachable: bool = False, at: int | None = None, read_only: bool = False,
         begin: bool = False, wait: float = 600, allow_mixed: bool = False, deadline: float = 600) -> Loaded:
    """Fills the tensors of a trainer from a checkpoint of any layout and format.

    Collective: all ranks of the process group must call it with the same arguments. Call it when the trainer is set up, before
    its first step.

    Args:
        target: a DeepSpeed engine, or (model, optimizer). A model or (model, None) to load weights only.
        source: anything that ucp-load reads: a checkpoint directory, a catalogue, a directory of atoms, a .safetensors file, or
            a list of directories that contain parts of one checkpoint. A store of partial checkpoints: its newest usable
            state. A load with an optimizer records a restart in the store, which abandons newer checkpoints. A load of weights
            only leaves the store unchanged. "unix:PATH": a shared-memory cache of this node (ucp-load serve).
            ~ is expanded.
        strict: raise an error before anything is loaded if the trainer has a tensor that the checkpoint does not have, or the
            reverse. False: list these tensors in the result.
        verify: compare the data with the checksums of its files.
        threads: threads per rank. Default: the rank's share of the processors, at most 8.
        memory: limit of the buffers of each rank, in bytes or as text such as "1.5GB".
        maps, map_sizes, patterns: like --map, --map-sizes and --patterns of ucp-load.
        weights_of: set of weights to load if the checkpoint has several (model, EMA), like --weights-of of ucp-load.
        group: process group of the ranks that have the tensors. Default: all ranks.
        agents, lost_unreachable, at, read_only: for a store, like --agents (at socket files), --lost-nodes unreachable, --at and
            --read-only of pec-restore.
        trust_user: name or number of a user: accept this user's agents and shared-memory caches, in addition to those of the
            user of this process and of root.
        begin: for a store, accept a run that has no checkpoint yet. Then nothing is loaded, the result is 0 and
            `restored["iteration"]` is None. Like --allow-empty --begin of pec-restore.
        wait: for a shared-memory cache, seconds until it must be ready.
        allow_mixed: load a checkpoint even if its files come from two saves, like --allow-mixed of ucp-load.
        deadline: seconds that a rank waits until all ranks have called this function.

    Returns:
        The number of steps of the run, with details as attributes (Loaded).

    Raises:
        Error: the same error on all ranks, with the message and the exit code of ucp-load. UsageError: an argument is invalid, or
            a rank did not call `load` within `deadline`. NotFoundError: the source does not exist. CorruptInputError: the
            checkpoint is corrupt. MismatchError: names or shapes of tensors differ. LimitError: `memory` is too small.
            UnsupportedError: the source or the trainer is not supported. After an error the tensors' contents are undefined if
            loading had started, otherwise unchanged.
        KeyboardInterrupt: on the interrupted rank. The other ranks raise Error with code 75.

    Documentation: live.md in shardwright.DOCS
    """
    ranks = Group(group, "shardwright.load", deadline)
    trainer: DeepSpeedTrainer | TorchTrainer | None = None
    shards: list[Shard] = []
    staging: list[torch.Tensor] = []
    failed: Exception | None = None
    request: dict[str, Any] = {
        "rank": ranks.rank, "ranks": ranks.size, "swap": ranks.address, "strict": strict, "verify": verify,
        "threads": threads or _threads(), "map_sizes": map_sizes, "weights_of": weights_of,
        "wait": round(wait * 1000), "allow_mixed": allow_mixed}
    try:
        ranks.meet("shardwright.load", deadline)
        try:
            trainer = trainer_of(target)
            request |= {"memory": size_of(memory), "source": _many("source", source), "maps": _many("maps=", maps),
                        "patterns": _many("patterns=", patterns)}
            request["store"] = {"agents": _many("agents=", agents), "trust_user": user_id(trust_user),
                                "lost_unreachable": lost_unreachable, "at": at, "read_only": read_only,
                                "weights_only": False, "begin": begin}
            request["store"]["weights_only"] = trainer.optimizer is None
            shards = trainer.shards()
            check(shards)
            devices = {one.tensor.device for one in shards}
            wait_for_devices(devices)
            staging = staging_for(devices, request["threads"] * UNIT)
        except Exception as error:  # passed to the other ranks, which are waiting
            failed = error
        request = {"memory": 1 << 30, "source": [], "maps": [], "patterns": [], "store": NO_STORE} | request
        request |= {"failed": None, "held": [one.described() for one in shards]}
        if failed is not None:
            code = failed.code if isinstance(failed, Error) else _errors.INTERNAL
            request |= {"failed": {"code": code, "message": str(failed) or type(failed).__name__}, "held": []}
        answer = call("load", request, [] if failed is not None else [one.tensor for one in shards] + staging)
        assert trainer is not None
        if "origin" in answer:
            restored = SavedOptimizer(answer, value_of)
            moving(lambda: ranks.agree(lambda: trainer.set_state(restored, answer)))
    except BaseException as error:
        if trainer is not None:
            with contextlib.suppress(Exception):  # the first error is reported
                trainer.release()
        if not isinstance(error, Error):
            raise
        if isinstance(ranks.failure, KeyboardInterrupt):
            raise ranks.failure
        if ranks.failure is not None:
            raise error from ranks.failure
        raise error from failed
    finally:
        ranks.close()
    trainer.release()
    return _loaded(answer, trainer)


def _loaded(answer: dict[str, Any], trainer: DeepSpeedTrainer | TorchTrainer) -> Loaded:
    answer = NOTHING | answer
    loaded = Loaded(answer["step"] or 0)
    for key in ("missing", "unused", "warnings", "origin", "bytes_read", "bytes_filled", "restored"):
        setattr(loaded, key, answer[key])
    loaded.not_carried = answer["not_carried"] + trainer.not_set
    loaded.client_state = trainer.client_state
    return loaded
