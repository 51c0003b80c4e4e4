# SPDX-License-Identifier: Apache-2.0
"""Checks that a running agent fits a trainer's PartialCheckpoints."""

from __future__ import annotations

import os
import stat
from typing import Any

from ._errors import BAD_INPUT, MISMATCH, NOT_FOUND, UNSUPPORTED, USAGE, Error
from ._library import expanded
from ._types import Path


def check_agent(address: str, status: dict[str, Any], user: int, asks: dict[str, Any], tokens: Path | None,
                checkpoints: Path | None) -> str | None:
    """Compares the status of an agent with the arguments of PartialCheckpoints. Returns the path of the agent's token log.

    user: the user of the agent's process. asks: the arguments. tokens, checkpoints: paths that the agent must report, or None.
    Raises UnsupportedError for an old agent, CorruptInputError for an invalid status, NotFoundError for a missing folder, and
    UsageError or MismatchError for other settings than the arguments.
    """
    foreign = user not in (os.geteuid(), 0)
    if "checkpoints" not in status:
        raise Error(UNSUPPORTED, f"{address}: the agent is too old for snapshots from trainers; start one of this version")
    for key, kind in (("store", str), ("checkpoints", str), ("tokens", str), ("k", int)):
        if not isinstance(status.get(key), kind):
            raise Error(BAD_INPUT, f"{address}: status: \"{key}\" is {status.get(key)!r}, a {kind.__name__} expected")
    found = os.path.realpath(status["store"])
    if found != asks["store"]:
        raise Error(MISMATCH, f"{address}: the agent saves into {found}, not into {asks['store']}")
    if asks["k"] is not None and status["k"] != asks["k"]:
        raise Error(MISMATCH, f"{address}: the agent saves {status['k']} experts of each layer, but k={asks['k']} was passed")
    if status.get("policy") == "gradient-log" and not asks["lossless"]:
        raise Error(USAGE, f"{address}: --policy gradient-log requires the gradients of every step; pass lossless=True")
    log = os.path.realpath(status["tokens"]) if status["tokens"] else None
    if tokens is not None and os.path.realpath(expanded(tokens)) != log:
        raise Error(MISMATCH, f"{address}: the agent reads token counts from {log}, but tokens={tokens} was passed")
    if foreign and tokens is None and log is not None:
        raise Error(USAGE, f"{address}: an agent of user {user} reads token counts from {log}; pass tokens= to write there")
    folder = status["checkpoints"]
    if checkpoints is not None and os.path.realpath(expanded(checkpoints)) != os.path.realpath(folder):
        raise Error(MISMATCH, f"{address}: the agent's checkpoint folder is {folder!r}, expected {os.fspath(checkpoints)!r}")
    if checkpoints is None:
        _check_folder(address, folder, foreign)
    elif not os.path.isdir(folder):
        raise Error(NOT_FOUND, f"{address}: the agent's checkpoint folder {folder!r} does not exist")
    if os.path.exists(os.path.join(folder, "latest")):
        raise Error(USAGE, f"{folder}: contains other checkpoints (latest); start the agent with a checkpoint folder for this run alone")
    return log


def _check_folder(address: str, folder: str, foreign: bool) -> None:
    """Checks a folder that only the agent has named. Raises MismatchError if another user could have placed files or links in it."""
    try:
        found = os.lstat(folder)
    except OSError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise Error(NOT_FOUND, f"{address}: the agent's checkpoint folder {folder!r} does not exist")
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if foreign or found.st_uid != os.geteuid() or open_to_all:
        raise Error(MISMATCH, f"{address}: checkpoint folder {folder}: a folder of user {os.geteuid()} that other users cannot "
                              f"write to expected, found one of user {found.st_uid} with mode "
                              f"{stat.S_IMODE(found.st_mode):04o}; if it is the right one, pass checkpoints={folder!r}")
