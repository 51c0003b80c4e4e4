"""What goes wrong, as the commands of Shardwright say it."""

INTERNAL, USAGE, NOT_FOUND, BAD_INPUT, MISMATCH, BUSY, IO, UNSUPPORTED = 1, 2, 3, 4, 5, 6, 7, 9


class Error(RuntimeError):
    """What failed; its text is the message.

    code: what a command of Shardwright would have ended with (docs/commands.md).
    rank: the rank that failed, None where it was this one or there is one only.
    """

    def __init__(self, code: int, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank
