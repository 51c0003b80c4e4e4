"""shardwright.load"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import _errors
from ._deepspeed import DeepSpeed
from ._errors import Error
from ._far import staging_for, wait_for_devices
from ._group import Group
from ._held import Held, check
from ._library import call, value_of
from ._optimizers import Told
from ._plain import Plain

UNIT = 1 << 20  # bytes that a thread gathers at once: plan::kUnitBytes
# What is asked of a store where nothing is.
NO_STORE: dict[str, Any] = {"agents": [], "lost_unreachable": False, "at": None, "read_only": False, "begin": False}
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
        return Plain(target, None)
    raise Error(_errors.USAGE, f"a DeepSpeed engine, (model, optimizer) or a model expected, found {type(target).__name__}")


def _threads() -> int:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _many(value: Any) -> list[str]:
    one = isinstance(value, (str, os.PathLike))
    return [os.fspath(part) for part in ([value] if one else value)]


def load(target: Any, source: Source, *, strict: bool = True, verify: bool = True, threads: int | None = None,
         memory: int = 1 << 30, maps: Sequence[str] = (), map_sizes: str = "", patterns: Sequence[str] = (),
         group: Any = None, agents: Sequence[str] = (), lost_unreachable: bool = False, at: int | None = None,
         read_only: bool = False, begin: bool = False, wait: float = 600) -> Loaded:
    """Fills the tensors of a trainer from a checkpoint of any layout and format. Collective.

    target: a DeepSpeed engine, or (model, optimizer); a model, or (model, None), for weights alone.
    source: what ucp-load takes: a checkpoint's folder, a catalogue, a folder of atoms, a .safetensors file; or several
        folders that hold parts of one. Or a store of partial checkpoints: its newest usable state, as pec-restore has it,
        and the store is told that training goes on from there. Or "unix:PATH", where a resident load of this node listens
        (ucp-load serve): its memory is mapped, and no storage is read.
    strict: raise, before anything is loaded, where the trainer has a tensor that the checkpoint does not have, or the
        reverse; else both are listed in the result.
    verify: compare what is read with the checksums of its files.
    threads, memory: of each rank; memory bounds its buffers, in bytes.
    maps, map_sizes, patterns: as --map, --map-sizes and --patterns of ucp-load.
    group: the process group whose ranks hold the tensors; default all.
    agents, lost_unreachable, at, read_only: of a store, as --agents (at socket files), --lost-nodes unreachable, --at and
        --read-only of pec-restore.
    wait: of a resident load: seconds until it has to be there and ready.
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
        "threads": threads or _threads(), "memory": memory, "map_sizes": map_sizes, "wait": round(wait * 1000)}
    try:
        try:
            request |= {"source": _many(source), "maps": _many(maps), "patterns": _many(patterns)}
            request["store"] = {"agents": _many(agents), "lost_unreachable": lost_unreachable, "at": at,
                                "read_only": read_only, "begin": begin}
            trainer = trainer_of(target)
            held = trainer.held()
            check(held)
            devices = {one.tensor.device for one in held}
            wait_for_devices(devices)
            staging = staging_for(devices, request["threads"] * UNIT)
        except Exception as error:  # the other ranks wait to hear of it
            failed = error
        request = {"source": [], "maps": [], "patterns": [], "store": NO_STORE} | request
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
