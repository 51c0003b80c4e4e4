#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables go from the log of a campaign into the page, and nothing else of the page changes."""

import contextlib
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

import tables

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PAGE = """# Page

<!-- table of kills -->

| Case | Calls |
|---|---|
| `load` | 1 |

<!-- end of table -->

Between.

<!-- table of fuzz -->

| Target | Input | Runs |
|---|---|---|
| `zip` | archives | 7 |
| `json` | texts \\| lines | 8 |

<!-- end of table -->
"""


def printed(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*arguments)
    return out.getvalue()


class Tables(unittest.TestCase):
    def test_a_table_takes_the_place_of_the_old_one(self):
        log = "[1 s] begins\n" + printed(tables.show, ("Case", "Calls", "Kills"), [("`load`", 2, 12345), ("`pack`", 3, 4)]) + "done\n"
        wanted = "\n| Case | Calls | Kills |\n|---|---|---|\n| `load` | 2 | 12,345 |\n| `pack` | 3 | 4 |\n\n"
        page = tables.put(PAGE, "kills", log)
        self.assertEqual(page, PAGE.replace("\n| Case | Calls |\n|---|---|\n| `load` | 1 |\n\n", wanted))
        self.assertEqual(tables.put(page, "kills", log), page)

    def test_of_several_tables_the_last_counts(self):
        log = printed(tables.show, ("A",), [("a",)]) + "again\n" + printed(tables.show, ("B",), [("b",)])
        self.assertIn("\n| B |\n|---|\n| b |\n", tables.put(PAGE, "kills", log))
        self.assertNotIn("| A |", tables.put(PAGE, "kills", log))

    def test_rows_alone_replace_those_that_begin_alike(self):
        log = printed(tables.show_rows, [("`json`", "", 9000), ("`new`", "bytes | bits", 1)])
        page = tables.put(PAGE, "fuzz", log)
        self.assertEqual(page, PAGE.replace("| `json` | texts \\| lines | 8 |",
                                            "| `json` | texts \\| lines | 9,000 |\n| `new` | bytes \\| bits | 1 |"))

    def test_several_rows_have_a_sum(self):
        self.assertEqual(tables.with_sum([("a", "x", 1, 2)], 2), [("a", "x", 1, 2)])
        self.assertEqual(tables.with_sum([("a", "x", 1, 2), ("b", "y", 3000, 4)], 2)[2:], [("**Sum**", "", "**3,001**", "**6**")])

    def test_a_log_without_rows_changes_nothing(self):
        self.assertEqual(tables.put(PAGE, "nobody", "no table\n"), PAGE)

    def test_what_does_not_fit_is_told(self):
        with self.assertRaisesRegex(ValueError, "no place for the table of nobody"):
            tables.put(PAGE, "nobody", "| a |\n")
        with self.assertRaisesRegex(ValueError, "3 columns in the page, 2 in the log"):
            tables.put(PAGE, "fuzz", "| `zip` | 1 |\n")
        with self.assertRaisesRegex(ValueError, "no place"):
            tables.put(PAGE.replace("<!-- end of table -->", ""), "kills", "| a |\n")

    def test_the_command_writes_the_page(self):
        with tempfile.TemporaryDirectory() as folder:
            page, log = pathlib.Path(folder) / "page.md", pathlib.Path(folder) / "log"
            page.write_text(PAGE)
            log.write_text("| `zip` | | 7000 |\n")
            command = [sys.executable, SOURCE / "tests" / "docs" / "tables.py", page]
            subprocess.run([*command, "fuzz", log], check=True)
            self.assertEqual(page.read_text(), PAGE.replace("archives | 7 ", "archives | 7,000 "))
            done = subprocess.run([*command, "nobody", log], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, "page.md: it has no place" in done.stderr), (2, True))
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()), ["log", "page.md"])

    def test_each_table_of_the_page_is_of_a_campaign(self):
        names = re.findall("<!-- table of (.*) -->", (SOURCE / "docs" / "robustness.md").read_text())
        campaigns = subprocess.run(["bash", SOURCE / "scripts" / "night", "--list"], capture_output=True, text=True, check=True)
        self.assertGreater(len(names), 5)
        for name in names:
            self.assertIn(name, {campaign.split("-")[0] for campaign in campaigns.stdout.split()})


if __name__ == "__main__":
    unittest.main()
