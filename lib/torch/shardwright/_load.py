"""shardwright.load"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import _errors
from ._agent import user_id
from ._deepspeed import DeepSpeed
from ._errors import Error
from ._far import staging_for, wait_for_devices
from ._group import Group
from ._held import Held, check
from ._library import call, expanded, size_of, value_of
from ._optimizers import Told
from ._owners import refuse_forgotten_optimizer
from ._plain import Plain

UNIT = 1 << 20  # bytes that a thread gathers at once: plan::kUnitBytes
# What is asked of a store where nothing is.
NO_STORE: dict[str, Any] = {"agents": [], "trust_user": None, "lost_unreachable": False, "at": None, "read_only": False,
                            "weights_only": False, "begin": False}
# What a load has told that has loaded nothing: of a store at the beginning of a run.
NOTHING: dict[str, Any] = {"step": 0, "missing": [], "unused": [], "not_carried": [], "origin": "", "bytes_read": 0,
                           "bytes_filled": 0}

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Loaded(int):
    """The number of steps that the run had made, 0 where the checkpoint does not tell; and what was loaded.

    missing: what the trainer has and the checkpoint does not, unchanged: '"layer.weight" exp_avg'.
    unused: what the checkpoint has and the trainer does not.
    not_carried: state of the checkpoint that is no tensor of the model or optimizer, and was left: random states, say.
    warnings: of reading the checkpoint.
    client_state: what a program has saved with DeepSpeed's save_checkpoint, as far as it is plain values.
    origin: format of the checkpoint.
    bytes_read, bytes_filled: of the files and of the trainer's tensors, of all ranks together.
    restored: of a store, what pec-restore reports as its result: the iteration, the version of each expert, lost tokens;
        None for any other source.
    """

    missing: list[str]
    unused: list[str]
    not_carried: list[str]
    warnings: list[str]
    client_state: dict[str, Any]
    origin: str
    bytes_read: int
    bytes_filled: int
    restored: dict[str, Any] | None


def trainer_of(target: Any) -> DeepSpeed | Plain:
    if isinstance(target, (tuple, list)) and len(target) == 2:
        return Plain(*target)
    if hasattr(target, "zero_optimization_stage"):
        return DeepSpeed(target)
    if isinstance(target, torch.nn.Module):
        refuse_forgotten_optimizer(target)
        return Plain(target, None)
    raise Error(_errors.USAGE, f"a DeepSpeed engine, (model, optimizer) or a model expected, found {type(target).__name__}; "
                               "the trainer comes first, load(trainer, source)")


def _threads() -> int:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _many(what: str, value: Any) -> list[str]:
    """Paths or names of an argument, ~ expanded. Raises Error with USAGE for anything else."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        if not isinstance(part, (str, os.PathLike)):
            raise Error(_errors.USAGE, f"{what}: a path or a list of paths expected, found {type(part).__name__}")
    return [expanded(part) for part in parts]


def load(target: Any, source: Source, *, strict: bool = True, verify: bool = True, threads: int | None = None,
         memory: int | str = 1 << 30, maps: Sequence[str] = (), map_sizes: str = "", patterns: Sequence[str] = (),
         weights_of: str = "",
         group: Any = None, agents: Sequence[str] = (), trust_user: int | str | None = None, lost_unreachable: bool = False,
         at: int | None = None, read_only: bool = False, begin: bool = False, wait: float = 600, allow_mixed: bool = False,
         deadline: float = 600) -> Loaded:
    """Fills the tensors of a trainer from a checkpoint of any layout and format. Collective.

    target: a DeepSpeed engine, or (model, optimizer); a model, or (model, None), for weights alone.
    source: what ucp-load takes, ~ expanded: a checkpoint's folder, a catalogue, a folder of atoms, a .safetensors file; or several
        folders that hold parts of one. Or a store of partial checkpoints: its newest usable state, as pec-restore has it.
        A load with an optimizer is recorded in the store as a restart of the training: newer checkpoints are abandoned.
        A load of weights alone leaves the store as it is. Or "unix:PATH", where a resident load of this node listens
        (ucp-load serve): its memory is mapped, and no storage is read.
    strict: raise, before anything is loaded, where the trainer has a tensor that the checkpoint does not have, or the
        reverse; else both are listed in the result.
    verify: compare what is read with the checksums of its files.
    threads, memory: of each rank; memory bounds its buffers: bytes, or a text as "1.5GB".
    maps, map_sizes, patterns: as --map, --map-sizes and --patterns of ucp-load.
    allow_mixed: load a checkpoint even if its files come from two saves, as --allow-mixed of ucp-load does.
    weights_of: set of weights to load if the checkpoint has several (model, EMA), as --weights-of of ucp-load.
    group: the process group whose ranks hold the tensors; default all.
    agents, lost_unreachable, at, read_only: of a store, as --agents (at socket files), --lost-nodes unreachable, --at and
        --read-only of pec-restore.
    trust_user: a user, by name or number, whose agents, or whose resident load, are accepted besides those of this process's
        user and of root.
    wait: of a resident load: seconds until it has to be there and ready.
    deadline: seconds that a rank waits until all ranks have called this.
    begin: the source is a store, and a run that has no checkpoint yet is no error: then nothing is loaded, the result is
        0 and `restored["iteration"]` None. As --allow-empty and --begin of pec-restore.

    Raises Error, with the message and the exit code that ucp-load would have. After an error the tensors hold anything,
    unless nothing was loaded yet.
    """
    ranks = Group(group)
    trainer: DeepSpeed | Plain | None = None
    held: list[Held] = []
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
            held = trainer.held()
            check(held)
            devices = {one.tensor.device for one in held}
            wait_for_devices(devices)
            staging = staging_for(devices, request["threads"] * UNIT)
        except Exception as error:  # the other ranks wait to hear of it
            failed = error
        request = {"memory": 1 << 30, "source": [], "maps": [], "patterns": [], "store": NO_STORE} | request
        request |= {"failed": None, "held": [one.described() for one in held]}
        if failed is not None:
            code = failed.code if isinstance(failed, Error) else _errors.INTERNAL
            request |= {"failed": {"code": code, "message": str(failed) or type(failed).__name__}, "held": []}
        answer = call("load", request, [] if failed is not None else [one.tensor for one in held] + staging)
        assert trainer is not None
        if "origin" in answer:
            trainer.take(Told(answer, value_of), answer)
    except BaseException as error:
        if trainer is not None:
            with contextlib.suppress(Exception):  # what ended the load is what is told
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


def _loaded(answer: dict[str, Any], trainer: DeepSpeed | Plain) -> Loaded:
    answer = NOTHING | answer
    loaded = Loaded(answer["step"] or 0)
    for key in ("missing", "unused", "warnings", "origin", "bytes_read", "bytes_filled", "restored"):
        setattr(loaded, key, answer[key])
    loaded.not_carried = answer["not_carried"] + trainer.not_set
    loaded.client_state = trainer.client_state
    return loaded
