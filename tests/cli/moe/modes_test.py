#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: plan, compare, simulate failures and measure, by exit code, by output, and on disk.

Usage: modes_test.py BIN MPIRUN
"""

import json
import re

from command import CLUSTER, EXPERTS, FORMATS, LAYERS, NODES, STRATEGIES, Case, jsonl, main, trace


class Plans(Case):
    def test_a_plan_holds_every_expert_on_distinct_nodes(self):
        self.plan("--strategy", "lazarus", "--faults", "1", "-o", "p.json")
        plan = self.read("p.json")
        self.assertEqual((plan["nodes"], plan["slots_per_node"], plan["fault_threshold"], plan["survives"]),
                         (4, 8, 2, 1))
        self.assertEqual(len(plan["layers"]), LAYERS)
        for layer in plan["layers"]:
            for expert in range(EXPERTS):
                self.assertGreaterEqual(sum(expert in node for node in layer["placement"]), 2)
            self.assertTrue(all(len(node) <= 8 for node in layer["placement"]))
            self.assertEqual(layer["replicas"], [sum(node.count(e) for node in layer["placement"])
                                                 for e in range(EXPERTS)])
            self.assertEqual(layer["recovery"]["1"], 1)

    def test_every_strategy_places_every_expert(self):
        for strategy in STRATEGIES:
            self.plan("--strategy", strategy, "-o", strategy)
            for layer in self.read(strategy)["layers"]:
                self.assertEqual({e for node in layer["placement"] for e in node}, set(range(EXPERTS)), strategy)

    def test_the_loads_that_count_are_chosen(self):
        records = trace()
        self.plan("--strategy", "eplb", "--at", "250", "--window", "2", "--layers", "1,3-4", "-o", "p.json")
        plan = self.read("p.json")
        self.assertEqual(plan["iteration"], 200)
        self.assertEqual([layer["layer"] for layer in plan["layers"]], [1, 3, 4])
        for layer in plan["layers"]:
            pairs = zip(records[1][layer["layer"]], records[2][layer["layer"]])
            self.assertEqual(layer["loads"], [a + b for a, b in pairs])

    def test_balance_is_measured_on_later_loads(self):
        now = self.result("loads.jsonl", *CLUSTER, "--strategy", "eplb", "--at", "0")
        later = self.result("loads.jsonl", *CLUSTER, "--strategy", "eplb", "--at", "0", "--measured-at", "300")
        self.assertEqual(later["plan"]["metrics"], now["plan"]["metrics"])
        self.assertEqual((later["iteration"], later["measured_at"]), (0, 300))
        self.assertGreater(later["plan"]["measured"]["imbalance_mean"], now["plan"]["metrics"]["imbalance_mean"])

    def test_objectives_trade_balance_for_recovery(self):
        def judged(objective):
            # Twelve experts on four nodes of six slots: the rare ones decide which failures a plan survives.
            self.write("few.jsonl", jsonl(trace(experts=12)))
            plan = self.result("few.jsonl", "--nodes", "4", "--gpus", "1", "--slots", "6", "--strategy", "lazarus",
                               "--objective", objective)["plan"]
            return plan["metrics"]["node_imbalance_mean"], sum(plan["recovery"]["survived"])
        balance, recovery, mixed = judged("balance"), judged("recovery"), judged("mixed")
        self.assertLessEqual(balance[0], mixed[0])
        self.assertLessEqual(mixed[0], recovery[0])
        self.assertLess(balance[0], recovery[0])
        self.assertGreaterEqual(recovery[1], mixed[1])

    def test_the_same_plan_needs_no_moves(self):
        for strategy in ("best", "lazarus", "eplb", "eplb+", "spread"):
            self.plan("--strategy", strategy, "-o", "p.json", "--force")
            plan = self.result("loads.jsonl", *CLUSTER, "--strategy", strategy, "--old", "p.json")["plan"]
            moves = plan["migration"]
            self.assertEqual((moves["transfers"], moves["bytes"], moves["lost"]), (0, 0, []), strategy)

    def test_moves_are_counted(self):
        self.plan("--strategy", "lazarus", "--at", "0", "-o", "old.json")
        self.plan("--strategy", "lazarus", "--old", "old.json", "-o", "new.json")
        old, new = self.read("old.json"), self.read("new.json")
        moves = new["migration"]
        self.assertEqual(moves["transfer_count"], len(moves["transfers"]))
        self.assertGreater(moves["transfer_count"], 0)
        self.assertEqual(moves["bytes"], moves["transfer_count"] * 14_000_000)
        arrived = {(layer, expert, to) for layer, expert, _, to, _ in moves["transfers"]}
        wanted = set()
        for before, after in zip(old["layers"], new["layers"]):
            for gpu, (had, has) in enumerate(zip(before["devices"], after["devices"])):
                wanted |= {(after["layer"], e, gpu) for e in set(has) - set(had) if e >= 0}
        self.assertEqual(arrived, wanted)
        for _, _, start, to, number in moves["transfers"]:
            self.assertNotEqual(start, to)
            self.assertLess(number, moves["rounds"])

    def test_what_lay_on_dead_nodes_is_lost_or_copied(self):
        self.plan("--strategy", "vanilla", "-o", "old.json")
        nodes = [{"name": f"node{n}", "alive": n != 2} for n in range(4)]
        self.write("c.json", {"nodes": nodes, "gpus": 2, "slots": 4, "expert_bytes": "14MB"})
        done = self.run_in("loads.jsonl", "--cluster", "c.json", "--strategy", "lazarus", "--old", "old.json",
                           "-o", "new.json")
        plan = self.read("new.json")
        for layer in plan["layers"]:
            self.assertEqual(layer["placement"][2], [])
        self.assertTrue(all(start // 2 != 2 and to // 2 != 2 for _, _, start, to, _ in plan["migration"]["transfers"]))
        held = {(layer["layer"], e) for layer in self.read("old.json")["layers"]
                for n, node in enumerate(layer["placement"]) if n != 2 for e in node}
        every = {(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)}
        self.assertEqual({tuple(one) for one in plan["migration"]["lost"]}, every - held)
        if every - held:
            self.assertIn("restore from a checkpoint", done.stdout)

    def test_racks_fail_at_once(self):
        self.write("c.json", {"nodes": 6, "gpus": 1, "slots": 8, "nodes_per_rack": 2, "expert_bytes": 14})
        self.run_in("loads.jsonl", "--cluster", "c.json", "--unit", "rack", "--faults", "1", "-o", "p.json")
        plan = self.read("p.json")
        self.assertEqual((plan["failure_unit"], plan["survives"]), ("rack", 1))
        for layer in plan["layers"]:
            for expert in range(EXPERTS):
                racks = {n // 2 for n, node in enumerate(layer["placement"]) if expert in node}
                self.assertGreaterEqual(len(racks), 2)
        self.refused(10, "the largest --faults is 2", "loads.jsonl", "--cluster", "c.json", "--unit", "rack",
                     "--faults", "3", "-o", "q.json")

    def test_unequal_gpus_keep_their_slots(self):
        nodes = [{"gpus": [3, 5]}, {"gpus": [{"slots": 7}]}, {"gpus": 2, "memory": "1GB"}]
        self.write("c.json", {"nodes": nodes, "slots": 1, "expert_bytes": "40MB"})
        for strategy in ("best", "lazarus", "eplb+", "spread"):
            self.run_in("loads.jsonl", "--cluster", "c.json", "--strategy", strategy, "-o", strategy)
            for layer in self.read(strategy)["layers"]:
                # 1 GB hold 25 experts of 40 MB, 4 of each of the 6 layers.
                self.assertEqual([len(gpu) for gpu in layer["devices"]], [3, 5, 7, 4, 4], strategy)

    def test_an_output_is_replaced_only_when_told(self):
        self.plan("--strategy", "eplb", "-o", "p.json")
        before = (self.work / "p.json").read_bytes()
        for words in (["-o", "p.json"], ["--html", "p.json"]):
            done = self.refused(6, "--force", "loads.jsonl", *CLUSTER, *words)
            self.assertIn("p.json: already exists", done.stderr)
        self.refused(6, "--force", "compare", "loads.jsonl", *CLUSTER, "--html", "p.json")
        self.assertEqual((self.work / "p.json").read_bytes(), before)
        self.plan("--strategy", "lazarus", "-o", "p.json", "--force")
        self.assertNotEqual((self.work / "p.json").read_bytes(), before)
        self.refused(3, "gone", "loads.jsonl", *CLUSTER, "-o", "gone/p.json")
        self.refused(6, "is not a regular file", "loads.jsonl", *CLUSTER, "-o", "/dev/null", "--force")

    def test_copies_of_an_iteration_are_told_apart_from_state(self):
        self.plan("--strategy", "hecate", "--overlap", "4", "--spare", "2", "-o", "p.json")
        layer = self.read("p.json")["layers"][0]
        owners = [e for gpu in layer["owners"] for e in gpu if e >= 0]
        self.assertEqual(sorted(owners), list(range(EXPERTS)))
        hot = sorted(range(EXPERTS), key=lambda e: (-layer["loads"][e], e))[:4]
        for gpu, own in zip(layer["devices"], layer["owners"]):
            foreign = [e for e in gpu if e >= 0 and e not in own]
            self.assertLessEqual(len(foreign), 2)
            self.assertLessEqual(set(foreign), set(hot))
        plan = self.result("loads.jsonl", *CLUSTER, "--strategy", "hecate", "--overlap", "4", "--spare", "2")["plan"]
        for volumes, made in zip(plan["volumes"], self.read("p.json")["layers"]):
            copies = sum(len([e for e in gpu if e >= 0]) for gpu in made["devices"]) - EXPERTS
            self.assertEqual(sum(volumes["gather_in_experts"]), copies)
            self.assertEqual(sum(volumes["gather_out_experts"]), copies)
            self.assertEqual(sum(volumes["gather_in_bytes"]), copies * 2_000_000)
            self.assertEqual(sum(volumes["gather_out_bytes"]), copies * 2_000_000)
        # Only the owners survive, and only they are in place for a next plan.
        self.assertEqual(plan["recovery"]["certain"], 0)
        again = self.result("loads.jsonl", *CLUSTER, "--strategy", "hecate", "--overlap", "4", "--spare", "2",
                            "--old", "p.json")["plan"]
        self.assertEqual(again["migration"]["transfers"], 0)
        theirs = self.result("evaluate", "p.json", "loads.jsonl")["plan"]
        self.assertEqual(theirs["recovery"], plan["recovery"])
        self.assertAlmostEqual(theirs["metrics"]["imbalance_mean"], plan["metrics"]["imbalance_mean"])


class Asked(Case):
    """A requested limit is met or is an error, never ignored."""

    def test_failures_that_the_plan_does_not_survive(self):
        done = self.refused(10, "but --faults is 1", "loads.jsonl", *CLUSTER, "--strategy", "compact", "--faults", "1", "-o", "p")
        self.assertIn("--faults of at most 1", done.stderr)
        self.refused(10, "--faults of at most 1", "loads.jsonl", *CLUSTER, "--strategy", "eplb", "--faults", "1")
        done = self.compare("--faults", "1")
        self.assertRegex(done.stdout, r"(?m)^eplb .* 0 ! ")
        for strategy in ("best", "lazarus"):
            self.assertNotRegex(done.stdout, rf"(?m)^{strategy} .*!")

    def test_a_plan_of_others_is_checked(self):
        self.plan("--strategy", "lazarus", "--faults", "1", "-o", "p.json")
        done = self.run_in("evaluate", "p.json", "loads.jsonl", "--faults", "1")
        self.assertIn("plan      p.json, format plan", done.stdout)
        done = self.run_in("evaluate", "p.json", "loads.jsonl", "--faults", "2", code=5)
        self.assertIn("survives any 1 failure, but --faults is 2", done.stderr)
        self.assertIn("survives  any 1 node", done.stdout)

    def test_flags_that_would_do_nothing(self):
        base = ["loads.jsonl", *CLUSTER]
        self.write("nodes.csv", NODES)
        for part, words in (
                ("--distinct cannot be combined with --strategy eplb", ["--strategy", "eplb", "--distinct"]),
                ("--effort cannot be combined with --strategy lazarus", ["--strategy", "lazarus", "--effort", "1"]),
                ("--effort cannot be combined with --strategy best --objective recovery",
                 ["--objective", "recovery", "--effort", "1"]),
                ("--objective cannot be combined with --strategy spread", ["--strategy", "spread", "--objective", "mixed"]),
                ("--overlap cannot be combined", ["--overlap", "2"]), ("--spare cannot be combined", ["--spare", "2"]),
                ("--overlap cannot be combined with --nonmoe-seconds", ["--strategy", "hecate", "--overlap", "2",
                                                            "--nonmoe-seconds", "1"]),
                ("--nonmoe-seconds requires bandwidths", ["--strategy", "hecate", "--nonmoe-seconds", "1"]),
                ("--recovery-loss requires --objective mixed", ["--strategy", "lazarus", "--recovery-loss", "0.1"]),
                ("--forward requires --old", ["--forward"]), ("--map requires --old", ["--map", "greedy"]),
                ("--format requires --output", ["--format", "vllm"]), ("--force requires --output", ["--force"]),
                ('unknown flag "--rebalance-every"', ["--rebalance-every", "5"]),
                ("--nodes cannot be combined with --cluster", ["--cluster", "c.json"])):
            with self.subTest(part):
                self.refused(2, part, *base, *words)
        simulation = ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER]
        for part, words in (
                ('unknown flag "-o"', ["compare", *base, "-o", "p"]),
                ('unknown flag "--strategy"', ["compare", *base, "--strategy", "best"]),
                ("--force requires --html", ["compare", *base, "--force"]),
                ("--map requires --old", ["compare", *base, "--map", "greedy"]),
                ('unknown flag "--at"', [*simulation, "--at", "5"]),
                ("--force requires --html", [*simulation, "--force"]),
                ('unknown flag "--failures"', [*simulation, "--failures", "5"]),
                ("--strategy cannot be combined with --compare", [*simulation, "--compare", "--strategy", "best"]),
                ("--faults cannot be combined with --strategy eplb in moe-replace simulate-failures",
                 [*simulation, "--strategy", "eplb", "--faults", "1"]),
                ('unknown flag "--strategy"', ["evaluate", "p", *base, "--strategy", "best"]),
                ('unknown flag "--effort"', ["evaluate", "p", *base, "--effort", "2"])):
            with self.subTest(words):
                self.refused(2, part, *words)

    def test_groups_are_known_to_eplb_and_its_format(self):
        self.plan("--strategy", "lazarus", "--format", "eplb", "--groups", "4", "-o", "p.json")
        self.assertEqual(self.read("p.json")["groups"], 4)
        self.refused(2, "--groups cannot be combined", "loads.jsonl", *CLUSTER, "--strategy", "lazarus", "--groups", "4")

    def test_experts_on_every_gpu(self):
        for strategy in ("best", "eplb+"):
            plan = self.result("loads.jsonl", *CLUSTER, "--strategy", strategy, "--everywhere", "0,15", "-o", "p.json",
                               "--force")["plan"]
            for layer, metrics in zip(self.read("p.json")["layers"], plan["metrics"]["layers"]):
                for gpu in layer["devices"]:
                    self.assertLessEqual({0, 15}, set(gpu))
                self.assertEqual((layer["replicas"][0], layer["replicas"][15]), (8, 8))
                loads = [sum(layer["loads"][e] / layer["replicas"][e] for e in gpu) for gpu in layer["devices"]]
                self.assertAlmostEqual(metrics["imbalance"], 8 * max(loads) / sum(layer["loads"]), delta=1e-9)
                self.assertGreaterEqual(metrics["imbalance"] * (1 + 1e-9), metrics["bound"])
        words = ["loads.jsonl", *CLUSTER, "--everywhere", "0,15"]
        self.plan("--everywhere", "0,15", "-o", "old.json")
        again = self.result(*words, "--old", "old.json", "-o", "q.json")["plan"]
        self.assertEqual(again["migration"]["transfers"], 0)
        # From a plan without them, each GPU that lacks one gets it, within the limit.
        self.plan("-o", "free.json")
        missing = sum(expert not in gpu for layer in self.read("free.json")["layers"] for gpu in layer["devices"]
                      for expert in (0, 15))
        self.refused(10, f"gpus lack {missing} replicas of the experts of --everywhere", *words, "--old", "free.json",
                     "--max-moves", "5", "-o", "r")
        moved = self.result(*words, "--old", "free.json", "--max-moves", missing + 60, "-o", "r.json")["plan"]
        self.assertLessEqual(moved["migration"]["transfers"], missing + 60)
        rows = self.result("compare", *words)["strategies"]
        self.assertEqual([row["strategy"] for row in rows if "metrics" not in row], ["hecate", "fastermoe"])

    def test_groups_without_the_experts_on_every_gpu(self):
        """The other experts keep the groups that they have among all experts."""
        roomy = [*CLUSTER[:-3], "6"]
        words = ["loads.jsonl", *roomy, "--groups", "8", "--policy", "hierarchical", "--everywhere"]
        for everywhere in ({0, 1, 5}, set(range(0, EXPERTS, 8)), set(range(0, EXPERTS, 2)[:3])):
            self.run_in(*words, ",".join(map(str, sorted(everywhere))), "-o", "p.json", "--force")
            for layer in self.read("p.json")["layers"]:
                groups = [{e // 2 for e in held if e not in everywhere} for held in layer["placement"]]
                found = sorted(group for node in groups for group in node)
                self.assertEqual(found, sorted({e // 2 for e in range(EXPERTS) if e not in everywhere}))
        again = self.result(*words, "0,2,4", "--old", "p.json")["plan"]
        self.assertEqual(again["migration"]["transfers"], 0)
        part = "--everywhere leaves the groups of --groups with different numbers of experts"
        self.refused(10, part, *words, "0,1,5", "--strategy", "eplb+", "-o", "r")
        # Each group loses one expert.
        self.run_in("loads.jsonl", *roomy, "--groups", "4", "--strategy", "eplb+", "--everywhere", "0,4,8,12", "-o", "q.json")
        for layer in self.read("q.json")["layers"]:
            self.assertEqual([len({e // 4 for e in held if e % 4}) for held in layer["placement"]], [1] * 4)
        # A shared expert in addition to those of the groups.
        self.write("more.jsonl", jsonl(trace(experts=17)))
        self.run_in("more.jsonl", *CLUSTER, "--groups", "8", "--everywhere", "16", "-o", "s.json")
        for layer in self.read("s.json")["layers"]:
            self.assertEqual([len({e // 2 for e in held if e < 16}) for held in layer["placement"]], [2] * 4)

    def test_wrong_experts_on_every_gpu(self):
        words = ["loads.jsonl", *CLUSTER, "-o", "p", "--everywhere"]
        self.refused(2, "expert 16 does not exist, the layers have 16 experts", *words, "16")
        self.refused(2, "there is nothing to plan", *words, "0-15")
        self.refused(10, 'node "node0" gpu 0 has 4 slots: the 4 experts of --everywhere and one more', *words, "0-3")
        self.refused(10, "14 experts do not fit in 12 live slots (not counting the experts of --everywhere, which take 2 slots",
                     "loads.jsonl", "--nodes", "3", "--gpus", "2", "--slots", "4", "-o", "p", "--everywhere", "0,1")
        self.refused(2, 'expected numbers of experts such as 256 or 0-3,7', *words, "a")
        self.refused(2, "--everywhere cannot be combined", *words, "1", "--strategy", "lazarus")

    def test_experts_pinned_to_nodes(self):
        words = ["loads.jsonl", *CLUSTER, "--pin", "0-2,5:1", "--pin", "15:0,3"]
        allowed = {**{expert: {1} for expert in (0, 1, 2, 5)}, 15: {0, 3}}
        self.result(*words, "-o", "p.json")
        for layer in self.read("p.json")["layers"]:
            for number, gpu in enumerate(layer["devices"]):
                for expert in gpu:
                    self.assertIn(number // 2, allowed.get(expert, range(4)))
        both = self.result(*words, "--everywhere", "3", "-o", "q.json")["plan"]
        self.assertGreaterEqual(both["metrics"]["imbalance_mean"], 1)
        for layer in self.read("q.json")["layers"]:
            for number, gpu in enumerate(layer["devices"]):
                self.assertIn(3, gpu)
                for expert in gpu:
                    self.assertIn(number // 2, allowed.get(expert, range(4)))
        rows = self.result("compare", *words)["strategies"]
        self.assertEqual([row["strategy"] for row in rows if "metrics" in row], ["best"])
        self.assertEqual({row["reason"] for row in rows if "metrics" not in row}, {"does not support --pin"})

    def test_wrong_pins(self):
        words = ["loads.jsonl", *CLUSTER, "-o", "p", "--pin"]
        for text in ("3", "a:0", "3:", ":1", "3:0:1"):
            self.refused(2, "expected numbers of experts and of nodes such as 0-3,7:0,1", *words, text)
        self.refused(2, "expert 3 is pinned twice", *words, "3:0", "--pin", "2-4:1")
        self.refused(2, "node 4 does not exist, the cluster has 4 nodes", *words, "3:4")
        self.refused(2, "expert 3 is on every gpu by --everywhere", *words, "3:0", "--everywhere", "3")
        self.refused(2, "--pin cannot be combined", *words, "3:0", "--strategy", "lazarus")
        self.refused(2, "--pin cannot be combined with expert groups", *words, "3:0", "--groups", "8")
        self.refused(10, "found no free slot: add nodes to the pins", *words, "0-8:0")
        # Numbers are those of the user, also where other experts are on every GPU.
        self.refused(2, "expert 16 does not exist, the layers have 16 experts", *words, "16:0", "--everywhere", "0")
        roomy = ["loads.jsonl", "--nodes", "4", "--gpus", "2", "--slots", "6", "-o", "p", "--pin"]
        self.refused(10, "expert 15 needs replicas on 2 failure units, but node 1 has 1", *roomy, "15:1", "--everywhere", "0",
                     "--faults", "1")

    def test_best_keeps_groups_on_a_node(self):
        words = ["loads.jsonl", *CLUSTER, "--groups", "8"]
        grouped = self.result(*words, "-o", "p.json")["plan"]
        for layer in self.read("p.json")["layers"]:
            nodes = [{expert // 2 for expert in held} for held in layer["placement"]]
            self.assertEqual([len(groups) for groups in nodes], [2] * 4)
            self.assertEqual(sorted(group for groups in nodes for group in groups), list(range(8)))
        theirs = self.result(*words, "--strategy", "eplb+")["plan"]["metrics"]
        self.assertLessEqual(grouped["metrics"]["imbalance_mean"], theirs["imbalance_mean"] + 1e-9)
        free = self.result(*words, "--policy", "global")["plan"]["metrics"]
        self.assertLess(free["imbalance_mean"], grouped["metrics"]["imbalance_mean"])
        # From its own plan with the same counts nothing moves.
        again = self.result(*words, "--old", "p.json", "-o", "q.json")["plan"]
        self.assertEqual(again["migration"]["transfers"], 0)
        self.refused(2, "--max-moves and --target-balance cannot be combined with expert groups", *words, "--old", "p.json", "--max-moves", "3", "-o", "r")
        self.refused(10, "16 experts in 6 groups on 4 nodes", "loads.jsonl", *CLUSTER, "--groups", "6", "--policy",
                     "hierarchical", "-o", "r")
        self.refused(10, "16 experts are not a multiple of 6 groups", "loads.jsonl", *CLUSTER, "--groups", "6", "--policy",
                     "hierarchical", "--strategy", "eplb+", "-o", "r")
        self.refused(10, "leave out --faults or --groups", *words, "--faults", "1", "-o", "r")
        # Groups that do not divide are left out where nothing asks for them.
        self.plan("--groups", "6")


class Shown(Case):
    def test_tables_fit_a_hundred_columns(self):
        self.plan("--strategy", "eplb", "--at", "0", "-o", "p.json")
        self.write("nodes.csv", NODES + "9000,remove,n1\n9000,remove,n2\n9900,add,m1\n")
        self.write("wide.jsonl", jsonl([[[value * 10**10 for value in layer] for layer in record] for record in trace()]))
        huge = ["--nodes", "4", "--gpus", "2", "--slots", "4", "--expert-bytes", "900GiB"]
        for words in (["compare", "loads.jsonl", *CLUSTER, "--old", "p.json", "--faults", "1"],
                      ["compare", "wide.jsonl", *huge, "--old", "p.json", "--node-failure", "0.01"],
                      ["wide.jsonl", *huge, "--strategy", "lazarus", "--old", "p.json", "--node-failure", "0.01"],
                      ["loads.jsonl", *CLUSTER, "--strategy", "hecate", "--old", "p.json"],
                      ["loads.jsonl", "--nodes", "40", "--gpus", "1", "--slots", "16", "--strategy", "spread"],
                      ["simulate-failures", "wide.jsonl", "nodes.csv", *huge, "--compare"],
                      ["simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--strategy", "vanilla"],
                      ["evaluate", "p.json", "loads.jsonl"]):
            lines = self.run_in(*words).stdout.splitlines()
            self.assertLessEqual(max(map(len, lines)), 100, max(lines, key=len))
            self.assertFalse([line for line in lines if line != line.rstrip()])

    def test_a_comparison_has_every_strategy(self):
        done = self.compare("--faults", "1")
        rows = re.findall(r"^(\S+) +\d+\.\d{3} ", done.stdout, re.M)
        self.assertEqual(tuple(rows), STRATEGIES)

    def test_help_says_what_there_is(self):
        text = self.run_in("--help").stdout
        self.assertTrue(text.startswith("Examples:"))
        for flag in ("--cluster", "--nodes", "--gpus", "--slots", "--strategy", "--old", "-o, --output", "--format",
                     "compare", "simulate-failures", "evaluate", "--faults", "--at", "--window", "--layers", "--objective",
                     "--html", "--json"):
            self.assertRegex(text, rf"(?m)^  {re.escape(flag)}\b")
        for name in STRATEGIES + FORMATS:
            self.assertIn(name, text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_the_examples_of_the_help_run(self):
        texts = [self.run_in(*words, "--help").stdout.split("Usage:")[0]
                 for words in ([], ["compare"], ["simulate-failures"], ["evaluate"])]
        self.plan("-o", "plan.json")
        self.plan("-o", "theirs.json")
        self.write("cluster.json", {"nodes": 4, "gpus": 2, "slots": 4})
        self.write("nodes.csv", NODES)
        examples = re.findall(r"^  moe-replace (.*)$", "".join(texts), re.M)
        self.assertGreaterEqual(len(examples), 5)
        for example in examples:
            self.run_in(*example.split(), *(["--force"] if "-o" in example else []))


class FailureSimulations(Case):
    def test_failures_are_simulated(self):
        self.write("nodes.csv", NODES + "5000,remove,n2\n6000,remove,n0\n6000,remove,n1\n7000,add,a\n7000,add,b\n"
                                        "8000,add,c\n")
        done = self.simulate("--strategy", "lazarus", "--faults", "1", "--json")
        result = json.loads(done.stdout)["result"]["strategies"][0]
        self.assertEqual([step["nodes_live"] for step in result["steps"]], [4, 3, 1, 3, 4])
        self.assertEqual([step["state"] for step in result["steps"]],
                         ["started", "migrated", "stalled", "restored", "migrated"])
        self.assertEqual((result["failures"], result["survived"], result["restores"]), (2, 1, 1))
        self.assertEqual(result["stalled_milliseconds"], 1000)
        self.assertEqual(result["bytes"], result["transfers"] * 14_000_000)
        text = self.simulate("--strategy", "lazarus", "--faults", "1").stdout
        self.assertIn("1 moment with something lost or no plan", text)

    def test_one_table_tells_the_trouble_of_all_strategies(self):
        self.write("nodes.csv", NODES + "5000,remove,n2\n6000,add,m\n7000,remove,n1\n")
        text = self.simulate("--compare").stdout
        self.assertEqual(text.count("INCIDENT"), 1)
        self.assertEqual(tuple(re.findall(r"^(\S+) +2 +\d ", text, re.M)), STRATEGIES)

    def test_quiet_runs_are_told_so(self):
        self.write("nodes.csv", NODES)
        text = self.simulate("--strategy", "lazarus").stdout
        self.assertIn("Nothing was lost", text)

    def test_the_page_has_a_timeline(self):
        self.write("nodes.csv", NODES + "2000,remove,n3\n3000,remove,n2\n4000,remove,n1\n5000,add,<m>\n")
        for words, titles in ((("--strategy", "lazarus"), ["Balance", "Nodes", "Timeline", "Events"]),
                              (("--compare",), ["Strategies", "Balance", "Nodes", "Timeline", "Events"])):
            with self.subTest(words):
                self.simulate(*words, "--html", "page.html", "--force")
                page = (self.work / "page.html").read_text()
                self.assertEqual(re.findall("<h2>(.*?)</h2>", page), titles)
                self.assertNotIn("<script", page)
                self.assertNotIn("<m>", page)
                self.assertEqual(page.count("node left"), 3)
                self.assertIn("no plan: ", page)  # one node is not enough

    def test_plans_follow_the_loads(self):
        self.write("nodes.csv", NODES + "3000,add,n0\n".replace("n0", "m") + "")
        self.write("nodes.csv", NODES + "2000,remove,n3\n3000,add,m\n")
        result = self.result("simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--strategy", "lazarus",
                             "--iteration-seconds", "0.01", "--rebalance-every", "100")["strategies"][0]
        self.assertEqual([step["iteration"] for step in result["steps"]], [0, 100, 200, 300])
        self.assertEqual([step["milliseconds"] for step in result["steps"]], [0, 1000, 2000, 3000])

    def test_what_no_cluster_could_hold_is_refused(self):
        self.write("nodes.csv", NODES)
        self.refused(10, "the largest --faults is 1", "simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--strategy",
                     "lazarus", "--faults", "2")
        self.refused(10, "experts do not fit", "simulate-failures", "loads.jsonl", "nodes.csv", "--nodes", "4", "--gpus", "1",
                     "--slots", "2")

    def test_nodes_must_be_known(self):
        self.write("c.json", {"nodes": [{"name": "a"}, {"name": "b"}], "gpus": 2, "slots": 8})
        self.write("nodes.csv", "0,add,a\n0,add,b\n5,remove,zebra\n")
        self.refused(4, 'node "zebra" is not in the cluster', "simulate-failures", "loads.jsonl", "nodes.csv", "--cluster",
                     "c.json", "--strategy", "eplb")
        self.write("nodes.csv", NODES + "0,add,n4\n")
        self.refused(4, 'node "n4": all 4 nodes', "simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--strategy",
                     "eplb")

    def test_bad_lines_are_named(self):
        for text, part in (("0,add\n", "nodes.csv:1: milliseconds,add|remove,node expected"),
                           ("0,add,a\nx,add,b\n", 'nodes.csv:2: "x" is not a number'),
                           ("0,join,a\n", '"join" is neither add nor remove'),
                           ("5,add,a\n4,add,b\n", "time runs backward"),
                           ("0,add,a\n1,add,a\n", 'node "a"'), ("", "nodes.csv")):
            self.write("nodes.csv", text)
            self.refused(4, part, "simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, "--strategy", "eplb")


if __name__ == "__main__":
    main(__name__)
