#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace simulate-failures --step-time: samples trained, in the table and in the report.

Usage: throughput_test.py BIN MPIRUN
"""

import json
import re

from command import CLUSTER, NODES, STRATEGIES, Case, main

CLUSTER_FILE = {"nodes": 4, "gpus": 2, "slots": 8, "expert_bytes": "100MB",
                "bandwidth": {"gpu": "1GB/s", "node": "1GB/s"}}
NAMED = "".join(f"0,add,node{n}\n" for n in range(4))


class Throughput(Case):
    def simulated(self, *words):
        """The runs by strategy."""
        self.write("cluster.json", CLUSTER_FILE)
        result = self.result("simulate-failures", "loads.jsonl", "nodes.csv", "--cluster", "cluster.json", *words)
        return {run["strategy"]: run for run in result["throughput"]}

    def test_two_nodes_fail_by_hand(self):
        # 100 s with 8 GPUs and 100 s with 6. A step takes 2 s, a checkpoint every 10 steps 5 s.
        self.write("nodes.csv", NAMED + "100000,remove,node3\n200000,remove,node2\n")
        runs = self.simulated("--strategy", "vanilla", "--step-time", "2", "--samples-per-gpu", "4", "--ep", "2",
                              "--detection-time", "10", "--rebalance-time", "20", "--restart-time", "30", "--restore-time",
                              "40", "--checkpoint-time", "5", "--checkpoint-every", "10", "--ds-checkpoint-every", "40")
        self.assertEqual(list(runs), ["vanilla", "ds-ft", "ds"])
        # ds-ft: four cycles of 20 + 5 s; then pauses of 30 s and no copy, 20, 5, 20, 5, 20 s.
        survivors = runs["ds-ft"]
        self.assertAlmostEqual(survivors["samples"], 40 * 32 + 30 * 24)
        self.assertAlmostEqual(survivors["seconds"]["migration"], 0)
        self.assertEqual((survivors["checkpoints"], survivors["restores"]), (6, 0))
        # ds: 80 + 5 + 15 s, of which a restart discards the last 15; then 10 + 30 + 40 s of pause and 20 s.
        ds = runs["ds"]
        self.assertAlmostEqual(ds["samples"], 40 * 32 + 10 * 24)
        self.assertAlmostEqual(ds["samples_lost"], 7.5 * 32)
        self.assertAlmostEqual(ds["seconds"]["recompute"], 15)
        self.assertAlmostEqual(ds["seconds"]["restart"], 30)
        self.assertAlmostEqual(ds["ratio"], 1)
        self.assertAlmostEqual(survivors["ratio"], survivors["samples"] / ds["samples"])
        self.assertEqual([span["activity"] for span in ds["timeline"]],
                         ["train", "detection", "restart", "restore", "train"])
        self.assertEqual([span["gpus"] for span in ds["timeline"]], [8, 0, 0, 0, 6])

    def test_parts_add_up(self):
        self.write("nodes.csv", NAMED + "300000,remove,node3\n700000,remove,node0\n900000,add,node3\n1500000,remove,node3\n")
        runs = self.simulated("--compare", "--faults", "1", "--step-time", "0.5", "--expert-share", "0.5", "--ep", "4",
                              "--detection-time", "15", "--rebalance-time", "10", "--restart-time", "30",
                              "--checkpoint-every", "100", "--checkpoint-time", "3")
        self.assertEqual(tuple(runs), (*STRATEGIES, "ds-ft", "ds"))
        for name, run in runs.items():
            with self.subTest(name):
                seconds = dict(run["seconds"])
                self.assertAlmostEqual(seconds.pop("total"), 1500)
                self.assertAlmostEqual(sum(seconds.values()), 1500)
                self.assertAlmostEqual(sum(span["samples"] for span in run["timeline"]), run["samples"] + run["samples_lost"])
                ends = [span["end_seconds"] for span in run["timeline"]]
                self.assertEqual([span["begin_seconds"] for span in run["timeline"]], [0, *ends[:-1]])
        self.assertGreater(runs["lazarus"]["ratio"], 1)
        self.assertGreater(runs["lazarus"]["seconds"]["migration"], 0)
        self.assertEqual(runs["lazarus"]["restores"], 0)
        self.assertGreater(runs["compact"]["restores"], 0)

    def test_the_table(self):
        self.write("nodes.csv", NODES + "600000,remove,n1\n1200000,remove,n2\n")
        words = ["--strategy", "lazarus", "--faults", "1"]
        self.assertNotIn("SAMPLES", self.simulate(*words).stdout)
        self.assertNotIn("throughput", self.result("simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, *words))
        done = self.simulate(*words, "--step-time", "1", "--ep", "4")
        self.assertEqual(re.findall(r"^(lazarus|ds-ft|ds) +\d+ +\d+\.\d\d +(\d+\.\d\d) ", done.stdout, re.M)[-1], ("ds", "1.00"))
        self.assertIn("copies of experts count as 0 s", done.stderr)
        self.assertLessEqual(max(map(len, done.stdout.splitlines())), 100)
        # Without the baseline there is no ratio.
        alone = self.simulate(*words, "--step-time", "1")
        self.assertRegex(alone.stdout, r"(?m)^lazarus +8400 +7\.00 +- +100 % ")

    def test_the_same_input_gives_the_same_numbers(self):
        self.write("nodes.csv", NODES + "600000,remove,n1\n1200000,remove,n2\n")
        words = ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--compare", "--step-time", "0.7", "--ep", "4"]
        first, second = (json.dumps(self.result(*words, "--threads", threads)["throughput"]) for threads in ("1", "2"))
        self.assertEqual(first, second)

    def test_wrong_flags_are_named(self):
        self.write("nodes.csv", NODES)
        for part, words in (
                ("--ep requires --step-time", ["--ep", "2"]),
                ("--restart-time requires --step-time", ["--restart-time", "2"]),
                ("--ds-checkpoint-every requires --ep", ["--step-time", "1", "--ds-checkpoint-every", "2"]),
                ('--step-time: "-1" is not a number from', ["--step-time", "-1"]),
                ('--step-time: "0" is not a number from', ["--step-time", "0"]),
                ('--detection-time: "-3" is not a number from 0', ["--step-time", "1", "--detection-time", "-3"]),
                ('--expert-share: "2" is not a number from 0 to 1', ["--step-time", "1", "--expert-share", "2"]),
                ("--ep 64: the cluster has only 8 gpus", ["--step-time", "1", "--ep", "64"]),
                ("--ep 3 does not divide the 16 experts", ["--step-time", "1", "--ep", "3"]),
                ("--ep 2: 8 experts of a gpu do not fit in its 4 slots", ["--step-time", "1", "--ep", "2"])):
            with self.subTest(part):
                self.refused(2, part, "simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, *words)

    def test_wrong_events_are_named(self):
        for text, part in (("-5,add,a\n", '"-5" is not a number of milliseconds'),
                           (NODES + "9,add,n1\n", 'nodes.csv:5: node "n1" exists already and cannot be added')):
            self.write("nodes.csv", text)
            self.refused(4, part, "simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--step-time", "1")


if __name__ == "__main__":
    main(__name__)
