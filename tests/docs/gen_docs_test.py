#!/usr/bin/env python3
"""scripts/gen-docs on a small tree: writes, agrees with itself, and tells what drifted."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


class GenDocs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in ("scripts", "docs", "bin"):
            (self.root / name).mkdir()
        for name in ("gen-docs", "common.sh"):
            shutil.copy(SCRIPTS / name, self.root / "scripts" / name)
        self.page = self.root / "docs" / "commands.md"
        self.add_command("one", "echo help of one")
        self.add_command("two", "echo help of two")

    def add_command(self, name, script):
        (self.root / "apps" / name).mkdir(parents=True, exist_ok=True)
        (self.root / "apps" / name / "main.cc").touch()
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def gen(self, *arguments):
        return subprocess.run(["bash", str(self.root / "scripts" / "gen-docs"), *arguments, "bin"],
                              capture_output=True, text=True, check=False)

    def test_writes_a_section_per_command(self):
        self.assertEqual(self.gen().returncode, 0)
        text = self.page.read_text()
        self.assertIn("## one\n\n```text\nhelp of one\n```\n", text)
        self.assertIn("## two\n\n```text\nhelp of two\n```\n", text)
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
