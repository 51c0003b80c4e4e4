# SPDX-License-Identifier: Apache-2.0
"""Finds the documentation. It is installed below the same prefix as this package."""

from __future__ import annotations

import pathlib


def _find() -> str | None:
    """Returns the folder of the installed documentation or of this source tree. None if only the package is installed."""
    # From this folder up to PREFIX of PREFIX/lib/pythonX.Y/site-packages/shardwright.
    for folder in list(pathlib.Path(__file__).resolve().parents)[:5]:
        for docs in (folder / "share/doc/shardwright/docs", folder / "docs"):
            if (docs / "live.md").is_file():
                return str(docs)
    return None


DOCS = _find()
