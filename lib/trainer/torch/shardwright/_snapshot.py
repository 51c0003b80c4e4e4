# SPDX-License-Identifier: Apache-2.0
"""shardwright.Snapshot: the result of one snapshot."""

from __future__ import annotations


class Snapshot(int):
    """Result of PartialCheckpoints.step if a snapshot was due. It is true if the agent has the data, or is receiving it (overlap).

    Attributes:
        iteration: iteration of the snapshot.
        where: "memory" if the agent's memory has the data or is receiving it; the agent then saves it into the store. "nowhere" if
            the snapshot failed.
        stored: last iteration that the agent had saved into the store when step() was called. None if there is none, or the agent
            did not reply.

    Documentation: live.md#snapshots-of-experts-from-the-trainer in shardwright.DOCS
    """

    iteration: int
    where: str
    stored: int | None

    def __repr__(self) -> str:
        return f"Snapshot({bool(self)}, iteration={self.iteration}, where={self.where!r}, stored={self.stored})"
