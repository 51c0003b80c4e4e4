#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""HTML reports of pec-save in a browser: they fit windows of several widths.

Usage: page_test.py BIN
Skipped without Chromium or Chrome.
"""

import json
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "cli" / "pec"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import agent_test  # pylint: disable=wrong-import-position
import browser  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position


class Pages(agent_test.Agents):
    def whole(self, path):
        self.assertEqual(browser.misfits(browser.probed(self.work, path)), {}, path)

    def test_simulations(self):
        trace = self.work / "trace.jsonl"
        with trace.open("w", encoding="utf-8") as out:
            for i in range(1, 401):
                tokens = [[1 + (e * e + 3 * i + m) % 17 for e in range(64)] for m in range(4)]
                out.write(json.dumps({"iteration": i, "tokens": tokens}) + "\n")
        faults = self.work / "faults.txt"
        faults.write_text("123 1\n237\n310\n", encoding="utf-8")
        words = ["pec-save", "simulate", trace, "--interval", 5, "--faults", faults, "--ranks-per-node", 2]
        page = self.work / "page.html"
        for more in (["--dynamic-k", 0.02, "--gradients"], ["--policy", "full"], ["--policy", "sequential", "--k", 2, "--plt-limit", 1e-6]):
            self.run_tool(*words, *more, "--html", page, "--force")
            self.whole(page)

    def test_sends(self):
        # Stage 1 of two idles in the first and last third of iterations of three seconds.
        agent = self.start("a", "--k", 1, "--pipeline", "2,2,0.5,0.5", "--stages", "1")
        for iteration in (1, 2):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        page = self.work / "sends.html"
        self.run_tool("pec-save", "status", self.address("a"), "--html", page)
        self.whole(page)
        self.assertEqual(self.end(agent), 0)


if __name__ == "__main__":
    if browser.BROWSER is None:
        print("skipped: no Chromium or Chrome here")
        sys.exit(77)
    stores.main()
