# SPDX-License-Identifier: Apache-2.0
"""The files of a snapshot in the checkpoint folder of an agent, and the mark that names them."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import time
import uuid

import torch

from ._errors import IO, UNSUPPORTED, Error
from ._files import HeaderEngine, Part

PATIENCE = 300  # seconds until all ranks must have copied their tensors during training. The agent waits twice as long.
MARK = "hand-over.json"  # names the files that a trainer is about to write, so that the next one can remove them


def write_mark(folder: str, tags: list[str]) -> str:
    """Records the tags of files that are about to be written. Returns the random identifier of the mark."""
    path, mark = os.path.join(folder, MARK), uuid.uuid4().hex
    with open(f"{path}.{mark}", "x", encoding="utf-8") as file:
        json.dump({"id": mark, "tags": tags}, file)
    os.replace(f"{path}.{mark}", path)
    return mark


def check_mark(folder: str, mark: str, rank: int) -> None:
    """Raises UnsupportedError if this rank does not see the mark that rank 0 has written: tensors are passed through this
    folder only."""
    seen = ""
    with contextlib.suppress(OSError), open(os.path.join(folder, MARK), encoding="utf-8") as file:
        seen = json.load(file)["id"]
    if seen != mark:
        raise Error(UNSUPPORTED, f"rank {rank} does not see {folder} of rank 0: all ranks must be on one machine")


def remove_leftovers(folder: str) -> None:
    """Removes the files that the mark of a killed trainer names."""
    with contextlib.suppress(FileNotFoundError):
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            tags = json.load(file)["tags"]
        for tag in tags:
            if re.fullmatch(r"global_step\d+", tag):
                remove_snapshot(folder, tag)


def remove_snapshot(folder: str, tag: str) -> None:
    """Removes the files of a snapshot."""
    shutil.rmtree(os.path.join(folder, tag), ignore_errors=True)
    for path in glob.glob(os.path.join(glob.escape(folder), f"{tag}.filled-*")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _done_path(folder: str, tag: str, rank: int) -> str:
    return os.path.join(folder, f"{tag}.filled-{rank}")


def fill_files(folder: str, tag: str, rank: int, headers: HeaderEngine, later: dict[str, list[Part]]) -> None:
    """Copies tensors while training continues. Writes a file that reports to rank 0: empty for success, or an error message."""
    message = ""
    try:
        devices = {part.tensor.device for parts in later.values() for part in parts if not part.tensor.is_cpu}
        with contextlib.ExitStack() as stack:
            for device in devices:  # a separate stream, which does not wait for work that training queues later
                stack.enter_context(torch.Stream(device))
            for name, parts in later.items():
                headers.files[name].fill(parts)
    except Exception as error:
        message = str(error) or type(error).__name__
    path = _done_path(folder, tag, rank)
    with contextlib.suppress(OSError):
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(message)
        os.replace(path + ".new", path)


def await_filled(folder: str, tag: str, ranks: int) -> None:
    """Rank 0, in a thread: waits until all ranks have copied their tensors. Raises TransferError."""
    end = time.monotonic() + PATIENCE
    for rank in range(ranks):
        while True:
            with contextlib.suppress(FileNotFoundError):
                with open(_done_path(folder, tag, rank), encoding="utf-8") as file:
                    message = file.read()
                break
            if time.monotonic() > end:
                raise Error(IO, f"rank {rank} has not copied its tensors within {PATIENCE} s")
            time.sleep(0.002)
        if message:
            raise Error(IO, f"rank {rank}: {message}")
