#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every format is written the same by any number of ranks.

Usage: ranks_test.py ROWS BIN LAUNCHER
"""

from conformance import Conformance, harness, main


class Ranks(Conformance):
    def test_any_number_of_ranks_writes_the_same(self):
        for name in self.formats:
            wanted = None
            for ranks in (1, 2, 3):
                with self.subTest(format=name, ranks=ranks):
                    out = self.work / f"{name}-{ranks}"
                    words = self.command(self.source_for(name), out, name, "--threads", "1")
                    harness.succeed([self.launcher, "--oversubscribe", "-n", ranks, *words])
                    wanted = wanted or harness.tree(out)
                    self.assertEqual(harness.tree(out), wanted)


if __name__ == "__main__":
    main("ranks_test.py ROWS BIN LAUNCHER")
