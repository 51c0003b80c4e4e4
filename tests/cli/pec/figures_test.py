#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The published figures: runs the commands of the table in docs/pec-planning.md, section 10, and
compares their reports with the table. Does the same with docs/lossless.md's table of the bytes that
a lossless run writes.

Usage: figures_test.py BIN
"""

import json
import pathlib
import re
import shlex

import stores
from stores import Stores

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pec-planning.md"
UNITS = {"": 1, "%": 100, "GB": 1e-9, "s": 1}


def rows():
    """Figure, command, field and value of each row."""
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## 10 ")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[2:3] and cells[2].startswith("`pec-save "):
            figure, _, command, field, value = cells
            yield figure, command.strip("`"), field.strip("`"), value


class Figures(Stores):
    def test_the_table(self):
        # The two files that section 10 describes.
        with (self.work / "tokens.jsonl").open("w", encoding="utf-8") as out:
            for i in range(1, 1281):
                out.write(json.dumps({"iteration": i, "tokens": [[100] * 8]}) + "\n")
        (self.work / "faults.txt").write_text("640\n", encoding="utf-8")
        results, count = {}, 0
        for figure, command, field, value in rows():
            with self.subTest(figure=figure, command=command, field=field):
                if command not in results:
                    results[command] = self.run_tool(*shlex.split(command))
                found = results[command]
                for step in field.split("."):
                    found = found[int(step) if isinstance(found, list) else step]
                number, unit = re.fullmatch(r"([0-9.]+) ?(%|GB|s|)", value).groups()
                digits = len(number.partition(".")[2])
                self.assertEqual(f"{found * UNITS[unit]:.{digits}f}", number)
            count += 1
        self.assertGreaterEqual(count, 30, f"rows of {DOCUMENT}")

    def test_lossless_runs_against_full_checkpoints(self):
        text = (DOCUMENT.parent / "lossless.md").read_text(encoding="utf-8")
        section = text.split("\n### Against full checkpoints")[1].split("\n## ")[0]
        command = re.search(r"`(pec-save simulate tokens.jsonl [^`]* --interval) I`", section).group(1)
        with (self.work / "tokens.jsonl").open("w", encoding="utf-8") as out:
            for i in range(1, 481):
                out.write(json.dumps({"iteration": i, "tokens": [[100] * 16] * 12}) + "\n")
        intervals = []
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not cells[0].isdigit():
                continue
            intervals.append(cells[0])
            with self.subTest(interval=cells[0]):
                rows = {row["policy"]: row for row in self.run_tool(*shlex.split(command), cells[0])["rows"]}
                giga = lambda count: f"{count / 480e9:.1f}"
                replay = rows["gradient-log"]
                state, log = replay["bytes"], replay["log"]["bytes"]
                self.assertEqual(cells[1:], [
                    giga(rows["full"]["bytes"]) + " GB", giga(rows["sequential"]["bytes"]) + " GB",
                    f"{giga(state)} + {giga(log)} = {giga(state + log)} GB",
                    str(replay["log"]["window"]) + " iterations" * (cells[0] == "1"),
                    f"{replay['recovery_s'] - 300:.0f}" + " s"])
        self.assertEqual(intervals, ["1", "2", "3", "4", "10"])


if __name__ == "__main__":
    stores.main()
