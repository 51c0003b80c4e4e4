#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records the results of a full run.py for docs/papers.md.

    record.py OUT

OUT is the output folder of run.py. Writes tests/papers/results/loss.json, with the rows of the page that the training
fills, and the two charts into docs. Afterwards tests/papers/page.py writes the page.
"""

import json
import pathlib
import shutil
import statistics
import sys

TESTS = pathlib.Path(__file__).resolve().parents[2]
COMMAND = "tests/papers/loss/run.py"
SMALL = 0.005  # nats: the largest difference up to the limit in figure 7 of MoC-System


def summary(rows):
    """Returns one line for all seeds of a policy."""
    restores = [restore for row in rows for restore in row["restores"]]
    differences = [row["difference"] for row in rows]
    back = [restore["back_within"] for restore in restores]
    return {"run": rows[0]["name"], "seeds": len(rows), "plt": statistics.mean(row["plt"] for row in rows),
            "difference": statistics.mean(differences), "least": min(differences), "most": max(differences),
            "spike": max(restore["spike"] for restore in restores), "back": None if None in back else max(back)}


def limited(results):
    """MoC-System, figure 7: the final loss of runs with a PLT up to the limit."""
    limit = results["setup"]["plt_limit"]
    found = [row["difference"] for row in results["rows"] if 0 < row["plt"] <= limit]
    return {"value": f"{min(found):+.4f} to {max(found):+.4f} nats per byte up to a PLT of {100 * limit:.2f} %",
            "verdict": "reproduced", "within": [[-SMALL, SMALL]] * 2 + [[100 * limit] * 2],
            "reason": "a small model, see [below](#loss-after-lost-tokens). The paper's differences are as small"}


def several_faults(results):
    """MoEtion, figure 8: the loss after each of several faults."""
    restores = [restore for row in results["rows"] if len(row["faults"]) > 1 for restore in row["restores"]]
    spike = max(restore["spike"] for restore in restores)
    back = [restore["back_within"] for restore in restores]
    late = back.count(None)
    value = f"rises by at most {spike:.3f} nats per byte"
    if late:
        tolerance, some = results["setup"]["tolerance"], [one for one in back if one is not None]
        return {"value": f"{value}; back within {tolerance} of the uninterrupted loss after {len(some)} of {len(back)} faults",
                "verdict": "deviates", "reason": "the next of the four faults follows after 64 iterations, and the "
                                                 "[model](#loss-after-lost-tokens) is small"}
    return {"value": f"{value}, back within {max(back)} iterations", "verdict": "reproduced", "within": [[0, 0.5], [0, 200]],
            "reason": "a small model, see [below](#loss-after-lost-tokens)"}


def by_share(results):
    """MoEtion, table 1: loss against the share of lost tokens."""
    rows = sorted((summary(group) for group in by_name(results)), key=lambda line: line["plt"])
    shown = [rows[0], *(min(rows[1:], key=lambda line: abs(line["plt"] - share)) for share in (0.035, 0.1)), rows[-1]]
    value = ", ".join(f"{line['difference']:+.4f} at {100 * line['plt']:.1f} %" for line in shown)
    return {"value": f"difference of the loss {value}", "verdict": "deviates",
            "reason": "the loss of the small [model](#loss-after-lost-tokens), early in its training, does not jump"}


def by_name(results):
    """Groups the rows by policy."""
    names = dict.fromkeys(row["name"] for row in results["rows"])
    return [[row for row in results["rows"] if row["name"] == name] for name in names]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    rows = {"moc-figure-7": limited(results), "moetion-figure-8": several_faults(results),
            "moetion-table-1": by_share(results)}
    record = {"rows": {name: row | {"commands": [COMMAND]} for name, row in rows.items()},
              "setup": results["setup"], "lines": [summary(group) for group in by_name(results)]}
    path = TESTS / "papers" / "results" / "loss.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in ("curves", "plt"):
        shutil.copyfile(out / f"{name}.svg", TESTS.parent / "docs" / f"loss-{name}.svg")


if __name__ == "__main__":
    main()
