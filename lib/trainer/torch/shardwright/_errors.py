# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package: one class for each exit code of the commands (docs/report.md#exit-codes)."""

from __future__ import annotations

INTERNAL, USAGE, NOT_FOUND, BAD_INPUT, MISMATCH, BUSY, IO, LIMIT, UNSUPPORTED = 1, 2, 3, 4, 5, 6, 7, 8, 9


class Error(RuntimeError):
    """Base class of all errors that this package raises. Its text is the message.

    Catch a subclass to handle one cause, for example NotFoundError. `Error(code, message)` creates an object of the subclass for
    that code. Codes without a subclass are 1 (internal error), 10 (no feasible plan) and 75 (stopped after Ctrl-C).

    Attributes:
        code: int, the exit code that a command of Shardwright would end with (report.md#exit-codes in
            shardwright.DOCS).
        rank: int or None, the rank that failed. None if it is the calling rank, or if there is only one rank.

    Documentation: live.md#errors in shardwright.DOCS
    """

    code: int
    rank: int | None

    def __new__(cls, code: int, message: str, rank: int | None = None) -> Error:
        kind = _BY_CODE.get(code, cls) if cls is Error else cls
        return super().__new__(kind, message)

    def __init__(self, code: int, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the constructor's arguments: other processes of the trainer receive the same error."""
        return type(self), (self.code, str(self), self.rank), dict(self.__dict__)


class UsageError(Error, ValueError):
    """Code 2: an argument is invalid, or does not match the trainer, the plan or the arguments of other ranks."""


class NotFoundError(Error):
    """Code 3: a checkpoint, a store, an agent or a program does not exist or cannot be read."""


class CorruptInputError(Error, ValueError):
    """Code 4: a checkpoint, a log or a reply is corrupt or unsafe."""


class MismatchError(Error):
    """Code 5: checkpoint, store, agent, plan and trainer do not fit together, or a checksum does not match."""


class BusyError(Error):
    """Code 6: the store or output exists already, is in use, or belongs to another user."""


class TransferError(Error):
    """Code 7: reading, writing, or communication with an agent or another rank failed. A later attempt can succeed."""


class LimitError(Error):
    """Code 8: a memory or size limit is exceeded."""


class UnsupportedError(Error, NotImplementedError):
    """Code 9: this package does not support the checkpoint, the trainer or the installed version of a library."""


_BY_CODE: dict[int, type[Error]] = {
    USAGE: UsageError, NOT_FOUND: NotFoundError, BAD_INPUT: CorruptInputError, MISMATCH: MismatchError, BUSY: BusyError,
    IO: TransferError, LIMIT: LimitError, UNSUPPORTED: UnsupportedError}
