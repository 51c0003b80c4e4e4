#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: models with different numbers of experts in their layers.

Usage: uneven_test.py BIN MPIRUN
"""

import json

from command import CLUSTER, FORMATS, LAYERS, NODES, STRATEGIES, Case, jsonl, main, trace

GROUPS = {8: [1, 2], 16: [0, 3, 4, 5]}  # layers by number of experts
COUNT = [8 if layer in GROUPS[8] else 16 for layer in range(LAYERS)]
RECORDS = [[counts[:COUNT[layer]] for layer, counts in enumerate(step)] for step in trace()]


def chosen(experts):
    return ["--layers", ",".join(map(str, GROUPS[experts]))]


def layer_of(plan, layer):
    """A layer without empty slots. Their number depends on other layers if experts are copied for an iteration."""
    found = next(entry for entry in plan["layers"] if entry["layer"] == layer)
    return {key: [[e for e in gpu if e >= 0] for gpu in value] if key in ("devices", "owners") else value
            for key, value in found.items() if key != "experts"}


class Uneven(Case):
    def setUp(self):
        super().setUp()
        self.write("mixed.jsonl", jsonl(RECORDS))

    def both(self, name, *words):
        """Plans all layers together and each number of experts alone, and compares them. Returns all answers."""
        whole = self.result(name, *CLUSTER, *words, "-o", "p.json", "--force")
        plan = self.read("p.json")
        self.assertEqual([entry["layer"] for entry in plan["layers"]], list(range(LAYERS)))
        self.assertEqual([entry["experts"] for entry in plan["layers"]], COUNT)
        self.assertEqual((plan["experts"], whole["experts"], whole["layer_experts"]), (16, 16, COUNT))
        parts = {}
        for experts, layers in GROUPS.items():
            parts[experts] = self.result(name, *CLUSTER, *words, *chosen(experts), "-o", "q.json", "--force")
            alone = self.read("q.json")
            self.assertEqual((alone["experts"], parts[experts]["experts"]), (experts, experts))
            for entry in alone["layers"]:
                self.assertNotIn("experts", entry)
                self.assertEqual(layer_of(plan, entry["layer"]), layer_of(alone, entry["layer"]))
            for at, layer in enumerate(layers):
                self.assertEqual(whole["plan"]["metrics"]["layers"][layer],
                                 parts[experts]["plan"]["metrics"]["layers"][at])
        certain = [part["plan"]["recovery"]["certain"] for part in parts.values()]
        self.assertEqual(whole["plan"]["recovery"]["certain"], min(certain))
        mean = sum(part["plan"]["metrics"]["imbalance_mean"] * len(GROUPS[experts]) for experts, part in parts.items())
        self.assertAlmostEqual(whole["plan"]["metrics"]["imbalance_mean"], mean / LAYERS, delta=1e-12)
        return whole, parts

    def test_the_plan_is_that_of_each_number_alone(self):
        self.write("mixed.json", RECORDS[-1])
        self.write("mixed.csv", "layer,expert,tokens\n" + "".join(
            f"{layer},{e},{count}\n" for layer, row in enumerate(RECORDS[-1]) for e, count in enumerate(row)))
        plans = []
        for name in ("mixed.json", "mixed.jsonl", "mixed.csv"):
            self.both(name)
            plans.append(self.read("p.json")["layers"])
            self.assertEqual([entry["loads"] for entry in plans[-1]], RECORDS[-1])
        self.assertEqual(plans[1:], plans[:1] * 2)
        self.assertIn("6 layers of 8 to 16 experts", self.run_in("mixed.json", *CLUSTER).stdout)
        for strategy in STRATEGIES:
            with self.subTest(strategy):
                self.both("mixed.jsonl", "--strategy", strategy)
        self.both("mixed.jsonl", "--faults", "1", "--window", "2", "--measured-at", "0")
        self.run_in("mixed.jsonl", *CLUSTER, "--window", "1,all", "-o", "w.json")
        self.assertEqual([len(entry["replicas"]) for entry in self.read("w.json")["layers"]], COUNT)

    def test_constraints(self):
        self.both("mixed.jsonl", "--everywhere", "2")
        for layer in self.read("p.json")["layers"]:
            self.assertTrue(all(2 in gpu for gpu in layer["devices"]))
        self.both("mixed.jsonl", "--pin", "0-1:3")
        for layer in self.read("p.json")["layers"]:
            self.assertFalse(any(e in (0, 1) for node in layer["placement"][:3] for e in node))
        self.both("mixed.jsonl", "--groups", "4")
        self.refused(2, "layers of 8 experts: --everywhere: expert 12 does not exist", "mixed.jsonl", *CLUSTER,
                     "--everywhere", "12", "-o", "p")
        self.refused(2, "--pin: expert 12 does not exist, layer 1 has 8 experts", "mixed.jsonl", *CLUSTER,
                     "--pin", "12:0", "-o", "p")
        self.refused(10, "16 experts", "mixed.jsonl", *CLUSTER, "--faults", "3", "-o", "p")
        self.refused(10, "16 experts do not fit in 12 live slots", "mixed.jsonl", "--nodes", "3", "--gpus", "1",
                     "--slots", "4", "-o", "p")

    def test_old_plans(self):
        self.run_in("mixed.jsonl", *CLUSTER, "--at", "0", "-o", "old.json")
        sums = []
        for words in ([], ["--strategy", "eplb+"], ["--strategy", "hecate"], ["--target-balance", "1.3"]):
            whole, parts = self.both("mixed.jsonl", "--old", "old.json", *words)
            moved = [answer["plan"]["migration"]["transfers"] for answer in (whole, *parts.values())]
            self.assertEqual(moved[0], sum(moved[1:]), words)
            sums.append(moved[0])
            self.assertEqual(whole["plan"]["migration"]["lost"], [])
            self.assertNotIn("moves_curve", whole["plan"])
        self.assertGreater(max(sums), 0)
        self.run_in("mixed.jsonl", *CLUSTER, "--strategy", "eplb+", "-o", "same.json")
        again = self.result("mixed.jsonl", *CLUSTER, "--strategy", "eplb+", "--old", "same.json")
        self.assertEqual(again["plan"]["migration"]["transfers"], 0)
        self.refused(9, "--max-moves requires the same number of experts in all layers, found 8 to 16 experts; choose "
                        "layers of one number with --layers", "mixed.jsonl", *CLUSTER, "--old", "old.json",
                     "--max-moves", "9", "-o", "p")
        self.refused(4, "layer 1 has 8 experts, the token counts have 16", "loads.jsonl", *CLUSTER, "--old", "old.json",
                     "-o", "p")

    def test_only_experts_of_a_layer_are_lost(self):
        # The eight GPUs hold one replica of two experts of the large layers, and of one expert of the small layers.
        self.run_in("mixed.jsonl", *CLUSTER, "--strategy", "vanilla", "-o", "old.json")
        self.write("c.json", {"nodes": [{"alive": False}, {}, {"alive": False}, {}], "gpus": 2, "slots": 4})
        found = self.result("mixed.jsonl", "--cluster", "c.json", "--old", "old.json")["plan"]
        self.assertEqual(found["migration"]["lost"], [[layer, e] for layer in range(LAYERS) for e in range(COUNT[layer])
                                                       if e * 8 // COUNT[layer] in (0, 1, 4, 5)])
        measured = self.result("evaluate", "old.json", "mixed.jsonl")["plan"]
        self.assertTrue(all(layer["tokens_lost"] == 0 for layer in measured["metrics"]["layers"]))

    def test_plans_are_read_again(self):
        planned = self.result("mixed.jsonl", *CLUSTER, "--strategy", "eplb+", "-o", "p.json")
        measured = self.result("evaluate", "p.json", "mixed.jsonl")
        self.assertEqual(measured["plan"]["metrics"], planned["plan"]["metrics"])
        self.assertEqual(measured["layer_experts"], COUNT)
        for experts, layers in GROUPS.items():
            part = self.result("evaluate", "p.json", "mixed.jsonl", *chosen(experts))["plan"]["metrics"]["layers"]
            self.assertEqual(part, [planned["plan"]["metrics"]["layers"][layer] for layer in layers])
        self.refused(4, "layer 1 has 8 experts, the token counts have 16", "evaluate", "p.json", "loads.jsonl")
        plan = self.read("p.json")
        del plan["xxh3_128"]
        plan["layers"][1]["devices"][0][0] = 8
        self.write("bad.json", plan)
        self.refused(4, "layer 1: expert 8 does not exist, there are 8", "evaluate", "bad.json", "mixed.jsonl")

    def test_formats(self):
        planned = self.result("mixed.jsonl", *CLUSTER, "--strategy", "eplb+")["plan"]["metrics"]
        for form in FORMATS:
            words = ["mixed.jsonl", *CLUSTER, "--strategy", "eplb+", "--format", form, "-o", form]
            if form in ("eplb", "vllm"):
                self.refused(9, f"--format {form} requires the same number of experts in all layers, found 8 to 16 "
                                "experts; choose layers of one number with --layers", *words)
                self.run_in(*words, *chosen(8))
                continue
            self.run_in(*words)
            self.assertEqual(self.result("evaluate", form, "mixed.jsonl", *CLUSTER)["plan"]["metrics"], planned, form)

    def test_other_reports(self):
        rows = self.result("compare", "mixed.jsonl", *CLUSTER)["strategies"]
        self.assertEqual({row["strategy"] for row in rows if "metrics" in row}, set(STRATEGIES))
        self.run_in("mixed.jsonl", *CLUSTER, "--html", "r.html")
        self.assertIn('"experts":"8 to 16 experts"', (self.work / "r.html").read_text())
        self.write("nodes.csv", NODES + "5000,remove,n2\n6000,add,m\n")
        simulated = self.result("simulate-failures", "mixed.jsonl", "nodes.csv", *CLUSTER, "--compare", "--faults", "1")
        for run in simulated["strategies"]:
            if run["strategy"] in ("best", "lazarus"):
                self.assertEqual((run["failures"], run["survived"], run["restores"]), (1, 1, 0), run["strategy"])
            self.assertGreater(run["plans"], 1)

    def test_what_needs_one_number(self):
        self.write("even.json", [[1] * 16] * LAYERS)
        self.refused(4, "the recordings differ", "mixed.jsonl", *CLUSTER, "--layers", "0", "--join", "even.json", "-o", "p")
        self.write("pairs.json", [])
        self.refused(9, "--affinity requires the same number of experts in all layers", "mixed.jsonl", *CLUSTER,
                     "--layers", "3-4", "--affinity", "pairs.json", "-o", "p")

    def test_a_note_names_the_layers_of_each_number(self):
        lists = [[1] * 32 for _ in range(6)]
        for sizes, note in ((
                {3: 31}, "layer 3 has 31 experts, the other layers have 32"),
                ({1: 16, 2: 16, 5: 31}, "layers 1-2 have 16 experts, layer 5 has 31 experts, the other layers have 32"),
                ({0: 8, 1: 8, 2: 8}, "layers 0-2 have 8 experts, the other layers have 32"),
                ({layer: 5 + layer for layer in range(1, 6)},
                 "layer 1 has 6 experts, layer 2 has 7 experts, layer 3 has 8 experts, layer 4 has 9 experts, layers of 1 "
                 "other number, layer 0 has 32")):
            ragged = [row[:sizes.get(layer, 32)] for layer, row in enumerate(lists)]
            self.write("ragged.json", ragged)
            self.write("ragged.jsonl", jsonl([ragged] * 2))
            self.write("ragged.csv", "layer,expert,tokens\n" + "".join(
                f"{layer},{e},{count}\n" for layer, row in enumerate(ragged) for e, count in enumerate(row)))
            for name in ("ragged.json", "ragged.jsonl", "ragged.csv"):
                with self.subTest(name, sizes=sizes):
                    done = self.run_in(name, "--nodes", "4", "--gpus", "2", "--slots", "8", "-o", "p", "--force")
                    self.assertIn(f"{name}: {note}\n", done.stderr.replace("\n  ", " ") + "\n")
        self.write("even.json", lists)
        self.assertNotIn("have", self.run_in("even.json", "--nodes", "4", "--gpus", "2", "--slots", "8", "-o", "p", "--force").stderr)

    def test_a_sparse_table_hides_the_numbers(self):
        self.write("sparse.csv", "layer_id,expert_id,count\n" + "".join(
            f"{layer},{e},{count}\n" for layer, row in enumerate(RECORDS[-1]) for e, count in enumerate(row)))
        done = self.run_in("sparse.csv", *CLUSTER, "-o", "p.json")
        self.assertIn("16 counts have no row and are set to 0; the highest expert_id implies 16 experts in every layer; in "
                      "layers 1-2 no expert_id is above 7", " ".join(done.stderr.split()))
        self.assertEqual([len(entry["loads"]) for entry in self.read("p.json")["layers"]], [16] * LAYERS)
        self.assertNotIn("layer_experts", json.loads(self.run_in("sparse.csv", *CLUSTER, "--json").stdout)["result"])


if __name__ == "__main__":
    main(__name__)
