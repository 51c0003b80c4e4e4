# SPDX-License-Identifier: Apache-2.0
"""Manual pages name every flag and format without a warning; real shells complete what the commands take.

    pages_test.py BIN PAGES

PAGES is what scripts/gen-pages wrote. Shells that are not installed leave out their tests.
"""

import json
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

BIN, PAGES = pathlib.Path(), pathlib.Path()

# Text before the tabulator, text after it, and the words that the command gets. A folder "checkpoints" is there.
LINES = [
    ("ucp-load --format dc", "", ["--format", "dcp"]),
    ("ucp-load --format=dc", "", ["--format=dcp"]),
    ("ucp-load --target dp=4,round_r", "true", ["--target", "dp=4,round_robin=true"]),
    ("ucp-load --target=zero=3,round_r", "true", ["--target=zero=3,round_robin=true"]),
    ("ucp-load --dry-r", "", ["--dry-run"]),
    ("ucp-load checkp", "", ["checkpoints/"]),
    ("ucp-load checkpoints/ out --progress js", "", ["checkpoints/", "out", "--progress", "json"]),
    ("ucp-extract --patterns checkp", "", ["--patterns", "checkpoints/"]),
    ("pec-save --policy load", "", ["--policy", "load-aware"]),
    ("pec-save sim", "", ["simulate"]),
    ("pec-save simulate --snapshot-bandw", "1", ["simulate", "--snapshot-bandwidth", "1"]),
    ("pec-save check --thr", "2", ["check", "--threads", "2"]),
    ("moe-replace --strategy smart", "", ["--strategy", "smartmoe"]),
    ("moe-replace evalu", "", ["evaluate"]),
]


def same(words):
    """One text for all that is the same to a command: zsh writes --flag=value, and no slash after the last folder."""
    return re.sub(r"(--[\w-]+)=", r"\1 ", " ".join(words)).removesuffix("/")


def described(words):
    return json.loads(subprocess.run([BIN / words[0], *words[1:], "--help=json"], check=True, capture_output=True).stdout)


def commands():
    for binary in sorted(path.stem[1:] for path in (PAGES / "zsh/site-functions").iterdir()):
        whole = described([binary])
        yield [binary], whole
        for one in whole["subcommands"]:
            yield [binary, one["name"]], described([binary, one["name"]])


class Terminal:
    """A shell with a terminal as its input."""

    def __init__(self, words, folder):
        self.seen = ""
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, {**os.environ, "TERM": "vt100", "HOME": str(folder), "INPUTRC": "/dev/null", "PS1": "$ "})

    def type(self, text):
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern, seconds=300):
        """Waits for a match of a pattern on the screen; forgets the match and everything before it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(pattern, self.seen)
            if found:
                self.seen = self.seen[found.end():]
                return found
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
        raise AssertionError(f"{pattern!r} has not come: {self.seen!r}")

    def close(self):
        os.close(self.terminal)
        os.waitpid(self.process, 0)


class Pages(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="shardwright-pages-"))
        (self.folder / "checkpoints").mkdir()
        self.addCleanup(shutil.rmtree, self.folder)

    def need(self, program):
        if shutil.which(program) is None:
            self.skipTest(f"{program} is not installed")

    def test_manual_pages_name_every_flag(self):
        self.need("groff")
        for words, command in commands():
            page = PAGES / "man/man1" / ("-".join(words) + ".1")
            shown = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=100n", page], check=True,
                                   capture_output=True, text=True)
            self.assertEqual(shown.stderr, "", page)
            for flag in command["flags"]:
                for name in flag["names"]:
                    self.assertRegex(shown.stdout, rf"(?m)^ +(.*, )?{re.escape(name)}\b", page)
            for heading in ("NAME", "SYNOPSIS", "EXAMPLES", "EXIT STATUS", "SEE ALSO"):
                self.assertRegex(shown.stdout, f"(?m)^{heading}$", page)

    def complete(self, shell, preparation):
        """Every line, typed into a terminal with commands that only print their words."""
        terminal = Terminal(shell, self.folder)
        self.addCleanup(terminal.close)
        names = sorted({line.split()[0] for line, _, _ in LINES})
        prints = "".join(name + "() { printf '\\nGOT:%s\\n' \"$#\" \"$@\"; }\n" for name in names)
        (self.folder / "prepare").write_text(preparation + prints)
        terminal.type(". ./prepare; echo READY$((1 + 1))\n")
        terminal.wait_for("READY2")
        for line, rest, expected in LINES:
            with self.subTest(line):
                terminal.type(line + "\t")
                time.sleep(0.5)  # text typed at once may be taken for a paste
                terminal.type(rest + "\n")
                count = int(terminal.wait_for(r"GOT:(\d+)")[1])
                words = [terminal.wait_for(r"GOT:([^\r\n]*)\r?\n")[1] for _ in range(count)]
                self.assertEqual(same(words), same(expected))

    def test_bash(self):
        self.need("bash")
        self.complete(["bash", "--norc", "--noprofile", "-i"], f'for file in "{PAGES}"/bash-completion/completions/*; do . "$file"; done\n')

    def test_zsh(self):
        self.need("zsh")
        self.complete(["zsh", "-f", "-i"], f'fpath=("{PAGES}/zsh/site-functions" $fpath)\nautoload -U compinit\ncompinit -u -d ./dump\n')

    def test_fish(self):
        self.need("fish")
        for line, rest, expected in LINES:
            with self.subTest(line):
                source = PAGES / "fish/vendor_completions.d" / (line.split()[0] + ".fish")
                offered = subprocess.run(["fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(source), line],
                                         cwd=self.folder, check=True, capture_output=True, text=True, env={**os.environ, "HOME": str(self.folder)})
                words = [word.split("\t")[0] for word in offered.stdout.splitlines()]
                last = expected[-1] if not rest or expected[-1].endswith("=" + rest) else expected[-2]
                self.assertIn(last.removesuffix(rest), words)
                if " --" in line:  # words of flags, not files in the folder
                    self.assertTrue(all(word.startswith(line.split()[-1]) for word in words), words)


if __name__ == "__main__":
    BIN, PAGES = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
    unittest.main(verbosity=2)
