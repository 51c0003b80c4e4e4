#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: its reports, plans and cluster descriptions fit their published schemas.

Usage: reports_test.py BIN MPIRUN
"""

import json

from command import CLUSTER, EXPERTS, FORMATS, LAYERS, LINKS, NODES, STRATEGIES, TIMES, Case, Places, jsonl, main, trace

try:
    import jsonschema
except ImportError:
    jsonschema = None


class Schemas(Case):
    def setUp(self):
        if jsonschema is None:
            self.skipTest("python3-jsonschema is not installed")
        super().setUp()

    def validator(self, name):
        schema = json.loads((Places.source / "docs" / name).read_text())
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    def report(self, *words, **more):
        report = json.loads(self.run_in(*words, "--json", **more).stdout)
        self.validator("report.schema.json").validate(report)
        return report

    def test_every_answer_fits(self):
        result = self.validator("moe-replace.schema.json")
        self.plan("--strategy", "eplb", "--at", "0", *LINKS, "-o", "old.json")
        self.write("nodes.csv", NODES + "5000,remove,n2\n6000,remove,n0\n6000,remove,n1\n7000,add,a\n7000,add,b\n")
        self.write("pairs.json", [[[1] * EXPERTS] * EXPERTS] * (LAYERS - 1))
        self.write("mixed.json", [[9] * 16, [3] * 8])
        more = ["--faults", "1", "--old", "old.json", "--node-failure", "0.01", "--measured-at", "0"]
        for words in (["loads.jsonl", *CLUSTER], ["loads.jsonl", *CLUSTER, *more, "--strategy", "lazarus"],
                      ["compare", "loads.jsonl", *CLUSTER, *more],
                      ["compare", "loads.jsonl", "--nodes", "2", "--gpus", "1", "--slots", "9", "--layers", "2"],
                      ["compare", "loads.jsonl", "--nodes", "2", "--gpus", "2", "--slots", "4", "--groups", "3"],
                      ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--compare", "--faults", "1"],
                      ["loads.jsonl", *CLUSTER, "--affinity", "pairs.json"],
                      ["evaluate", "old.json", "loads.jsonl", "--affinity", "pairs.json"],
                      ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--compare", "--step-time", "1", "--ep", "4"],
                      ["mixed.json", *CLUSTER], ["compare", "mixed.json", *CLUSTER],
                      ["evaluate", "old.json", "loads.jsonl", *TIMES], ["loads.jsonl", *CLUSTER, *LINKS, *TIMES],
                      ["compare", "loads.jsonl", *CLUSTER, *LINKS, *TIMES, "--layers", "2"],
                      ["mixed.json", *CLUSTER, *LINKS, *TIMES, "--strategy", "hecate"],
                      ["evaluate", "old.json", "loads.jsonl"]):
            with self.subTest(words):
                result.validate(self.report(*words)["result"])
        for strategy in STRATEGIES:
            result.validate(self.report("loads.jsonl", *CLUSTER, "--strategy", strategy, "--old", "old.json")["result"])

    def test_failures_have_a_report_too(self):
        for code, name, words in ((2, "usage", ["loads.jsonl"]), (2, "usage", ["loads.jsonl", *CLUSTER, "--window", "9"]),
                                  (3, "not_found", ["gone", *CLUSTER]), (4, "bad_input", [self.write("b", "[[-1]]"), *CLUSTER]),
                                  (8, "limit", [self.write("d", "[" * 99), *CLUSTER]),
                                  (10, "infeasible", ["loads.jsonl", *CLUSTER, "--faults", "7"])):
            report = self.report(*words, code=code)
            self.assertEqual((report["exit_code"], report["error"]["name"], report["result"]), (code, name, None))

    def test_a_check_that_says_no_still_answers(self):
        self.plan("--strategy", "eplb", "-o", "p.json")
        report = self.report("evaluate", "p.json", "loads.jsonl", "--faults", "1", code=5)
        self.assertEqual(report["error"]["name"], "mismatch")
        self.validator("moe-replace.schema.json").validate(report["result"])

    def test_the_schema_of_answers_refuses_what_does_not_fit(self):
        result = self.validator("moe-replace.schema.json")
        good = self.report("loads.jsonl", *CLUSTER)["result"]
        for key in good:
            if key != "iteration":
                self.assertFalse(result.is_valid({k: v for k, v in good.items() if k != key}), key)
        for key in good["plan"]:
            if key == "memory":
                continue
            self.assertFalse(result.is_valid({**good, "plan": {k: v for k, v in good["plan"].items() if k != key}}), key)
        self.assertFalse(result.is_valid({**good, "extra": 1}))

    def test_every_plan_fits(self):
        plans, clusters = self.validator("formats/plan.schema.json"), self.validator("formats/cluster.schema.json")
        self.plan("--strategy", "eplb", "--at", "0", "-o", "old.json")
        for strategy in STRATEGIES:
            self.plan("--strategy", strategy, "--old", "old.json", "-o", "p.json", "--force")
            plan = self.read("p.json")
            plans.validate(plan)
            clusters.validate(plan["cluster"])
            for key in set(plan) - {"slots_per_node", "iteration", "migration", "xxh3_128"}:
                self.assertFalse(plans.is_valid({k: v for k, v in plan.items() if k != key}), key)
        self.assertEqual(len(FORMATS), 6)
        self.run_in(self.write("mixed.json", [[9] * 16, [3] * 8]), *CLUSTER, "-o", "mixed_plan.json")
        plans.validate(self.read("mixed_plan.json"))

    def test_clusters_are_read_as_their_schema_says(self):
        schema = self.validator("formats/cluster.schema.json")
        self.write("few.jsonl", jsonl(trace(experts=4)))
        good = ({"nodes": 4, "gpus": 2, "slots": 2},
                {"nodes": 2, "gpus": [2, {"slots": 4}, {"id": 5, "memory": "1GiB"}], "slots": 1, "expert_bytes": "10MB"},
                {"nodes": [{"name": "a", "rack": "r", "alive": True, "gpus": 2, "slots": 3}, {"gpus": [4]}],
                 "gpus": 1, "memory": 10**9, "expert_bytes": 10**6, "param_bytes": "100KB", "nodes_per_rack": 1,
                 "bandwidth": {"gpu": "200GB/s", "node": 2.5e10, "rack": "10GB"}, "comment": ["any", 1]})
        bad = ({}, {"nodes": 0, "gpus": 2, "slots": 2}, {"nodes": 2, "gpus": 2, "slots": 2, "speed": 1},
               {"nodes": 2, "gpus": 2, "slots": 2, "memory": "1GB"}, {"nodes": 2, "gpus": 2, "slots": -1},
               {"nodes": 2, "gpus": 2, "slots": 2, "bandwidth": {"gpu": 0}}, {"nodes": [{"name": ""}], "gpus": 1, "slots": 4},
               {"nodes": 2, "gpus": 2, "slots": 2, "bandwidth": {"cable": 1}}, {"nodes": "2", "gpus": 2, "slots": 2},
               {"nodes": [{"alive": "yes"}], "gpus": 1, "slots": 4}, {"nodes": 2, "gpus": 2, "memory": "much"})
        for cluster in good:
            schema.validate(cluster)
            self.run_in("few.jsonl", "--cluster", self.write("c.json", cluster))
        for cluster in bad:
            self.assertFalse(schema.is_valid(cluster), cluster)
            self.run_in("few.jsonl", "--cluster", self.write("c.json", cluster), code=4)


if __name__ == "__main__":
    main(__name__)
