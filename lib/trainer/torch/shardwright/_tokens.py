# SPDX-License-Identifier: Apache-2.0
"""Counts tokens per expert in a model, and writes the token log that an agent reads (docs/formats/loads.md)."""

from __future__ import annotations

import json
import os
import stat
from typing import Any, BinaryIO

import torch

from ._errors import BAD_INPUT, Error

BEGINNING = b'{"iteration":'  # first bytes of each line, without spaces


class Counts:
    """Counts the tokens that the MoE layers of a model send to their experts, with forward hooks. Local."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.shape = tuple(layer.num_experts for layer in layers)
        self._hooks = [layer.register_forward_hook(self._hook(number)) for number, layer in enumerate(layers)]
        self._counts: list[torch.Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Sets all counts to zero."""
        self._counts = [torch.zeros(experts, dtype=torch.int64, device="cpu") for experts in self.shape]

    def take(self) -> list[list[int]]:
        """Returns the counts since the last call, [layer][expert], and clears them."""
        counts = [layer.tolist() for layer in self._counts]
        self.clear()
        return counts

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        def count(layer: Any, _: Any, output: Any) -> None:
            if layer.training:
                self._counts[number] += output[2].detach().to("cpu", torch.int64)
        return count


def moe_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Returns DeepSpeed's MoE layers of a model by name, in the order in which DeepSpeed numbers them."""
    from deepspeed.moe.layer import MoE
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def count_tokens(model: torch.nn.Module) -> Counts:
    """Installs hooks on DeepSpeed's MoE layers, in the order in which DeepSpeed numbers them."""
    return Counts(list(moe_layers(model).values()))


class TokenLog:
    """A log with a line for each iteration: {"iteration": N, "tokens": [layer][expert]}. path: None for no log."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._first: int | None = None  # first iteration that this object has added
        self._end: int | None = None  # size of the complete lines; None: not read yet
        self._lines = ""  # not written yet

    def add(self, tokens: dict[int, list[list[int]]]) -> None:
        """Appends iterations, which must be later than those added before. The first call removes these and later iterations of an
        earlier trainer from the file. Raises CorruptInputError and OSError; lines that could not be written are written by the
        next call."""
        if self._path is None:
            return
        if self._first is None and tokens:
            self._first = min(tokens)
        self._lines += "".join(json.dumps({"iteration": iteration, "tokens": tokens[iteration]}) + "\n"
                               for iteration in sorted(tokens))
        if not self._lines:
            return
        with self._open(self._path) as log:
            if self._end is None:
                self._end = self._place_of(log, self._first or 0)
            log.truncate(self._end)
            log.seek(self._end or 0)
            log.write(self._lines.encode())
            log.flush()
            self._end = log.tell()
        self._lines = ""

    @staticmethod
    def _open(path: str) -> BinaryIO:
        """Opens or creates the log. Raises CorruptInputError if the name is a link or another object that is not a regular file."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if not os.path.islink(path):
                raise
            raise Error(BAD_INPUT, f"{path}: a log of tokens expected, found a symbolic link of user {os.lstat(path).st_uid}; "
                                   "remove it, or name the file that it leads to") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Error(BAD_INPUT, f"{path}: a log of tokens expected, found something that is not a regular file")
        return open(descriptor, "r+b")

    def _place_of(self, log: BinaryIO, first: int) -> int:
        """Returns the end of the last line with an iteration before `first`. Ignores a truncated last line of a killed
        writer. Earlier lines of later iterations belong to a run before a restart. Readers ignore them, because the
        iterations are logged again. Raises CorruptInputError if the file is not a token log, so that it is not overwritten."""
        end = at = 0
        log.seek(0)
        for number, line in enumerate(log, 1):
            at += len(line)
            if not line.strip():
                continue
            if not line.endswith(b"\n"):
                found = b"".join(line.split())
                if not (found.startswith(BEGINNING) or BEGINNING.startswith(found)):
                    raise self._no_line(line, number)
            elif self._iteration_of(line, number) < first:
                end = at
        return end

    def _iteration_of(self, line: bytes, number: int) -> int:
        try:
            return int(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._no_line(line, number) from None

    def _no_line(self, line: bytes, number: int) -> Error:
        return Error(BAD_INPUT, f"{self._path}:{number}: not a JSON object with an iteration: {line[:60]!r}; "
                                "remove the line, or the file")
