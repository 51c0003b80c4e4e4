#!/usr/bin/env python3
"""The help of every command and subcommand is short: -h has at most 50 lines, --help 120, that of pec-restore 110.
Flags that became subcommands fail with the command to run now.

usage: help_test.py BIN [unittest arguments]
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT_LINES, ALL_LINES, RESTORE_LINES, COLUMNS = 50, 120, 110, 100
BIN = pathlib.Path()

# What was a flag, and what is typed now.
REPLACED = {
    "ucp-load": {"--serve": "serve INPUT ADDRESS"},
    "pec-save": {
        "--list": "list STORE", "--check": "check STORE", "--gc": "gc STORE",
        "--agent": "agent INPUT STORE", "--status": "status ADDRESS",
        "--tell": "tell ADDRESS REQUEST", "--plan": "plan [STORE]", "--auto": "tune [STORE]",
        "--simulate": "simulate TOKENS [STORE]"},
    "moe-replace": {
        "--compare": "compare LOADS", "--events": "replay LOADS EVENTS",
        "--evaluate": "evaluate PLAN LOADS"},
}

# Subcommands that were never flags.
NEW = {"pec-save": {"agents", "keygen", "undo"}, "ucp-load": {"status", "stop"}}


def run(*words, code=0, cwd=None):
    done = subprocess.run([BIN / words[0], *words[1:]], text=True, capture_output=True, check=False,
                          cwd=cwd)
    assert done.returncode == code, f"{words}: exit code {done.returncode}, {done.stderr}"
    return done


def subcommands(command):
    part = run(command, "-h").stdout.partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z]+) ", part, re.M)


def flags(text):
    """The flags that a help lists."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M))


COMMANDS = sorted(path.parent.name for path in (ROOT / "apps").glob("*/main.cc"))


class Help(unittest.TestCase):
    def every(self):
        """Words of every command and subcommand."""
        for command in COMMANDS:
            yield [command]
            for name in subcommands(command):
                yield [command, name]

    def test_there_are_commands_and_subcommands(self):
        self.assertEqual(len(COMMANDS), 6)
        for command in COMMANDS:
            wanted = {text.split()[0] for text in REPLACED.get(command, {}).values()}
            self.assertEqual(set(subcommands(command)), wanted | NEW.get(command, set()), command)

    def test_it_fits_on_a_screen(self):
        for words in self.every():
            with self.subTest(words):
                short, long = run(*words, "-h").stdout, run(*words, "--help").stdout
                for text, most in ((short, SHORT_LINES), (long, RESTORE_LINES if words == ["pec-restore"] else ALL_LINES)):
                    lines = text.splitlines()
                    self.assertLessEqual(len(lines), most)
                    self.assertLessEqual(max(map(len, lines)), COLUMNS, max(lines, key=len))
                    self.assertTrue(text.startswith(f"Examples:\n  {' '.join(words)}"), text)
                    self.assertIn(f"\nUsage: {' '.join(words)} [FLAGS]", text)
                self.assertIn(f"{' '.join(words)} --help", short.splitlines()[-1])
                self.assertEqual(flags(short) - flags(long), set())
                self.assertIn("Exit codes: ", long.splitlines()[-1])
                self.assertNotIn("Exit codes:\n", long)

    def test_a_partial_checkpoint_store_is_called_store(self):
        for words, arguments in ((["pec-save"], "INPUT STORE"), (["pec-save", "agent"], "INPUT STORE"),
                                 (["pec-restore"], "STORE OUTPUT")):
            self.assertIn(f"\nUsage: {' '.join(words)} [FLAGS] {arguments}\n", run(*words, "--help").stdout)
        self.assertIn("error: STORE is missing\n", run("pec-save", "ckpt", code=2).stderr)

    def test_every_code_is_told_in_full(self):
        page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
        told = re.findall(r"^\| (\d+) \| .+ \|$", page.partition("\n## Environment")[0], re.M)
        header = (ROOT / "lib" / "base" / "result.h").read_text(encoding="utf-8")
        enum = re.search(r"enum class Errc[^{]*\{(.*?)\};", header, re.S).group(1)
        self.assertEqual(told, ["0", *re.findall(r"k\w+ = (\d+)", enum)])

    def test_a_flag_that_became_a_subcommand_is_refused_with_it(self):
        for command, replaced in REPLACED.items():
            for flag, now in replaced.items():
                for words in (["x", flag], [flag, "x"], [f"{flag}=y", "x"]):
                    said = run(command, *words, code=2).stderr
                    self.assertIn(f"{command}: error: {flag} was replaced; run: {command} {now}\n", said)

    def test_a_name_like_a_subcommand_is_reached_with_its_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "check").mkdir()
            self.assertIn("check: ", run("pec-save", "./check", "store", code=3, cwd=folder).stderr)
            said = run("pec-save", "-q", "check", "store", code=2, cwd=folder).stderr
            self.assertIn("put it before all flags, as in pec-save check; for a file of that name, write ./check", said)
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()], ["check"])


if __name__ == "__main__":
    BIN = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
