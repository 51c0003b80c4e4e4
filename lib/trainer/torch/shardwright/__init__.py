# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoints into running PyTorch trainers, and takes partial checkpoints from them.

load fills the tensors of a trainer from a checkpoint of any layout and format. No converted files are written:

    import shardwright
    step = shardwright.load(engine, "ckpt/")               # a DeepSpeed engine
    step = shardwright.load((model, optimizer), "ckpt/")   # FSDP2, tensor parallelism, DDP, one process

PartialCheckpoints takes snapshots of a few experts at a time from a DeepSpeed run:

    pec = shardwright.PartialCheckpoints(engine, "store/", k=2, every=10)
    step = int(pec.load())       # newest state; 0 at the start of a run
    pec.step()                   # after each optimizer step
    pec.close()

All errors are subclasses of Error. The package prints nothing. Other contents:

    IdleTimes, GradientLog       reports of a trainer to an agent
    ExpertPlan, ReplicatedExperts, SparseCollectives, migrate, ExtraCapacity
                                 layers of experts that a plan of moe-replace places on ranks
    shardwright.elastic          runs of torchrun in which nodes fail and join; not imported with the package
    DOCS                         folder of the installed documentation, None if there is none

Documentation: live.md, experts.md, elastic.md and lossless.md in shardwright.DOCS
"""

from ._capacity import ExtraCapacity
from ._documents import DOCS
from ._errors import (BusyError, CorruptInputError, Error, LimitError, MismatchError, NotFoundError, TransferError, UnsupportedError,
                      UsageError)
from ._experts import Dispatched, ReplicatedExperts
from ._idle import IdleTimes
from ._load import Loaded, load
from ._lossless import GradientLog
from ._migrate import migrate
from ._partial import PartialCheckpoints
from ._plans import ExpertPlan
from ._snapshot import Snapshot
from ._sparse import SparseCollectives

__all__ = [
    "load", "PartialCheckpoints", "Loaded", "Snapshot",
    "Error", "UsageError", "NotFoundError", "CorruptInputError", "MismatchError", "BusyError", "TransferError", "LimitError",
    "UnsupportedError",
    "IdleTimes", "GradientLog",
    "ExpertPlan", "ReplicatedExperts", "Dispatched", "SparseCollectives", "migrate", "ExtraCapacity",
    "DOCS",
]
