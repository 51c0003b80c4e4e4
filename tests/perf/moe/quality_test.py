#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distance from the optimum of strategy best, against searches that share no code with it (reference.cc).

    tests/perf/moe/quality_test.py BIN MOE_REFERENCE [--all] [--trace FILE] [unittest arguments]

Without --all: small problems against full enumeration, published problems and clusters with many slots, with the
default effort, which is a number of steps, so that the results are the same on every machine. With --all: 500 small
problems, a recording of a real training run against simulated annealing of 2 seconds a layer, searches with --effort
2s, and times; some minutes on an idle machine.
"""
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[3]
ROUNDING = 1 + 1e-9


class Given:
    bin = pathlib.Path()
    reference = ""
    everything = False
    trace = SOURCE.parent / "shared/fixtures/routing/gpt_moe_24x32.jsonl"


def skewed(dice, experts, shape):
    """Token counts of a layer: gamma distributed, the more skewed the smaller the shape."""
    weights = [dice.gammavariate(shape, 1) + 0.001 for _ in range(experts)]
    return [int(100_000 * weight / sum(weights)) for weight in weights]


class Quality(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def best(self, layers, nodes, gpus, slots, *words):
        """The balance of each layer of the strategy's plan, worked out here from the slots that it wrote, and the
        processor seconds of the whole command."""
        (self.work / "loads.json").write_text(json.dumps(layers))
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [Given.bin / "moe-replace", "loads.json", "--nodes", str(nodes), "--gpus", str(gpus), "--slots", str(slots),
             "-o", "plan.json", "--force", "--json", *words], cwd=self.work, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        plan = json.loads(done.stdout)["result"]["plan"]
        found = []
        for layer, tokens, metrics in zip(json.loads((self.work / "plan.json").read_text())["layers"], layers,
                                          plan["metrics"]["layers"]):
            held = [expert for gpu in layer["devices"] for expert in gpu]
            copies = [held.count(expert) for expert in range(len(tokens))]
            for gpu in layer["devices"]:
                self.assertEqual(len(set(gpu)), slots, "an expert twice, or an empty slot")
            self.assertEqual(set(held), set(range(len(tokens))))
            loads = [sum(tokens[expert] / copies[expert] for expert in gpu) for gpu in layer["devices"]]
            found.append(max(loads) / (sum(tokens) / len(loads)) if sum(tokens) else 1)
            self.assertAlmostEqual(found[-1], metrics["imbalance"], delta=1e-9)
        return found, seconds

    def reference(self, layers, gpus, slots, *mode):
        problem = [len(layers), len(layers[0]), gpus, slots, *(tokens for layer in layers for tokens in layer)]
        done = subprocess.run([Given.reference, *mode], input=" ".join(map(str, problem)), capture_output=True,
                              text=True, check=True)
        return [float(line) for line in done.stdout.split()]

    def test_small_problems(self):
        dice = random.Random(11)
        shapes = [(2, 2, 3), (2, 2, 4), (3, 2, 4), (3, 2, 5), (3, 2, 6), (4, 2, 6), (4, 2, 8), (2, 3, 5), (3, 3, 7),
                  (4, 3, 8)]
        problems = optimal = 0
        for gpus, slots, experts in shapes:
            layers = [skewed(dice, experts, (0.2, 0.5, 1, 4)[i % 4]) for i in range(50 if Given.everything else 8)]
            found, _ = self.best(layers, 1, gpus, slots)
            for tokens, mine, least in zip(layers, found, self.reference(layers, gpus, slots, "enumerate")):
                self.assertGreaterEqual(mine * ROUNDING, least)
                self.assertLessEqual(mine, least * 1.01, f"{tokens} on {gpus} GPUs of {slots} slots")
                problems += 1
                optimal += mine <= least * ROUNDING
        self.assertGreaterEqual(optimal, 0.99 * problems)

    def test_published_problems(self):
        for tokens, gpus, possible in (([10, 4, 1, 1], 3, 1.03125),
                                       ([600, 560, 120, 120, 20, 10, 10, 10], 8, 1.0850575)):
            (found,), _ = self.best([tokens], 1, gpus, 2)
            self.assertLessEqual(found, possible * (1.01 if Given.everything else 1.03))

    def test_more_effort_leaves_a_plan_that_is_stuck(self):
        # The last layer's search finds a plan soon that it cannot better step by step.
        dice = random.Random(15)
        layers = [skewed(dice, 32, 3) for _ in range(6)]
        few, _ = self.best(layers, 4, 8, 2)
        more, _ = self.best(layers, 4, 8, 2, "--effort", "40")
        self.assertLess(more[5], few[5])
        for one, other in zip(more, few):
            self.assertLessEqual(one, other * ROUNDING)

    def test_few_slots_for_hot_experts(self):
        if not Given.everything:
            self.skipTest("takes minutes: --all")
        dice = random.Random(12)
        layers = [skewed(dice, 8, 1) for _ in range(32)]
        least = self.reference(layers, 8, 2, "anneal", "1")
        for words, slack in (((), 1.03), (("--effort", "2s"), 1.01)):
            found, _ = self.best(layers, 1, 8, 2, *words)
            for mine, theirs in zip(found, least):
                self.assertLessEqual(mine, theirs * slack)

    def test_many_slots(self):
        dice = random.Random(13)
        for layers, experts, nodes, gpus, slots, most in ((58, 256, 4, 8, 9, 1.0005), (94, 128, 4, 8, 5, 1.003),
                                                          (60, 384, 8, 8, 7, 1.001)):
            count = layers if Given.everything else 6
            found, _ = self.best([skewed(dice, experts, 0.8) for _ in range(count)], nodes, gpus, slots)
            self.assertLessEqual(statistics.mean(found), most, f"{experts} experts")

    def test_a_real_recording(self):
        if not Given.everything:
            self.skipTest("takes minutes: --all")
        if not Given.trace.exists():
            self.skipTest(f"{Given.trace} is missing")
        records = [json.loads(line)["tokens"] for line in Given.trace.read_text().splitlines()]
        for nodes, gpus, slots in ((4, 8, 2), (2, 8, 3), (1, 8, 5)):
            mine, theirs = [], []
            for layers in records[::5]:
                found, _ = self.best(layers, nodes, gpus, slots, "--effort", "2s")
                mine += found
                theirs += self.reference(layers, nodes * gpus, slots, "anneal", "2")
            print(f"{nodes} x {gpus} x {slots}: mean {statistics.mean(mine):.4f} against {statistics.mean(theirs):.4f}, "
                  f"worst layer {max(a / b for a, b in zip(mine, theirs)):.4f} times its search", file=sys.stderr)
            self.assertLessEqual(statistics.mean(mine), statistics.mean(theirs) * 1.005)
            self.assertLessEqual(max(a / b for a, b in zip(mine, theirs)), 1.02)

    def test_times(self):
        if not Given.everything:
            self.skipTest("depends on the machine: --all")
        dice = random.Random(14)
        # Of two processors: twice the time that a command may take.
        for layers, experts, nodes, gpus, slots, most in ((24, 32, 4, 8, 2, 2), (58, 256, 4, 8, 9, 0.5),
                                                          (60, 512, 1024, 8, 1, 4), (60, 512, 64, 8, 16, 4)):
            loads = [skewed(dice, experts, 0.8) for _ in range(layers)]
            seconds = min(self.best(loads, nodes, gpus, slots)[1] for _ in range(3))
            print(f"{layers} x {experts} on {nodes} x {gpus} x {slots}: {seconds:.2f} s of a processor", file=sys.stderr)
            self.assertLessEqual(seconds, most)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    Given.bin = pathlib.Path(sys.argv.pop(1)).resolve()
    Given.reference = str(pathlib.Path(sys.argv.pop(1)).resolve())
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        Given.everything = True
    if "--trace" in sys.argv:
        at = sys.argv.index("--trace")
        Given.trace = pathlib.Path(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    unittest.main()


if __name__ == "__main__":
    main()
