#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gen-docs on a small tree: writes, agrees with itself, and reports outdated pages."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]


class GenDocs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        formats = pathlib.Path("tests/interop/formats")
        for name in ("scripts", "docs", "bin", formats):
            (self.root / name).mkdir(parents=True)
        for name in ("scripts/gen-docs", "scripts/common.sh", formats / "results.py"):
            shutil.copy(SOURCE / name, self.root / name)
        self.page = self.root / "docs" / "commands.md"
        self.table = self.root / "docs" / "from-to.md"
        self.table.write_text("before\n<!-- table of results -->\n<!-- end of table -->\nafter\n")
        self.matrix, self.results = self.root / formats / "matrix.tsv", self.root / formats / "results.tsv"
        self.matrix.write_text("# head\nx\tllama\t--target dp=3\ttorch\t3\t{}\n")
        self.results.write_text("# head\nllama\t--target dp=3\ttorch\t3\t{}\t7/7\t1e-07\ttorch 2.15.0\n")
        self.add_command("one", "echo help of one")
        self.add_command("two", "echo help of two")

    def add_command(self, name, script):
        (self.root / "apps" / name).mkdir(parents=True, exist_ok=True)
        (self.root / "apps" / name / "main.cc").touch()
        path = self.root / "bin" / name
        codes = '{"exit_codes": [{"code": 0, "meaning": "done"}]}'
        path.write_text(f"#!/bin/sh\nif [ \"$1\" = --help=json ]; then echo '{codes}'; exit; fi\n{script}\n")
        path.chmod(0o755)

    def gen(self, *arguments):
        return subprocess.run(["bash", str(self.root / "scripts" / "gen-docs"), *arguments, "bin"],
                              capture_output=True, text=True, check=False)

    def test_writes_a_section_per_command(self):
        self.assertEqual(self.gen().returncode, 0)
        text = self.page.read_text()
        self.assertIn("## one\n\n```text\nhelp of one\n```\n", text)
        self.assertIn("## two\n\n```text\nhelp of two\n```\n", text)
        self.assertIn("\n| 0 | done |\n| 128+N |", text)
        self.assertEqual(self.gen("--check").returncode, 0)

    def test_a_subcommand_has_a_section_of_its_own(self):
        self.add_command("two", r'''case "$1" in
gc) printf "help of gc\n" ;;
*) printf "help of two\n\nSubcommands:\n  gc          remove\n              what is old\n\nFlags:\n  --x\n" ;;
esac''')
        self.assertEqual(self.gen().returncode, 0)
        text = self.page.read_text()
        self.assertIn("  --x\n```\n\n### two gc\n\n```text\nhelp of gc\n```\n", text)
        self.assertEqual(text.count("### "), 1)

    def test_check_fails_on_drift_and_changes_nothing(self):
        self.gen()
        before = self.page.read_text()
        self.add_command("two", "echo new help of two")
        done = self.gen("--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("+new help of two", done.stdout)
        self.assertEqual(self.page.read_text(), before)

    def test_results_become_a_table_between_its_marks(self):
        self.assertEqual(self.gen().returncode, 0)
        text = self.table.read_text()
        self.assertTrue(text.startswith("before\n<!-- table of results -->\n| source |"), text)
        self.assertIn("\n| llama | `--target dp=3` | torch, 3 ranks | 7/7 | 1e-07 |\n", text)
        self.assertTrue(text.endswith("\nTested with torch 2.15.0.\n<!-- end of table -->\nafter\n"), text)
        self.assertEqual(self.gen("--check").returncode, 0)
        self.results.write_text(self.results.read_text().replace("7/7", "6/7"))
        done = self.gen("--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("docs/from-to.md is not current", done.stderr)
        self.assertEqual(self.table.read_text(), text)

    def test_a_row_without_a_result_is_told(self):
        self.gen()
        pages = self.page.read_text(), self.table.read_text()
        self.matrix.write_text(self.matrix.read_text() + "-\tllama\t--target dp=5\ttorch\t5\t{}\n")
        for arguments in ((), ("--check",)):
            done = self.gen(*arguments)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("no result: llama -> --target dp=5, torch", done.stderr)
        self.assertEqual(pages, (self.page.read_text(), self.table.read_text()))

    def test_a_result_of_no_row_is_told(self):
        self.matrix.write_text("# none\n")
        done = self.gen("--check")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("not in the matrix: llama --target dp=3", done.stderr)

    def test_a_missing_page_is_drift(self):
        self.assertEqual(self.gen("--check").returncode, 1)

    def test_a_command_that_is_not_built_does_not_drop_out(self):
        self.gen()
        (self.root / "bin" / "two").unlink()
        for arguments in ((), ("--check",)):
            done = self.gen(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn("bin/two is not built", done.stderr)

    def test_a_failing_command_leaves_the_old_page(self):
        self.gen()
        before = self.page.read_text()
        self.add_command("two", "echo half; exit 1")
        self.assertNotEqual(self.gen().returncode, 0)
        self.assertEqual(self.page.read_text(), before)


if __name__ == "__main__":
    sys.exit(unittest.main())
