#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: windows of the recordings, and limits on the moves of a plan.

Usage: windows_test.py BIN MPIRUN
"""

import json
import random

from command import CLUSTER, EXPERTS, LAYERS, Case, jsonl, main, npy, trace

SLOTS = 4  # of each of the cluster's eight GPUs


def vllm(records, first=0):
    """A recording of vLLM with physical experts that equal the logical ones."""
    maps = [list(range(len(records[0][0])))] * len(records[0])
    return "".join(json.dumps({"record_type": "eplb_load_stats", "version": 1, "step": first + step, "num_ranks": 1,
                               "expert_load": load, "p2l_map": maps}) + "\n" for step, load in enumerate(records))


def added(records, weights):
    """Counts times their weights, added up: [layer][expert]."""
    return [[sum(w * record[layer][e] for w, record in zip(weights, records)) for e in range(len(records[0][layer]))]
            for layer in range(len(records[0]))]


def imbalances(plan, tokens):
    """By layer: load of the busiest GPU over the mean. A plan in our own form."""
    found = []
    for layer, counts in zip(plan["layers"], tokens):
        held = [[e for e in gpu if e >= 0] for gpu in layer["devices"]]
        replicas = [sum(gpu.count(e) for gpu in held) for e in range(len(counts))]
        loads = [sum(counts[e] / replicas[e] for e in gpu) for gpu in held]
        found.append(max(loads) / (sum(counts) / len(held)))
    return found


class Windows(Case):
    def setUp(self):
        super().setUp()
        dice = random.Random(5)
        # Few tokens in each step, so that means would lose most of them.
        self.steps = [[[dice.randrange(3) if dice.random() < 0.3 + e / 40 else 0 for e in range(EXPERTS)]
                       for _ in range(LAYERS)] for _ in range(60)]
        self.write("steps.jsonl", jsonl(self.steps))
        self.write("vllm.jsonl", vllm(self.steps))
        self.write("other.jsonl", jsonl(trace(seed=9)))

    def check(self, tokens, *words):
        """The printed balance is that of an independent computation. `tokens`: of every window."""
        plan = self.result(*words, *CLUSTER, "-o", "p.json", "--force", "--effort", "1")["plan"]
        by_window = [imbalances(self.read("p.json"), window) for window in tokens]
        for layer, metrics in enumerate(plan["metrics"]["layers"]):
            worst = max(window[layer] for window in by_window)
            self.assertAlmostEqual(metrics["imbalance"], worst, delta=1e-9 * worst)
            self.assertGreaterEqual(metrics["imbalance"], metrics["bound"] * (1 - 1e-9))
        mean = sum(max(window[layer] for window in by_window) for layer in range(LAYERS)) / LAYERS
        self.assertAlmostEqual(plan["metrics"]["imbalance_mean"], mean, delta=1e-9 * mean)
        return plan

    def test_balance_is_that_of_the_recording(self):
        ones = [1] * 60
        for words, tokens in (
                (["steps.jsonl"], self.steps[-1:]), (["vllm.jsonl"], [added(self.steps, ones)]),
                (["steps.jsonl", "--window", "10"], [added(self.steps[-10:], ones)]),
                (["steps.jsonl", "--window", "all"], [added(self.steps, ones)]),
                (["steps.jsonl", "--window", "10", "--at", "2000"], [added(self.steps[11:21], ones)]),
                (["steps.jsonl", "--window", "all", "--half-life", "7.5"],
                 [added(self.steps, [2 ** (-(59 - step) / 7.5) for step in range(60)])]),
                (["steps.jsonl", "--window", "3,20,all"],
                 [added(self.steps[-3:], ones), added(self.steps[-20:], ones), added(self.steps, ones)]),
                (["vllm.jsonl", "--window", "2,all", "--half-life", "30"],
                 [added(self.steps[-2:], [2 ** (-1 / 30), 1]),
                  added(self.steps, [2 ** (-(59 - step) / 30) for step in range(60)])]),
                (["steps.jsonl", "--join", "other.jsonl=0.01"],
                 [added([self.steps[-1], trace(seed=9)[-1]], [1, 0.01])])):
            with self.subTest(" ".join(words)):
                self.check(tokens, *words)

    def test_sums_are_not_rounded(self):
        lines = [[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0],
                 [0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
        self.write("few.jsonl", "".join(json.dumps({"iteration": i + 1, "tokens": [line]}) + "\n"
                                        for i, line in enumerate(lines)))
        self.run_in("few.jsonl", "--nodes", "1", "--gpus", "2", "--slots", "2", "--window", "10", "-o", "p.json")
        self.assertEqual(self.read("p.json")["layers"][0]["loads"], [4, 6, 10, 0])

    def test_several_windows_are_balanced_together(self):
        """The worst of two windows that disagree is better than with a plan for either of them."""
        early, late = trace(seed=1)[0], [layer[::-1] for layer in trace(seed=2)[0]]
        self.write("turn.jsonl", jsonl([early, early, early, late]))
        both = [late, added([early, early, early, late], [1] * 4)]
        self.check(both, "turn.jsonl", "--window", "1,all")
        together = max(max(imbalances(self.read("p.json"), window)) for window in both)
        for window in ("1", "all"):
            self.run_in("turn.jsonl", *CLUSTER, "--window", window, "-o", "q.json", "--force")
            self.assertLess(together, max(max(imbalances(self.read("q.json"), one)) for one in both))

    def test_the_default_for_serving_engines_is_said(self):
        self.assertIn("sum of 60 iterations up to 59\n          the whole recording, as is the default for this "
                      "format", self.run_in("vllm.jsonl", *CLUSTER).stdout)
        self.assertNotIn("the whole recording", self.run_in("vllm.jsonl", *CLUSTER, "--window", "1").stdout)
        self.assertIn("iteration 5900\n", self.run_in("steps.jsonl", *CLUSTER).stdout)

    def test_a_joined_recording_has_its_own_default(self):
        (self.work / "steps.npy").write_bytes(npy(self.steps[:3]))
        done = self.run_in("steps.jsonl", *CLUSTER, "--join", "steps.npy", "-o", "p.json")
        self.assertIn("steps.npy: the whole recording is added, as is the default for this format", done.stderr)
        self.assertEqual([layer["loads"] for layer in self.read("p.json")["layers"]],
                         added([self.steps[-1], *self.steps[:3]], [1] * 4))
        done = self.run_in("steps.npy", *CLUSTER, "--join", "steps.jsonl", "-o", "p.json", "--force")
        self.assertIn("steps.jsonl: the newest iteration is added, as is the default for this format", done.stderr)
        self.refused(2, "steps.npy: window of 4 iterations, but there are 3", "steps.jsonl", *CLUSTER, "--join", "steps.npy",
                     "--window", "4", "-o", "p")

    def test_wrong_windows(self):
        for part, words in (("such as 10 or 1,100,all", ["--window", "0"]), ("such as 10 or 1,100,all", ["--window", "1,x"]),
                            ('found "x"', ["--join", "other.jsonl=x"]), ('found "-1"', ["--join", "other.jsonl=-1"]),
                            ('found "nan"', ["--join", "other.jsonl=nan"]), ('found "0"', ["--join", "other.jsonl=0"])):
            self.refused(2, part, "steps.jsonl", *CLUSTER, *words, "-o", "p")
        self.write("small.jsonl", jsonl(trace(experts=8)))
        self.refused(4, "6 layers of 8 experts", "steps.jsonl", *CLUSTER, "--join", "small.jsonl", "-o", "p")
        self.refused(3, "gone.jsonl", "steps.jsonl", *CLUSTER, "--join", "gone.jsonl=2", "-o", "p")


class Idle(Case):
    def test_an_idle_last_step_is_left_out(self):
        steps = [[[9, 1, 5, 2]], [[0, 0, 0, 0]]]
        self.write("stats.jsonl", vllm(steps, first=1))
        for words in ([], ["--window", "1"]):
            done = self.run_in("stats.jsonl", "--nodes", "1", "--gpus", "4", "--slots", "2", *words, "-o", "p.json", "--force")
            self.assertIn("1 of 2 records have no tokens and are ignored: iteration 2", done.stderr)
            self.assertEqual(self.read("p.json")["layers"][0]["loads"], [9, 1, 5, 2])
        result = self.result("stats.jsonl", "--nodes", "1", "--gpus", "4", "--slots", "2")
        self.assertEqual((result["idle_records"], result["iteration"]), (1, 1))

    def test_dense_layers_fill_every_format(self):
        counts = [[0] * 8, [5, 3, 9, 1, 2, 2, 4, 6]]
        self.write("dense.json", {"logical_count": counts})
        base = ["dense.json", "--nodes", "2", "--gpus", "2", "--slots", "4"]
        for strategy in ("best", "lazarus", "eplb", "eplb+", "spread", "compact"):
            for form in ("sglang", "vllm", "tensorrt-llm"):
                self.run_in(*base, "--strategy", strategy, "--format", form, "-o", "p", "--force")
                rows = [layer["replicas"] for layer in
                        self.result("evaluate", "p", *base)["plan"]["metrics"]["layers"]]
                self.assertEqual(rows, [16, 16], (strategy, form))
        self.run_in(*base, "--format", "vllm-ascend", "-o", "p", "--force")
        done = self.run_in(*base)
        self.assertIn("layers without tokens: 0;", done.stderr)
        result = self.result(*base)
        self.assertEqual(result["layers_without_tokens"], [0])
        metrics = result["plan"]["metrics"]
        # A layer without tokens does not make the mean look better.
        self.assertEqual(metrics["imbalance_mean"], metrics["layers"][1]["imbalance"])


class Moves(Case):
    def setUp(self):
        super().setUp()
        self.write("old.jsonl", jsonl(trace(seed=3)))
        self.run_in("old.jsonl", *CLUSTER, "-o", "old.json")
        self.free = self.replan()
        self.curve = self.free["moves_curve"]

    def replan(self, *words):
        return self.result("loads.jsonl", *CLUSTER, "--old", "old.json", *words)["plan"]

    def test_the_curve_is_a_choice(self):
        moves = [point["moves"] for point in self.curve]
        balance = [point["imbalance_mean"] for point in self.curve]
        self.assertEqual(moves, sorted(set(moves)))
        self.assertEqual(balance, sorted(balance, reverse=True))
        self.assertEqual(moves[0], 0)
        self.assertGreater(len(moves), 4)
        self.assertLess(balance[-1], balance[0])
        stays = self.result("evaluate", "old.json", "loads.jsonl", *CLUSTER)["plan"]["metrics"]
        self.assertAlmostEqual(balance[0], stays["imbalance_mean"], delta=1e-9)
        self.assertEqual(self.curve[-1]["bytes"], moves[-1] * 14_000_000)
        self.assertIn("trade     balance ", self.run_in("loads.jsonl", *CLUSTER, "--old", "old.json").stdout)

    def test_a_plan_is_as_even_with_an_old_plan_as_without(self):
        fresh = self.result("loads.jsonl", *CLUSTER)["plan"]["metrics"]["imbalance_mean"]
        self.assertLess(self.free["metrics"]["imbalance_mean"], fresh * 1.02)

    def test_moves_stay_within_their_limit(self):
        most = self.curve[-1]["moves"]
        last = self.curve[0]["imbalance_mean"]
        for limit in (1, most // 8, most // 3, most):
            plan = self.replan("--max-moves", limit)
            self.assertLessEqual(plan["migration"]["transfers"], limit)
            self.assertLessEqual(plan["metrics"]["imbalance_mean"], last + 1e-12)
            last = plan["metrics"]["imbalance_mean"]
            for point in self.curve:  # as good as every point of the curve that it can afford
                if point["moves"] <= limit:
                    self.assertLessEqual(last, point["imbalance_mean"] + 1e-9)
        self.assertLessEqual(self.replan("--max-moves", "100MB")["migration"]["bytes"], 100_000_000)
        slots = LAYERS * 8 * SLOTS
        self.assertLessEqual(self.replan("--max-moves", "5%")["migration"]["transfers"], slots * 0.05)

    def test_a_target_takes_fewer_moves_than_the_best_plan(self):
        ends = [self.curve[0], self.curve[-1]]
        target = sum(end["imbalance_max"] for end in ends) / 2
        plan = self.replan("--target-balance", target)
        self.assertLessEqual(plan["metrics"]["imbalance_max"], target)
        self.assertLess(plan["migration"]["transfers"], self.curve[-1]["moves"])
        done = self.run_in("loads.jsonl", *CLUSTER, "--old", "old.json", "--target-balance", "1", "-o", "p.json")
        self.assertIn("the target balance was not reached in layers 0-5: the worst balance is 1.", done.stderr)

    def test_wrong_limits(self):
        base = ["loads.jsonl", *CLUSTER, "--old", "old.json"]
        for words, part in ((["--max-moves", "0"], "a number of replicas above 0"), (["--max-moves", "-3"], "above 0"),
                            (["--max-moves", "0%"], "above 0"), (["--max-moves", "101%"], "above 0"),
                            (["--max-moves", "many"], "above 0"), (["--max-moves", "1KB"], "is less than one expert"),
                            (["--max-moves", "0.01%"], "is less than one replica"), (["--target-balance", "0.9"], "0.9"),
                            (["--max-moves", "3", "--target-balance", "2"], "cannot be combined"),
                            (["--max-moves", "3", "--strategy", "eplb"], "--strategy eplb")):
            with self.subTest(" ".join(words)):
                self.refused(2, part, *base, *words, "-o", "p")
        self.refused(2, "--max-moves requires --old", "loads.jsonl", *CLUSTER, "--max-moves", "3")
        self.refused(2, "requires the size of an expert", "loads.jsonl", *CLUSTER[:-2], "--old", "old.json", "--max-moves", "1GB")
        self.write("c.json", {"nodes": [{"name": f"node{n}", "alive": n != 1} for n in range(4)], "gpus": 2, "slots": 4})
        self.refused(10, "raise --max-moves", "loads.jsonl", "--cluster", "c.json", "--old", "old.json", "--max-moves", "1")


if __name__ == "__main__":
    main(__name__)
