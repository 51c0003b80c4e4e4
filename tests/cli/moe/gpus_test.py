#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: clusters in which one GPU is dead, leaving or joining.

Usage: gpus_test.py BIN MPIRUN
"""

import random

from command import Case, main

LAYERS, EXPERTS, SLOTS = 3, 32, 10


def cluster(gpu):
    """Four nodes of four GPUs; GPU 2 of node1 is the argument."""
    gpus = [SLOTS, SLOTS, gpu, SLOTS]
    return {"nodes": [{"name": "node0"}, {"name": "node1", "gpus": gpus}, {"name": "node2"}, {"name": "node3"}],
            "gpus": 4, "slots": SLOTS, "expert_bytes": "42MiB"}


RANK = 6  # of that GPU
DEAD, LEAVING, WHOLE = {"slots": SLOTS, "alive": False}, 0, SLOTS


class Gpus(Case):
    def setUp(self):
        super().setUp()
        dice = random.Random(7)
        self.tokens = [[int(1000 * dice.random() ** 3) + 1 for _ in range(EXPERTS)] for _ in range(LAYERS)]
        self.write("loads.json", self.tokens)
        for name, gpu in (("dead", DEAD), ("leaving", LEAVING), ("whole", WHOLE)):
            self.write(f"{name}.json", cluster(gpu))
        self.run_in("loads.json", "--cluster", "whole.json", "-o", "old.json")

    def test_balance_counts_live_capacity(self):
        for name in ("dead", "leaving"):
            plan = self.result("loads.json", "--cluster", f"{name}.json", "-o", "p.json", "--force")["plan"]
            self.assertLess(plan["metrics"]["imbalance_max"], 1.01)
            for layer, metrics, tokens in zip(self.read("p.json")["layers"], plan["metrics"]["layers"], self.tokens):
                self.assertAlmostEqual(metrics["mean_load"], sum(tokens) / 15)
                self.assertEqual(set(layer["devices"][RANK]), set())
                loads = [sum(tokens[e] / layer["replicas"][e] for e in gpu) for gpu in layer["devices"]]
                self.assertAlmostEqual(metrics["imbalance"], max(loads) / (sum(tokens) / 15), delta=1e-9)
        self.assertIn(", 1 gpu dead\n", self.run_in("loads.json", "--cluster", "dead.json").stdout)

    def test_sglang_keeps_the_ranks(self):
        for name in ("dead", "leaving"):
            done = self.run_in("loads.json", "--cluster", f"{name}.json", "-o", "p.json", "--force", "--format", "sglang")
            self.assertIn('node "node1" gpu 2 holds no experts: its slots name expert 0', done.stderr)
            for row in self.read("p.json")["physical_to_logical_map"]:
                self.assertEqual(len(row), 16 * SLOTS)
                self.assertEqual(row[RANK * SLOTS:(RANK + 1) * SLOTS], [0] * SLOTS)
            wanted = self.result("loads.json", "--cluster", f"{name}.json")["plan"]["metrics"]
            found = self.result("evaluate", "p.json", "loads.json", "--cluster", f"{name}.json")["plan"]["metrics"]
            self.assertEqual(found, {**wanted, "bound_mean": found["bound_mean"], "layers": found["layers"]})
            for form in ("vllm", "eplb", "tensorrt-llm", "vllm-ascend"):
                self.refused(9, 'node "node1" gpu 2 holds no experts: only --format sglang and plan', "loads.json",
                             "--cluster", f"{name}.json", "-o", "q", "--format", form)

    def test_experts_of_a_dead_gpu_are_not_read(self):
        for strategy in ("best", "eplb+"):
            self.run_in("loads.json", "--cluster", "dead.json", "--strategy", strategy, "--old", "old.json", "-o", "p.json",
                        "--force")
            transfers = self.read("p.json")["migration"]["transfers"]
            self.assertGreater(len(transfers), 0)
            self.assertFalse([move for move in transfers if RANK in move[2:4]])

    def test_a_gpu_joins_again(self):
        self.run_in("loads.json", "--cluster", "dead.json", "-o", "short.json")
        plan = self.result("loads.json", "--cluster", "whole.json", "--old", "short.json", "-o", "p.json")["plan"]
        self.assertLess(plan["metrics"]["imbalance_max"], 1.03)
        self.assertGreaterEqual(plan["migration"]["transfers"], SLOTS * LAYERS)
        for layer in self.read("p.json")["layers"]:
            self.assertEqual(len(set(layer["devices"][RANK])), SLOTS)

    def test_a_slow_gpu_gets_fewer_tokens(self):
        description = cluster({"slots": SLOTS, "speed": 0.5})
        description["nodes"][3]["speed"] = 0.8
        self.write("slow.json", description)
        speeds = [0.8 if d >= 12 else 0.5 if d == RANK else 1 for d in range(16)]
        done = self.run_in("loads.json", "--cluster", "slow.json", "-o", "p.json")
        self.assertIn(", speeds 0.50 to 1.00\n", done.stdout)
        result = self.result("loads.json", "--cluster", "slow.json", "--old", "p.json", "-o", "q.json")
        self.assertEqual(result["gpu_speeds"], speeds)
        metrics = result["plan"]["metrics"]
        self.assertLess(metrics["imbalance_max"], 1.02)
        for layer, one, tokens in zip(self.read("q.json")["layers"], metrics["layers"], self.tokens):
            seconds = [sum(tokens[e] / layer["replicas"][e] for e in gpu) / speed
                       for gpu, speed in zip(layer["devices"], speeds)]
            self.assertAlmostEqual(one["imbalance"], max(seconds) / (sum(tokens) / sum(speeds)), delta=1e-9)
        # The plan keeps the speeds, and another program's format needs none.
        self.assertEqual(self.result("evaluate", "q.json", "loads.json")["plan"]["metrics"], metrics)
        self.run_in("loads.json", "--cluster", "slow.json", "-o", "v.json", "--format", "vllm")
        page = self.run_in("loads.json", "--cluster", "slow.json", "--html", "r.html")
        self.assertEqual(page.returncode, 0)

    def test_wrong_gpus(self):
        for speed, found in ((0, "0"), (-1, "-1"), (101, "101"), ("fast", "a text")):
            self.write("c.json", cluster({"slots": 3, "speed": speed}))
            self.refused(4, f"node1\": gpu 2: speed: a number from 0.01 to 100 expected, found {found}", "loads.json",
                         "--cluster", "c.json", "-o", "p")
        self.write("c.json", cluster({"slots": 3, "alive": "no"}))
        self.refused(4, "alive: true or false expected, found a text", "loads.json", "--cluster", "c.json", "-o", "p")
        self.write("c.json", cluster({"slots": 3, "dead": True}))
        self.refused(4, 'unknown member "dead"', "loads.json", "--cluster", "c.json", "-o", "p")


if __name__ == "__main__":
    main(__name__)
