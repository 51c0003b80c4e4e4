# SPDX-License-Identifier: Apache-2.0
"""Plans of moe-replace for the nodes of an elastic run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence

from ._agent_process import own_environment
from ._errors import INTERNAL, NOT_FOUND, Error

INFEASIBLE = 10


def make_plan(folder: str, nodes: Sequence[str], gpus: int, slots: int, tokens: Sequence[Sequence[int]], faults: int, old: str | None,
              flags: Sequence[str], command: str) -> str:
    """Runs moe-replace and returns the text of the plan. Local.

    Args:
        folder: for the files of moe-replace.
        nodes: names of the nodes, in the order of ranks.
        gpus, slots: GPUs of each node, experts of a layer on each of them.
        tokens: [layer][expert].
        faults: nodes that may fail without loss. If the nodes have too few slots, the largest possible number is used.
        old: file of the plan that the ranks have the experts of. None: they have none.
        flags: more flags of moe-replace.
        command: the program moe-replace.

    Raises:
        Error with code 10: the experts do not fit. NotFoundError: there is no such program. Other errors of moe-replace.
    """
    cluster, counts, plan = (os.path.join(folder, name) for name in ("cluster.json", "tokens.jsonl", "made.json"))
    with open(cluster, "w", encoding="utf-8") as file:
        json.dump({"nodes": [{"name": name} for name in nodes], "gpus": gpus, "slots": slots}, file)
    with open(counts, "w", encoding="utf-8") as file:
        json.dump({"iteration": 1, "tokens": [list(layer) for layer in tokens]}, file)
        file.write("\n")
    for survived in range(min(faults, len(nodes) - 1), -1, -1):
        words = [command, counts, "--cluster", cluster, "--strategy", "lazarus", *flags, "--faults", str(survived),
                 *(["--old", old] if old is not None else []), "-o", plan, "--force", "-q"]
        try:
            done = subprocess.run(words, env=own_environment(), capture_output=True, text=True, check=False)
        except OSError as error:
            raise Error(NOT_FOUND, f"{command}: {error.strerror or error}; pass the path of moe-replace as command=") from error
        if done.returncode == 0:
            with open(plan, encoding="utf-8") as file:
                return file.read()
        if done.returncode != INFEASIBLE:
            break
    raise Error(done.returncode if 0 < done.returncode < 11 else INTERNAL, f"{' '.join(words)}: exit code {done.returncode}: "
                                                                           f"{done.stderr.strip()[-2000:]}")
