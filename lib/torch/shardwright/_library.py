"""The library of operators: loaded once, called with JSON."""

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
FAILED = re.compile(r"shardwright error (\d+): (.*)")  # how lib/torch/tokens.cc fails


def check_version(version: str) -> None:
    """Refuses a PyTorch without what the library is built on."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise Error(UNSUPPORTED, f"torch {version}: shardwright needs torch {OLDEST[0]}.{OLDEST[1]} or newer")


@functools.cache
def operators() -> Any:
    """torch.ops.shardwright"""
    check_version(torch.__version__)
    library = pathlib.Path(__file__).with_name("libshardwright_torch.so")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Error(UNSUPPORTED, f"{library}: {error.__cause__ or error}") from error
    _operators.register()
    return torch.ops.shardwright


def call(operator: str, request: dict[str, Any], *tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What an operator answers that takes a request. Raises Error."""
    with torch.no_grad():
        answer = json.loads(getattr(operators(), operator)(json.dumps(request), *tensors))
    error = answer.get("error")
    if error is not None:
        raise Error(error["code"], error["message"], None if error["rank"] < 0 else error["rank"])
    return answer["result"]


def size_of(size: int | str) -> int:
    """Bytes: a number, or a text as the commands take it, as "1.5GB". Raises Error."""
    return call("parse_size", {"size": size})["bytes"] if isinstance(size, str) else size


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path, or an address unix:PATH, with ~ and ~user in place of a home folder expanded."""
    text = os.fsdecode(path)
    kind = "unix:" if text.startswith("unix:") else ""
    return kind + os.path.expanduser(text.removeprefix(kind))


def compute(operator: str, *arguments: Any) -> Any:
    """What an operator on tensors returns. Raises Error."""
    try:
        return getattr(operators(), operator)(*arguments)
    except RuntimeError as error:
        said = FAILED.match(str(error))
        if said is None:
            raise
        raise Error(int(said[1]), said[2]) from None


def value_of(plain: Any) -> Any:
    """A value of Python out of the JSON that lib/live/tell.h makes of one; objects as dicts of their attributes."""
    if isinstance(plain, list):
        return [value_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(value_of(one) for one in plain["tuple"])
    if "float" in plain:
        return float(plain["float"])
    return {key: value_of(value) for key, value in plain["dict"]}
