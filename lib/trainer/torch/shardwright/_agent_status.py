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
        raise Error(UNSUPPORTED, f"{address}: an agent of an older version, which takes nothing out of trainers")
    for key, kind in (("store", str), ("checkpoints", str), ("tokens", str), ("k", int)):
        if not isinstance(status.get(key), kind):
            raise Error(BAD_INPUT, f"{address}: status: \"{key}\" is {status.get(key)!r}, a {kind.__name__} expected")
    found = os.path.realpath(status["store"])
    if found != asks["store"]:
        raise Error(MISMATCH, f"{address}: saves into {found}, not into {asks['store']}")
    if asks["k"] is not None and status["k"] != asks["k"]:
        raise Error(MISMATCH, f"{address}: takes {status['k']} experts of each layer, k={asks['k']} is asked for")
    if status.get("policy") == "gradient-log" and not asks["lossless"]:
        raise Error(USAGE, f"{address}: --policy gradient-log needs the gradients of every step: lossless=True")
    log = os.path.realpath(status["tokens"]) if status["tokens"] else None
    if tokens is not None and os.path.realpath(expanded(tokens)) != log:
        raise Error(MISMATCH, f"{address}: reads tokens from {log}, tokens={tokens} is asked for")
    if foreign and tokens is None and log is not None:
        raise Error(USAGE, f"{address}: an agent of user {user} reads tokens from {log}; give tokens= to write there")
    folder = status["checkpoints"]
    if checkpoints is not None and os.path.realpath(expanded(checkpoints)) != os.path.realpath(folder):
        raise Error(MISMATCH, f"{address}: has its checkpoints in {folder!r}, {os.fspath(checkpoints)!r} is expected")
    if checkpoints is None:
        _check_folder(address, folder, foreign)
    elif not os.path.isdir(folder):
        raise Error(NOT_FOUND, f"{address}: no folder of checkpoints, {folder!r}")
    if os.path.exists(os.path.join(folder, "latest")):
        raise Error(USAGE, f"{folder}: has checkpoints of its own (latest); an agent with a folder for this alone is needed")
    return log


def _check_folder(address: str, folder: str, foreign: bool) -> None:
    """Checks a folder that only the agent has named. Raises MismatchError if another user could have placed files or links in it."""
    try:
        found = os.lstat(folder)
    except OSError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise Error(NOT_FOUND, f"{address}: no folder of checkpoints, {folder!r}")
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if foreign or found.st_uid != os.geteuid() or open_to_all:
        raise Error(MISMATCH, f"{address}: would have checkpoints in {folder}: a folder of user {os.geteuid()} that not all may "
                              f"write to is expected, found one of user {found.st_uid} with mode "
                              f"{stat.S_IMODE(found.st_mode):04o}; if it is the right one, name it: checkpoints={folder!r}")
