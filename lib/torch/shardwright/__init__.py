"""Checkpoints of any layout and format, straight into a running trainer.

    import shardwright
    step = shardwright.load(engine, "ckpt/")               # a DeepSpeed engine
    step = shardwright.load((model, optimizer), "ckpt/")   # FSDP2, tensor parallel, DDP, one process

Nothing is converted on disk, and nothing is printed. docs/live.md tells what is read when.

    plan = shardwright.ExpertPlan.read("plan.json")        # of moe-replace
    layer = shardwright.ReplicatedExperts(plan, 0, {expert: tensors})

Layers of experts that live where a plan says: docs/experts.md.
"""

from ._capacity import ExtraCapacity
from ._errors import Error
from ._experts import Dispatched, ReplicatedExperts
from ._load import Loaded, load
from ._idle import IdleTimes
from ._lossless import GradientLog
from ._migrate import migrate
from ._partial import PartialCheckpoints, Snapshot
from ._plans import ExpertPlan
from ._sparse import SparseCollectives

__all__ = ["Dispatched", "Error", "ExpertPlan", "ExtraCapacity", "GradientLog", "IdleTimes", "Loaded", "PartialCheckpoints", "ReplicatedExperts",
           "Snapshot", "SparseCollectives", "load", "migrate"]
