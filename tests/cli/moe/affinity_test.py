#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: GPUs exchanged so that tokens stay on them from one layer to the next.

Usage: affinity_test.py BIN MPIRUN
"""

import random

from command import CLUSTER, EXPERTS, LAYERS, Case, main, npy

GPUS_PER_NODE = 2  # of CLUSTER


def transitions(pairs=LAYERS - 1, experts=EXPERTS, seed=5):
    """Each expert sends most of its tokens to one expert of the next layer: [pair][expert][next expert]."""
    dice = random.Random(seed)
    counts = []
    for _ in range(pairs):
        favourite = dice.sample(range(experts), experts)
        counts.append([[dice.randrange(30) + (2000 if j == favourite[i] else 0) for j in range(experts)]
                       for i in range(experts)])
    return counts


def kept(plan, counts):
    """The shares of transitions that stay on their GPU and node, one replica at a time."""
    sums, on_gpu, on_node = 0, 0.0, 0.0
    for layer, after, pair in zip(plan["layers"], plan["layers"][1:], counts):
        for first, here in enumerate(layer["devices"]):
            for second, there in enumerate(after["devices"]):
                tokens = sum(pair[i][j] / layer["replicas"][i] / after["replicas"][j]
                             for i in here if i >= 0 for j in there if j >= 0)
                on_gpu += tokens if first == second else 0
                on_node += tokens if first // GPUS_PER_NODE == second // GPUS_PER_NODE else 0
        sums += sum(map(sum, pair))
    return on_gpu / sums, on_node / sums


class Affinity(Case):
    def setUp(self):
        super().setUp()
        self.counts = transitions()
        self.write("pairs.json", self.counts)

    def check(self, *words):
        """Plans with and without the flag, checks the reported shares, and returns both answers."""
        plain = self.result("loads.jsonl", *CLUSTER, *words, "-o", "plain.json", "--force")["plan"]
        found = self.result("loads.jsonl", *CLUSTER, *words, "--affinity", "pairs.json", "-o", "p.json", "--force")["plan"]
        for name, end in (("plain.json", "_before"), ("p.json", "")):
            on_gpu, on_node = kept(self.read(name), self.counts)
            self.assertAlmostEqual(found["affinity"]["on_gpu_share" + end], on_gpu, delta=1e-9)
            self.assertAlmostEqual(found["affinity"]["on_node_share" + end], on_node, delta=1e-9)
        for before, after in zip(plain["metrics"]["layers"], found["metrics"]["layers"]):
            self.assertAlmostEqual(before["imbalance"], after["imbalance"], delta=1e-12)
        return plain, found

    def test_more_transitions_stay_with_the_same_balance(self):
        plain, found = self.check()
        self.assertNotIn("affinity", plain)
        affinity = found["affinity"]
        self.assertEqual(affinity["transitions"], sum(sum(map(sum, pair)) for pair in self.counts))
        self.assertGreater(affinity["on_node_share"], affinity["on_node_share_before"] + 0.05)
        self.assertGreater(affinity["on_gpu_share"], affinity["on_gpu_share_before"])
        self.assertEqual([(one["layer"], one["next_layer"]) for one in affinity["pairs"]],
                         [(layer, layer + 1) for layer in range(LAYERS - 1)])
        for before, after in zip(self.read("plain.json")["layers"], self.read("p.json")["layers"]):
            self.assertEqual(sorted(map(sorted, before["devices"])), sorted(map(sorted, after["devices"])))
        said = self.plan("--affinity", "pairs.json").stdout
        self.assertRegex(said, r"\naffinity  \S+ % of the transitions between layers stay on their gpu, \S+ % on their node\n"
                               r"          before gpus were exchanged: \S+ % and \S+ %\n")

    def test_nodes_stay_together_where_failures_or_groups_count(self):
        for words in (["--faults", "1"], ["--groups", "4"]):
            _, found = self.check(*words)
            self.assertGreater(found["affinity"]["on_node_share"], found["affinity"]["on_node_share_before"])
            for before, after in zip(self.read("plain.json")["layers"], self.read("p.json")["layers"]):
                self.assertEqual(sorted(map(sorted, before["placement"])), sorted(map(sorted, after["placement"])))
        self.plan("--faults", "1", "--affinity", "pairs.json", "-o", "f.json")
        self.assertGreaterEqual(self.read("f.json")["survives"], 1)

    def test_pinned_experts_stay_on_their_nodes(self):
        _, found = self.check("--pin", "0-3:1")
        self.assertAlmostEqual(found["affinity"]["on_node_share"], found["affinity"]["on_node_share_before"], delta=1e-9)
        self.assertGreater(found["affinity"]["on_gpu_share"], found["affinity"]["on_gpu_share_before"])
        for layer in self.read("p.json")["layers"]:
            for node in (0, 2, 3):
                self.assertFalse(set(layer["placement"][node]) & {0, 1, 2, 3})

    def test_shared_experts_stay_on_every_gpu(self):
        self.check("--everywhere", "2")
        for layer in self.read("p.json")["layers"]:
            self.assertTrue(all(2 in gpu for gpu in layer["devices"]))

    def test_arrays_are_read_like_lists(self):
        self.plan("--affinity", "pairs.json", "-o", "p.json")
        (self.work / "pairs.npy").write_bytes(npy(self.counts))
        self.plan("--affinity", "pairs.npy", "-o", "q.json")
        self.assertEqual(self.read("p.json")["layers"], self.read("q.json")["layers"])

    def test_chosen_layers_use_their_own_transitions(self):
        found = self.result("loads.jsonl", *CLUSTER, "--layers", "1-2,4-5", "--affinity", "pairs.json")["plan"]["affinity"]
        self.assertEqual([(one["layer"], one["next_layer"], one["transitions"]) for one in found["pairs"]],
                         [(1, 2, sum(map(sum, self.counts[1]))), (2, 4, 0), (4, 5, sum(map(sum, self.counts[4])))])
        self.refused(2, "requires two consecutive layers, found 2 layers to plan, none of which follows another",
                     "loads.jsonl", *CLUSTER, "--layers", "0,2", "--affinity", "pairs.json")
        self.refused(2, "requires two consecutive layers, found 1 layer to plan", "loads.jsonl", *CLUSTER, "--layers", "0",
                     "--affinity", "pairs.json")

    def test_other_plans_are_measured_only(self):
        planned = self.result("loads.jsonl", *CLUSTER, "--affinity", "pairs.json", "-o", "p.json")["plan"]["affinity"]
        found = self.result("evaluate", "p.json", "loads.jsonl", "--affinity", "pairs.json")["plan"]["affinity"]
        for key in ("on_gpu_share_before", "on_node_share_before"):
            del planned[key]
        self.assertEqual(found, planned)
        rows = self.result("compare", "loads.jsonl", *CLUSTER, "--affinity", "pairs.json")["strategies"]
        for row in rows:
            if "affinity" not in row:
                self.assertIn("reason", row)
                continue
            self.assertEqual("on_gpu_share_before" in row["affinity"], row["strategy"] == "best")

    def test_wrong_files(self):
        def refused(part, content, code=4, name="bad.json"):
            self.write(name, content)
            self.refused(code, f"{name}: {part}" if code == 4 else part, "loads.jsonl", *CLUSTER, "--affinity", name, "-o", "x")

        short, narrow, wrong = transitions(), transitions(), transitions()
        del short[2][15]
        narrow[0][7].pop()
        wrong[4][3][9] = -1
        refused("expected a list of 5, one for each two consecutive layers of the 6 layers, found a list of 4", transitions(4))
        refused("expected a list of 5, one for each two consecutive layers of the 6 layers, found an object", {"a": 1})
        refused("layer 2 to 3: expected a list of 16, one for each expert of layer 2, found a list of 15", short)
        refused("layer 0 to 1: expert 7: expected a list of 16, one for each expert of layer 1, found a list of 15", narrow)
        refused("layer 4 to 5: expert 3 to expert 9: a whole number from 0", wrong)
        wrong[4][3][9] = 0.5
        refused("layer 4 to 5: expert 3 to expert 9: a whole number from 0", wrong)
        wrong[4][3][9] = "many"
        refused("layer 4 to 5: expert 3 to expert 9: a whole number from 0 to 9007199254740992 expected, found a text", wrong)
        wrong[4][3][9] = 2 ** 53
        refused("layer 4 to 5: the file has more than 9007199254740992 transitions", wrong)
        refused("contains no transitions: all counts are 0", [[[0] * EXPERTS] * EXPERTS] * (LAYERS - 1))
        (self.work / "few.npy").write_bytes(npy(transitions(4)))
        self.refused(4, "few.npy: expected the shape [5, 16, 16] (pairs of consecutive layers, experts, experts), "
                        "found [4, 16, 16]", "loads.jsonl", *CLUSTER, "--affinity", "few.npy", "-o", "x")
        self.refused(3, "none.json", "loads.jsonl", *CLUSTER, "--affinity", "none.json", "-o", "x")

    def test_wrong_combinations(self):
        self.plan("-o", "old.json")
        self.refused(2, "--affinity cannot be combined with --old", "loads.jsonl", *CLUSTER, "--affinity", "pairs.json",
                     "--old", "old.json")
        self.refused(2, "--affinity", "loads.jsonl", *CLUSTER, "--affinity", "pairs.json", "--strategy", "eplb")
        self.refused(2, "--affinity", "loads.jsonl", *CLUSTER, "--affinity", "pairs.json", "--objective", "recovery")


if __name__ == "__main__":
    main(__name__)
