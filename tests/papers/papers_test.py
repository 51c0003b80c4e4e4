#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md is what page.py writes; rows and results that contradict each other are errors."""

import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import inputs  # pylint: disable=wrong-import-position
import page  # pylint: disable=wrong-import-position
import recorded  # pylint: disable=wrong-import-position
import rows  # pylint: disable=wrong-import-position
import run  # pylint: disable=wrong-import-position
import values  # pylint: disable=wrong-import-position

PAPER = {"paper": "A Paper", "source": "arXiv", "figures": 2, "tables": 1, "rows": [
    {"id": "a", "item": "Figure 1", "subject": "x", "published": "2", "verdict": "reproduced", "commands": ["go --k {K}"],
     "for": {"K": [1, 2]}, "value": "{0.x:1%}", "within": [[1, 3]]},
    {"id": "b", "item": "Figure 2", "subject": "x", "published": "2", "verdict": "needs GPUs"},
    {"id": "c", "item": "Table 1", "subject": "x", "published": "2", "verdict": "not reproduced", "reason": "it is a test"}]}
MEASURED = {"a": {"value": "2.0 %", "commands": ["go --k 1", "go --k 2"], "machine": None}}


class Page(unittest.TestCase):
    def run_page(self, *words):
        return subprocess.run([sys.executable, str(HERE / "page.py"), *map(str, words)], text=True, capture_output=True,
                              check=False)

    def test_is_current(self):
        done = self.run_page("--check")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_drift_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "papers.md"
            self.assertEqual(self.run_page("--check", target).returncode, 1)
            self.assertEqual(self.run_page(target).returncode, 0)
            self.assertEqual(self.run_page("--check", target).returncode, 0)
            text = target.read_text(encoding="utf-8")
            target.write_text(text.replace("| 42.2 % |", "| 42.3 % |"), encoding="utf-8")
            done = self.run_page("--check", target)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stdout, r"\n\+.*\| 42\.2 % \|")
            self.assertIn("is not current", done.stderr)

    def test_no_cell_is_empty(self):
        text = (rows.ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith("|"):
                cells = re.split(r"(?<!\\)\|", line)[1:-1]
                self.assertTrue(all(cell.strip() for cell in cells), line)
                self.assertIn(len(cells), (2, len(page.HEAD), len(page.LOSS_HEAD), len(rows.VERDICTS) + 3), line)

    def test_cells(self):
        (paper,) = rows.joined([PAPER], MEASURED, None)
        lines = list(page.lines_of(paper))
        self.assertEqual(lines[0], ("Figure 1", "x", "`go --k K` with K = 1, 2", "2.0 %", "2", "reproduced"))
        self.assertEqual(lines[1][2:], ("none", "not computed", "2", "needs GPUs"))
        self.assertEqual(lines[2][-1], "not reproduced because it is a test")
        self.assertEqual(page.count_line(paper)[1:], ("2", "1", "1", "0", "0", "1", "1"))


class Rows(unittest.TestCase):
    def setUp(self):
        self.paper, self.measured = copy.deepcopy(PAPER), copy.deepcopy(MEASURED)

    def wrong(self, message):
        with self.assertRaisesRegex(rows.Wrong, message):
            rows.joined([self.paper], self.measured, None)

    def test_every_figure_and_table_needs_a_row(self):
        self.paper["figures"] = 3
        self.wrong("missing .'Figure 3'")
        self.paper["figures"] = 1
        self.wrong("out of order: .'Figure 2'")
        self.paper["figures"] = 2
        self.paper["rows"].reverse()
        self.wrong("out of order")

    def test_incomplete_rows(self):
        for change, message in (({"subject": " "}, "subject is missing"), ({"verdict": "good"}, "unknown verdict"),
                                ({"verdict": "deviates"}, "needs a reason"), ({"verdict": "better"}, "needs commands"),
                                ({"note": "x"}, "unknown note"), ({"commands": ["go"]}, "commands without value")):
            self.paper["rows"][1] = PAPER["rows"][1] | change
            with self.subTest(change=change):
                self.wrong(message)
        self.paper["rows"][1] = PAPER["rows"][1] | {"id": "a"}
        self.wrong("occurs twice")

    def test_the_value_must_support_the_verdict(self):
        for value in ("3.1 %", "0.9 %", "2.0 %, 2.0 %", "none"):
            self.measured["a"]["value"] = value
            with self.subTest(value=value):
                self.wrong("limits|needs 1 to 3")
        self.measured = copy.deepcopy(MEASURED)
        del self.paper["rows"][0]["within"]
        self.wrong("needs `expect` or `within`")
        self.paper["rows"][0]["expect"] = "2 %"
        self.wrong('needs "2 %", the value is "2.0 %"')

    def test_results_are_those_of_the_commands(self):
        self.paper["rows"][0]["for"]["K"] = [1, 3]
        self.wrong("other commands; run tests/papers/run.py --only a")
        self.measured = {}
        self.wrong("no result; run")
        self.measured = copy.deepcopy(MEASURED) | {"z": {"value": "1", "machine": None}}
        self.paper = copy.deepcopy(PAPER)
        self.wrong("results of no row: z")

    def test_results_of_other_programs_fill_rows(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "paper.json").write_text(json.dumps({"rows": MEASURED}), encoding="utf-8")
            loss = {"machine": "a machine", "rows": {"b": {
                "value": "2.1", "commands": ["measure loss"], "verdict": "deviates", "reason": "the model is small"}}}
            (folder / "loss.json").write_text(json.dumps(loss), encoding="utf-8")
            (paper,) = rows.joined([self.paper], rows.results(folder), None)
            self.assertEqual(list(page.lines_of(paper))[1], (
                "Figure 2", "x", "`measure loss`", "2.1", "2", "deviates because the model is small (measured on a machine)"))
            (folder / "other.json").write_text(json.dumps(loss), encoding="utf-8")
            with self.assertRaisesRegex(rows.Wrong, "b: is in other.json and in another file"):
                rows.results(folder)

    def test_inputs_and_functions_exist(self):
        for paper in rows.published():
            for row in paper["rows"]:
                for name in row.get("inputs", []):
                    self.assertIn(name, inputs.INPUTS, row["id"])
                if "compute" in row:
                    self.assertTrue(callable(getattr(values, row["compute"])), row["id"])
                if "recorded" in row:
                    self.assertIn(row["recorded"], recorded.READERS, row["id"])
                self.assertIn(row.get("when", "quick"), ("quick", "slow", "timed"), row["id"])


class Values(unittest.TestCase):
    def test_templates(self):
        results = [{"a": {"b": 0.4216, "c": [1, {"7": 61.3e9}]}}]
        for template, value in (("{0.a.b:1%}", "42.2 %"), ("{0.a.c[1][7]:1GB}", "61.3 GB"), ("{0.a.b:3}", "0.422"),
                                ("{0.a.c[0]} of {n}", "1 of 10")):
            self.assertEqual(values.rendered(template, results, {"n": 10}), value)

    def test_numbers(self):
        self.assertEqual(rows.numbers("9 to 1,075 in 2.5e-3 %"), [9, 1075, 0.0025])

    def test_made_inputs(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for wanted in ("skew-4.json", "even-8.jsonl", "demo"):
                inputs.make(wanted, folder)
            (layer,) = json.loads((folder / "skew-4.json").read_text(encoding="utf-8"))
            self.assertEqual(layer[-1] * len(layer), 4 * sum(layer))
            self.assertEqual(len((folder / "even-8.jsonl").read_text(encoding="utf-8").splitlines()), 1280)
            self.assertTrue((folder / "demo" / "latest").is_file())

    def test_a_failed_command_is_an_error(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "go").write_text("#!/bin/sh\necho broken >&2\nexit 5\n", encoding="utf-8")
            (folder / "go").chmod(0o755)
            with self.assertRaisesRegex(RuntimeError, "go --k 1: exit code 5: broken"):
                run.value_of(PAPER["rows"][0], folder)

    def test_a_changed_value_is_an_error(self):
        for count, code, message in ((324329472, 0, ""), (323e6, 1, 'recorded "324.3 M", now "323.0 M"'), (5, 1, "needs 321")):
            with self.subTest(count=count), tempfile.TemporaryDirectory() as name:
                command = pathlib.Path(name) / "pec-save"
                report = json.dumps({"result": {"size": {"full": {"bytes": count}}}})
                command.write_text(f"#!/bin/sh\nfor last; do :; done\necho '{report}' >\"${{last#--json=}}\"\n", encoding="utf-8")
                command.chmod(0o755)
                done = subprocess.run([sys.executable, str(HERE / "run.py"), name, "--check", "--only", "moc-table-1-125m"],
                                      text=True, capture_output=True, check=False)
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
