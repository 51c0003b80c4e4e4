"""Checkpoints of any layout and format, straight into a running trainer.

    import shardwright
    step = shardwright.load(engine, "ckpt/")               # a DeepSpeed engine
    step = shardwright.load((model, optimizer), "ckpt/")   # FSDP2, tensor parallel, DDP, one process

Nothing is converted on disk, and nothing is printed. docs/live.md tells what is read when.
"""

from ._errors import Error
from ._load import Loaded, load
from ._partial import PartialCheckpoints

__all__ = ["Error", "Loaded", "PartialCheckpoints", "load"]
