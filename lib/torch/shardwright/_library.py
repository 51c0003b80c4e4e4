"""The library of operators: loaded once, called with JSON."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any

import torch

from ._errors import UNSUPPORTED, Error

OLDEST = (2, 10)


def check_version(version: str) -> None:
    """Refuses a PyTorch without what the library is built on."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise Error(UNSUPPORTED, f"torch {version}: shardwright needs torch {OLDEST[0]}.{OLDEST[1]} or newer")


@functools.cache
def _operators() -> Any:
    check_version(torch.__version__)
    library = pathlib.Path(__file__).with_name("libshardwright_torch.so")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Error(UNSUPPORTED, f"{library}: {error.__cause__ or error}") from error
    return torch.ops.shardwright


def call(operator: str, request: dict[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What an operator answers. Raises Error."""
    with torch.no_grad():
        answer = json.loads(getattr(_operators(), operator)(json.dumps(request), tensors))
    error = answer.get("error")
    if error is not None:
        raise Error(error["code"], error["message"], None if error["rank"] < 0 else error["rank"])
    return answer["loaded"]


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
