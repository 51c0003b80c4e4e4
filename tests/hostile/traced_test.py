#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs that break the rules of a trace, each in one way, are detected."""

import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

from harness import Broken, Scratch, expect  # pylint: disable=wrong-import-position
from traced import run_traced  # pylint: disable=wrong-import-position

DEADLINE_SECONDS = 600
EATS = "my $s = 'x' x (300 << 20); print length $s"


def main():
    with Scratch("hostile-traced-") as folder:
        (folder / "in").write_text("1")
        output = folder / "out"
        run_traced(["cat", folder / "in"], output, "what is allowed", DEADLINE_SECONDS)
        run_traced(["touch", folder / "out.partial-1"], output, "what is allowed", DEADLINE_SECONDS)
        for word, argv in {
                "opened: ": ["cat", "/etc/passwd"],
                "opened for writing: ": ["touch", folder / "other"],
                "changed outside of the output: ": ["mv", folder / "in", folder / "out"],
                "2 programs": ["env", "/bin/true"],
                "a process was started: ": ["sh", "-c", "true | true"],
                "not expected of a reader of files: ": ["perl", "-e", "socket(my $s, 1, 1, 0)"],
                "MiB of memory: ": ["perl", "-e", EATS],
                "s of the processor: ": ["perl", "-e", "1 while 1"],
                "not done after ": ["sleep", "1000"]}.items():
            try:
                run_traced(argv, output, "a stranger", 1 if word == "not done after " else DEADLINE_SECONDS)
            except Broken as found:
                expect(word in str(found), f"\"{word}\" expected of {argv}: {found}")
            else:
                raise Broken(f"{argv} was let pass")
    print("hostile_traced: ok")


main()
