#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md: every command in it is run, and must print the text in the page.

Usage: tutorial_test.py [--refresh] BIN
  BIN        folder of the built commands
  --refresh  write the commands' output into the page; read the difference before committing it

A block ```console has commands, each after "$ ", and their output, both streams together. All blocks are one
session of bash, which begins in a folder with the sources of this project. Times and rates may differ.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))

import run  # pylint: disable=wrong-import-position

PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.S | re.M)
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n", re.M)
COMMANDS_MIN = 20
LINES_MAX = 30
TIMEOUT_SECONDS = 600


def steps(block):
    """(command, what it prints) of each command of a block."""
    parts = COMMAND.split(block)
    if parts[0] or len(parts) < 3:
        raise ValueError(f"a block begins with a command: {block}")
    return list(zip(parts[1::2], parts[2::2]))


def say(commands, bin_dir):
    """Returns the output of each command of a session."""
    mark = "\x1e"
    script = "".join(f"{{ {command}\n}} 2>&1; code=$?; printf '{mark}'; (exit $code)\n" for command in commands)
    with tempfile.TemporaryDirectory(prefix="sw-tutorial-") as scratch:
        scratch = os.path.realpath(scratch)
        for name in ("tests", "patterns"):
            os.symlink(ROOT / name, os.path.join(scratch, name))
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith(("SHARDWRIGHT_", "NO_COLOR"))}
        environment.update(PATH=os.pathsep.join([bin_dir, os.environ["PATH"]]), LC_ALL="C.UTF-8", TERM="dumb")
        done = subprocess.run(["bash", "-c", script], cwd=scratch, env=environment, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
        if done.stderr:
            raise ValueError(f"the session itself says: {done.stderr}")
        said = [text.replace(scratch, "~/shardwright") for text in done.stdout.split(mark)[:-1]]
    if len(said) != len(commands):
        raise ValueError(f"{len(commands)} commands, of which {len(said)} ended:\n{done.stdout}")
    return said


def session(page, bin_dir):
    """(command, what the page shows, what it prints) of all commands of a page."""
    asked = [step for block in BLOCK.findall(page) for step in steps(block)]
    said = say([command for command, _ in asked], bin_dir)
    return [(command, shown, found) for (command, shown), found in zip(asked, said)]


def refreshed(page, bin_dir):
    """The page with the present output of the commands."""
    found = iter(session(page, bin_dir))

    def fresh(match):
        parts = []
        for command, _ in steps(match.group(1)):
            same, shown, said = next(found)
            assert same == command
            as_before = normal(shown, PAGE) == normal(said, PAGE)
            parts.append(f"$ {command}\n{shown if as_before else said}")
        return "```console\n" + "".join(parts) + "```"

    return BLOCK.sub(fresh, page)


# The progress of a run at its failure depends on its threads.
UNFINISHED = re.compile(r"(: (?:failed|stopped): ).*(?=, \d+ warnings?, exit code)")


def normal(text, page):
    return UNFINISHED.sub(r"\1<some>", run.normal(text, page))


class Tutorial(unittest.TestCase):
    bin = ""

    def test_every_command_says_what_the_page_shows(self):
        found = session(PAGE.read_text(encoding="utf-8"), self.bin)
        self.assertGreaterEqual(len(found), COMMANDS_MIN)
        for command, shown, said in found:
            with self.subTest(command=command):
                self.assertLessEqual(len(said.splitlines()), LINES_MAX)
                self.assertEqual(normal(shown, PAGE), normal(said, PAGE))

    def test_no_command_is_left_out(self):
        page = PAGE.read_text(encoding="utf-8")
        others = re.findall(r"^```(?!console\n|$)(.*)$", page, re.M)
        self.assertEqual(others, [], "blocks that are not run")
        tools = r"\b(ucp-(?:extract|union|load)|pec-(?:save|restore)|moe-replace)\b"
        used = {name for block in BLOCK.findall(page) for command, _ in steps(block)
                for name in re.findall(tools, command)}
        self.assertEqual(used, {path.parent.name for path in ROOT.glob("apps/*/main.cc")})

    def test_it_sees_a_difference(self):
        page = "```console\n$ echo one\none\n$ false\n$ echo $?\n1\n$ echo 3.5 s 2 KiB/s\n4.5 s 7 KiB/s\n```\n"
        for command, shown, said in session(page, self.bin):
            self.assertEqual(normal(shown, PAGE), normal(said, PAGE), command)
        (_, shown, said), = session("```console\n$ echo two\none\n```\n", self.bin)
        self.assertNotEqual(normal(shown, PAGE), normal(said, PAGE))


if __name__ == "__main__":
    REFRESH = "--refresh" in sys.argv
    if REFRESH:
        sys.argv.remove("--refresh")
    if len(sys.argv) != 2:
        sys.exit("usage: tutorial_test.py [--refresh] BIN")
    Tutorial.bin = os.path.abspath(sys.argv.pop())
    if REFRESH:
        PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8"), Tutorial.bin), encoding="utf-8")
    unittest.main()
