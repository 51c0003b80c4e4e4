#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace under mpirun: the same plans and answers, byte for byte, for every number of ranks.

Usage: ranks_test.py BIN MPIRUN
"""

import json

from command import CLUSTER, NODES, STRATEGIES, Case, main, timeless, trace


class Ranks(Case):
    def test_every_number_of_ranks_gives_the_same_bytes(self):
        self.plan("--strategy", "eplb", "--at", "0", "-o", "old.json")
        for strategy in STRATEGIES:
            made, told = set(), []
            for ranks in (1, 2, 3):
                words = ["--strategy", strategy, "--old", "old.json", "-o", "p.json", "--force", "--json"]
                done = self.plan(*words, ranks=ranks)
                made.add((self.work / "p.json").read_bytes())
                told.append(timeless(json.loads(done.stdout)["result"]))
            self.assertEqual(len(made), 1, strategy)
            self.assertEqual(told[1:], told[:1] * 2, strategy)

    def test_every_number_of_ranks_gives_the_same_answers(self):
        self.write("nodes.csv", NODES + "5000,remove,n2\n6000,add,m\n")
        self.plan("--strategy", "lazarus", "-o", "p.json")
        for words in (["compare", "loads.jsonl", *CLUSTER, "--faults", "1"],
                      ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--compare"],
                      ["evaluate", "p.json", "loads.jsonl"]):
            told = [timeless(self.result(*words, ranks=ranks)) for ranks in (1, 2, 3)]
            self.assertEqual(told[1:], told[:1] * 2)

    def test_layers_with_different_numbers_of_experts(self):
        self.write("mixed.json", [counts[:8 if layer in (1, 2) else 16] for layer, counts in enumerate(trace()[0])])
        made = set()
        for ranks in (1, 2, 3):
            self.run_in("mixed.json", *CLUSTER, "-o", "p.json", "--force", ranks=ranks)
            made.add((self.work / "p.json").read_bytes())
        self.assertEqual(len(made), 1)

    def test_errors_are_told_once(self):
        done = self.plan("--faults", "9", code=10, ranks=3)
        self.assertEqual(done.stderr.count("the largest --faults is 1"), 1)


if __name__ == "__main__":
    main(__name__)
