# SPDX-License-Identifier: Apache-2.0
"""The C++ library: loads it once and calls its operators with JSON requests."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
from typing import Any

import torch

from . import _operators
from ._errors import UNSUPPORTED, Error

OLDEST = (2, 10)
FAILED = re.compile(r"shardwright error (\d+): (.*)")  # form of the exceptions of lib/trainer/torch/tokens.cc


def check_version(version: str) -> None:
    """Raises UnsupportedError for a PyTorch version that is too old for the library."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise Error(UNSUPPORTED, f"torch {version}: shardwright needs torch {OLDEST[0]}.{OLDEST[1]} or newer")


@functools.cache
def operators() -> Any:
    """Returns torch.ops.shardwright. Loads the library at the first call. Raises UnsupportedError if it cannot be loaded."""
    check_version(torch.__version__)
    library = pathlib.Path(__file__).with_name("libshardwright_torch.so")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Error(UNSUPPORTED, f"{library}: {error.__cause__ or error}") from error
    _operators.register()
    return torch.ops.shardwright


def call(operator: str, request: dict[str, Any], *tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Calls an operator with a request and returns its result. Raises Error with the library's code and message."""
    with torch.no_grad():
        answer = json.loads(getattr(operators(), operator)(json.dumps(request), *tensors))
    error = answer.get("error")
    if error is not None:
        raise Error(error["code"], error["message"], None if error["rank"] < 0 else error["rank"])
    return answer["result"]


def size_of(size: int | str) -> int:
    """Returns a size in bytes. The argument is a number or a text that the commands accept, such as "1.5GB". Raises UsageError."""
    return call("parse_size", {"size": size})["bytes"] if isinstance(size, str) else size


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path or an address unix:PATH as text. Expands ~ and ~user."""
    text = os.fsdecode(path)
    kind = "unix:" if text.startswith("unix:") else ""
    return kind + os.path.expanduser(text.removeprefix(kind))


def compute(operator: str, *arguments: Any) -> Any:
    """Calls an operator on tensors and returns its result. Raises Error with the library's code and message."""
    try:
        return getattr(operators(), operator)(*arguments)
    except RuntimeError as error:
        said = FAILED.match(str(error))
        if said is None:
            raise
        raise Error(int(said[1]), said[2]) from None


def value_of(plain: Any) -> Any:
    """Inverse of lib/trainer/load/load_result_json.h: converts its JSON to Python values. Objects become dicts of their attributes."""
    if isinstance(plain, list):
        return [value_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(value_of(one) for one in plain["tuple"])
    if "float" in plain:
        return float(plain["float"])
    return {key: value_of(value) for key, value in plain["dict"]}
