#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The help of every command and subcommand is short: -h has at most 50 lines, --help 120, that of pec-restore 110.
Flags, values and subcommands of earlier versions fail with what to type now.

usage: help_test.py BIN [unittest arguments]
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT_LINES, ALL_LINES, RESTORE_LINES, COLUMNS = 50, 120, 112, 100
BIN = pathlib.Path()

# Flags that became subcommands, by command.
BECAME_SUBCOMMANDS = {
    "ucp-load": {"--serve": "serve INPUT ADDRESS"},
    "pec-save": {
        "--list": "list STORE", "--check": "check STORE", "--gc": "gc STORE",
        "--agent": "agent INPUT STORE", "--status": "status ADDRESS",
        "--tell": "tell ADDRESS REQUEST", "--plan": "plan [STORE]", "--auto": "tune [STORE]",
        "--simulate": "simulate TOKENS [STORE]"},
    "moe-replace": {
        "--compare": "compare LOADS", "--events": "simulate-failures LOADS EVENTS",
        "--evaluate": "evaluate PLAN LOADS"},
}

# Other renames: the words to type and the message.
RENAMED = [
    *((words, "--neighbours is now --siblings")
      for command in ("ucp-extract", "ucp-load", "ucp-union")
      for words in ([command, "ckpt", "out", "--neighbours", "none"], [command, "ckpt", "out", "--neighbours=copy"])),
    (["moe-replace", "loads", "--report", "a.html"], "--report is now --html"),
    (["moe-replace", "compare", "loads", "--report=a.html"], "--report is now --html"),
    (["moe-replace", "evaluate", "plan", "loads", "--report", "a.html"], "--report is now --html"),
    (["pec-save", "status", "unix:/agent", "--page", "a.html"], "--page is now --html"),
    (["pec-save", "simulate", "tokens", "--page=a.html"], "--page is now --html"),
    *((words, "--verify=sums is now --verify=checksums")
      for command in ("ucp-extract", "ucp-load", "ucp-union", "pec-save", "pec-restore")
      for words in ([command, "a", "b", "--verify=sums"], [command, "a", "b", "--verify", "sums"])),
    (["ucp-load", "serve", "ckpt", "unix:/cache", "--verify=sums"], "--verify=sums is now --verify=checksums"),
    *((["pec-save", *words, "--policy", "replay"], "--policy=replay is now --policy=gradient-log")
      for words in (["a", "b"], ["agent", "a", "b"], ["plan"], ["simulate", "tokens"])),
    (["pec-save", "a", "b", "--policy=replay"], "--policy=replay is now --policy=gradient-log"),
    *((["moe-replace", "replay", *words], "moe-replace replay is now moe-replace simulate-failures")
      for words in ([], ["loads", "events"], ["loads", "events", "--compare"], ["--help"])),
]

# Old names that a command never had.
UNKNOWN = [["pec-save", "tune", "--page", "a.html"],
           ["ucp-load", "status", "unix:/cache", "--neighbours", "none"], ["pec-save", "check", "store", "--gc"]]

# Subcommands that were never flags.
NEW = {"pec-save": {"agents", "keygen", "replan", "undo"}, "ucp-load": {"status", "stop"}}


def run(*words, code=0, cwd=None):
    done = subprocess.run([BIN / words[0], *words[1:]], text=True, capture_output=True, check=False,
                          cwd=cwd)
    assert done.returncode == code, f"{words}: exit code {done.returncode}, {done.stderr}"
    return done


def subcommands(command):
    part = run(command, "-h").stdout.partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z-]+) ", part, re.M)


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
            wanted = {text.split()[0] for text in BECAME_SUBCOMMANDS.get(command, {}).values()}
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
        header = (ROOT / "lib" / "support" / "base" / "result.h").read_text(encoding="utf-8")
        enum = re.search(r"enum class Errc[^{]*\{(.*?)\};", header, re.S).group(1)
        self.assertEqual(told, ["0", *re.findall(r"k\w+ = (\d+)", enum)])

    def test_flags_that_became_subcommands_fail_with_the_command_to_run(self):
        for command, replaced in BECAME_SUBCOMMANDS.items():
            for flag, now in replaced.items():
                for words in (["x", flag], [flag, "x"], [f"{flag}=y", "x"]):
                    said = run(command, *words, code=2).stderr
                    self.assertIn(f"{command}: error: {flag} is now {command} {now}\n", said)

    def test_renamed_flags_values_and_subcommands_fail_with_the_new_name(self):
        for words, said in RENAMED:
            with self.subTest(words):
                self.assertEqual(run(*words, code=2).stderr.splitlines()[0], f"{words[0]}: error: {said}")
        for words in UNKNOWN:
            with self.subTest(words):
                self.assertIn("unknown flag", run(*words, code=2).stderr)

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
