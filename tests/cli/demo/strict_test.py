#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--strict: what cannot be carried over ends the command before anything is written.

Usage: strict_test.py BIN
"""

import json
import sys

sys.dont_write_bytecode = True

from demo import DemoTest, main  # pylint: disable=wrong-import-position


class Strict(DemoTest):
    def refused(self, *words, command="ucp-load"):
        """The things that are named, one for each line after the first."""
        before = self.left()
        said = self.run_in(command, *words, "--strict", "-q", "--json=report", code=5).stderr
        self.assertIn(f"{command}: error: --strict: nothing is written", said)
        self.assertEqual(json.loads((self.work / "report").read_text())["error"]["name"], "mismatch")
        self.assertEqual(self.left(), before)
        return [line.strip() for line in said.splitlines()[1:]]

    def test_each_thing_is_named_and_nothing_written(self):
        told = self.report_of("ucp-load", "ckpt", "free", "--format", "safetensors")["not_carried"]
        self.assertGreater(len(told), 1)
        self.assertEqual(self.refused("ckpt", "out", "--format", "safetensors"), told)
        self.assertEqual(self.refused("ckpt", "out", "--format", "safetensors", "--dry-run"), told)
        self.assertEqual(self.refused("ckpt", "free", "--format", "safetensors", "--force"), told)

    def test_what_is_whole_passes(self):
        for out, words in (("copy", ()), ("other", ("--target", "zero=3,dp=3"))):
            self.assertEqual(self.report_of("ucp-load", "ckpt", out, "--strict", *words)["not_carried"], [])
        self.run_in("ucp-union", "ckpt", "atoms", "--strict")
        self.run_in("ucp-load", "--check", "other", "atoms")

    def test_files_of_ranks_that_are_no_more(self):
        for rank in range(2):
            (self.work / "ckpt" / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank)
        self.assertEqual(self.refused("ckpt", "out", "--target", "dp=1"),
                         ["files of ranks that the target does not have: rng_state_1.pth"])
        self.run_in("ucp-load", "ckpt", "out", "--target", "dp=1", "--strict", "--siblings", "none")
        (self.work / "ckpt" / "model.safetensors").write_bytes(b"of somebody else")
        named = self.refused("ckpt", "hub", "--format", "safetensors")
        self.assertIn("sibling file: model.safetensors: readers would mistake it for a part of the output", named)

    def test_it_means_nothing_with_check(self):
        said = self.run_in("ucp-load", "--check", "ckpt", "ckpt", "--strict", code=2).stderr
        self.assertIn("--strict cannot be combined with --check", said)


if __name__ == "__main__":
    main("strict_test.py BIN")
