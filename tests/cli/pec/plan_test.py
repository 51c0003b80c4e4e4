#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save plan: the worked examples of the rules, plans that continue a store, usage errors, and the
same answer under a launcher of ranks.

Usage: plan_test.py BIN [MPIEXEC]
"""

import json
import unittest

import stores
from stores import ITERATIONS, MODEL, Given, Stores


def figure(layers, experts, ep, k, *words):
    """Equal experts of 100 bytes, and no other tensors unless `words` add them."""
    return ["--moe-layers", layers, "--experts", experts, "--ep", ep, "--k", k, "--expert-params",
            100, "--nonexpert-params", 0, "--param-bytes", "1,0,0", *words]


class Plan(Stores):
    def plan(self, *words, **options):
        return self.run_tool("pec-save", "plan", *words, **options)

    def tokens_file(self, *tables):
        path = self.work / "tokens.jsonl"
        with path.open("w", encoding="utf-8") as out:
            for i, table in enumerate(tables):
                out.write(json.dumps({"iteration": i + 1, "tokens": table}) + "\n")
        return path

    def said(self, *words):
        """A line of stdout begins with these words."""
        self.assertTrue(any(line.split()[:len(words)] == list(words)
                            for line in self.stdout.splitlines()), self.stdout)

    # Section 4: the figure.
    def test_sequential(self):
        result = self.plan(*figure(4, 3, 3, 1), "--checkpoints", 2)
        self.assertEqual(result["selection"], {
            "kind": "selection", "experts": 3, "k": 1, "ep": 3, "moe_layers": 4,
            "checkpoints": [{"t": 0, "layers": {"0": [0], "1": [1], "2": [2], "3": [0]}},
                            {"t": 1, "layers": {"0": [1], "1": [2], "2": [0], "3": [1]}}]})
        self.assertTrue(result["uneven"])
        self.assertEqual(result["phases"], 3)
        self.assertEqual([s["equal_rank_bytes"] for s in result["shares"]],
                         [[200, 100, 100], [100, 200, 100]])
        self.assertFalse(self.plan(*figure(4, 12, 12, 3))["uneven"])

    # Section 6.1: the trap, and the bound that the rule keeps.
    def test_two_levels(self):
        result = self.plan(*figure(2, 16, 8, 4), "--k-persist", 1, "--checkpoints", 16)
        record = result["selection"]
        self.assertEqual((record["k"], record["k_persist"]), (4, 1))
        for layer in ("0", "1"):
            persisted = []
            for one in record["checkpoints"]:
                self.assertEqual(len(one["layers"][layer]), 4)
                self.assertLessEqual(set(one["persist"][layer]), set(one["layers"][layer]))
                persisted += one["persist"][layer]
            self.assertEqual(sorted(persisted), list(range(16)))
        self.assertEqual([c["bytes"] for c in result["checkpoints"]], [200] * 16)
        self.assertEqual([c["snapshot_bytes"] for c in result["checkpoints"]], [800] * 16)
        self.assertEqual([s["level"] for s in result["shares"][:2]], ["persist", "snapshot"])
        self.assertIsNone(result["uneven"])

    # Section 5.
    def test_load_aware(self):
        trace = self.tokens_file([[300, 200, 100, 50, 25, 13, 6, 3]], [[100, 0, 0, 0, 0, 0, 0, 0]])
        words = ["--tokens", trace, "--ep", 8, "--k", 2]
        result = self.plan(*words, "--policy", "load-aware", "--checkpoints", 2)
        self.assertEqual(result["experts"], [8])
        self.assertEqual(result["selection"]["checkpoints"][0]["layers"], {"0": [0, 1]})
        risk = result["checkpoints"][0]["at_risk"]
        self.assertEqual((risk["tokens"], risk["of"]), (197, 797))
        # The same tokens again: 400 of 0, 200 of 2 in two rounds, with a version older than 1's.
        self.assertEqual(result["selection"]["checkpoints"][1]["layers"], {"0": [0, 2]})
        result = self.plan(*words, "--policy", "sequential", "--checkpoints", 4)
        self.assertEqual(result["selection"]["checkpoints"][3]["layers"], {"0": [6, 7]})
        self.plan(*words[2:], "--policy", "load-aware", "--experts", 8, code=2)
        self.assertIn("pass --tokens", self.stderr)

    # Section 7.1: DP 4, EP 2, a full save of two layers, and 7.4: start (6, 0, 2).
    def test_shares(self):
        result = self.plan(*figure(2, 2, 2, 2), "--dp", 4)
        self.assertEqual(result["shares"][0]["rank_bytes"], [100] * 4)
        dead = self.plan(*figure(2, 2, 2, 2), "--dp", 4, "--dead-ranks", "2")
        self.assertEqual(dead["shares"][0]["rank_bytes"], [200, 100, 0, 100])
        self.assertEqual(dead["dead_ranks"], [2])
        self.plan(*figure(2, 2, 2, 2), "--dp", 4, "--dead-ranks", "0,2", code=10)
        self.assertIn("all ranks that hold a copy are excluded", self.stderr)

        trace = self.tokens_file([[9, 0, 0], [9, 0, 0], [9, 0, 0], [0, 0, 9]])
        result = self.plan("--tokens", trace, "--policy", "budget-global", "--budget", 11, "--ep",
                           3, "--expert-params", 2, "--nonexpert-params", "4,3", "--param-bytes",
                           "1,0,0")
        # Two experts of 2 bytes fit next to 7: both are on rank 0.
        self.assertEqual(result["budget"]["s_total"], 2)
        self.assertEqual(result["shares"][0]["record"]["start"], [4, 0, 0])
        result = self.plan("--tokens", trace, "--policy", "budget-global", "--budget", 15, "--ep",
                           3, "--expert-params", 2, "--nonexpert-params", "4,3", "--param-bytes",
                           "1,0,0")
        share = result["shares"][0]
        self.assertEqual(share["record"], {
            "kind": "sharding", "modules": {"module 0": 4, "module 1": 3}, "start": [6, 0, 2],
            "owner": {"module 0": 1, "module 1": 2}, "bottleneck": 6})
        self.assertEqual((share["rank_bytes"], share["bound_bytes"]), ([6, 4, 5], 6))
        self.assertEqual(share["ideal_bytes"], 5)
        self.assertEqual(share["unshared_rank_bytes"], [13, 0, 2])
        self.assertAlmostEqual(share["less"]["adaptive"], 1 - 6 / 13)

    def test_large_modules_are_split(self):
        words = ["--experts", 3, "--moe-layers", 1, "--expert-params", 1, "--nonexpert-params",
                 "10,1", "--param-bytes", "1,0,0"]
        record = self.plan(*words, "--split-above", 4)["shares"][0]["record"]
        self.assertEqual(record["modules"], {"module 0[0:4]": 4, "module 0[4:7]": 3,
                                             "module 0[7:10]": 3, "module 1": 1})
        self.assertEqual(set(record["owner"].values()), {0, 1, 2})
        self.assertEqual(self.plan(*words)["shares"][0]["bottleneck_bytes"], 10)

    # Section 9.2: both ways to spend a budget.
    def test_budget(self):
        words = ["--expert-params", 1, "--nonexpert-params", 0, "--param-bytes", "1,0,0", "--ep", 4]
        trace = self.tokens_file([[40, 25, 20, 15], [70, 20, 6, 4], [10, 0, 0, 0]])
        for total, s in ((5, [3, 2, 0]), (10, [4, 4, 2])):
            result = self.plan("--tokens", trace, *words, "--policy", "budget", "--budget", total)
            record = result["budget"]["record"]
            self.assertEqual((record["s_total"], record["s"]), (total, s))
            self.assertEqual(record["popularity"][1], [70, 20, 6, 4])
            self.assertEqual([len(e) for e in record["selected"]], s)
        trace = self.tokens_file([[100, 0, 0, 0], [30, 30, 30, 10]])
        result = self.plan("--tokens", trace, *words, "--policy", "budget", "--budget", 4)
        self.assertEqual(result["budget"]["at_risk_tokens"], 40)
        self.assertEqual(result["budget"]["global_at_risk_tokens"], 10)
        self.assertEqual(result["checkpoints"][0]["at_risk"]["tokens"], 40)
        result = self.plan("--tokens", trace, "--policy", "budget", "--budget", 5, "--ep", 4,
                           "--expert-params", 1, "--nonexpert-params", 8, "--param-bytes", "1,0,0")
        self.assertEqual((result["budget"]["s_total"], result["budget"]["stall_bytes"]), (0, 3))

    # Section 9.1: the worked example. Experts of 9 GB, other modules of 7 GB.
    def test_budgets_from_bandwidths(self):
        trace = self.tokens_file([[40, 25, 20, 15], [70, 20, 6, 4], [10, 0, 0, 0]])
        words = ["--tokens", trace, "--ep", 4, "--expert-params", "900000000", "--nonexpert-params", "700000000",
                 "--param-bytes", "2,0,8", "--policy", "budget", "--iteration-time", 0.8]
        both = [*words, "--host-bandwidth", "12.5GB/s", "--network-bandwidth", "5GB/s", "--ranks-per-node", 1]
        result = self.plan(*both, "--copies", 1, "--checkpoints", 3)
        levels = result["levels"]
        self.assertEqual(levels["iteration_s"], 0.8)
        self.assertEqual({key: levels["local"][key] for key in ("bytes_per_s", "rank_bytes", "ranks", "bytes", "s_total",
                                                                "bottleneck_bytes", "stall_bytes")},
                         {"bytes_per_s": 12_500_000_000, "rank_bytes": 10**10, "ranks": 4, "bytes": 4 * 10**10,
                          "s_total": 3, "bottleneck_bytes": 18 * 10**9, "stall_bytes": 0})
        self.assertAlmostEqual(levels["local"]["seconds"], 1.44, 9)
        self.assertAlmostEqual(levels["local"]["stall_s"], 0.64, 9)
        remote = levels["remote"]
        self.assertEqual((remote["rank_bytes"], remote["expert_bytes"], remote["nonexpert_bytes"], remote["s_total"]),
                         (4 * 10**9, 9 * 10**9, 0, 1))
        self.assertEqual(result["budget"]["record"]["selected"], [[0, 1], [0], []])
        self.assertEqual(remote["checkpoints"][0],
                         {"t": 0, "layers": {"0": [0], "1": [], "2": []}, "saved_tokens": 40, "at_risk_tokens": 170})
        # In each checkpoint, the experts that are sent are in host memory.
        for sent, local in zip(remote["checkpoints"], result["selection"]["checkpoints"], strict=True):
            for layer, experts in sent["layers"].items():
                self.assertLessEqual(set(experts), set(local["layers"][layer]))
        self.assertEqual(remote["checkpoints"][1]["layers"], {"0": [], "1": [0], "2": []})
        self.assertEqual([w["send_bytes"] for w in result["copies"]["workers"]], [9 * 10**9, 0, 0, 0])
        self.said("remote", "3.73", "GiB", "4")
        self.said("0", "0", "0-1", "0", "35.7", "81.0")

        alone = self.plan(*words, "--host-bandwidth", "12.5GB/s")
        self.assertIsNone(alone["levels"]["remote"])
        self.assertEqual(alone["levels"]["local"], levels["local"])
        as_bytes = self.plan(*words[:-2], "--budget", "40GB")
        self.assertNotIn("levels", as_bytes)
        self.assertEqual(as_bytes["selection"], alone["selection"])
        # A level without room for one expert copies none, with a warning.
        few = self.plan(*words, "--host-bandwidth", "4.9GB/s", "--network-bandwidth", "1GB/s", "--ranks-per-node", 1)
        self.assertEqual((few["levels"]["local"]["s_total"], few["levels"]["remote"]["s_total"]), (0, 0))
        self.assertIn("--host-bandwidth: a budget of 14.6 GiB per iteration holds no expert of 8.38 GiB in addition to "
                      "6.52 GiB of other modules; no expert is copied to host memory", self.stderr)
        self.assertIn("no expert is sent to other nodes", self.stderr)

    # The local level continues the snapshots of a store, and the remote level its checkpoints.
    def test_budgets_continue_a_store(self):
        self.save_series(range(3, 8), "--k", 2, "--k-persist", 1, "--tokens", self.tokens_path)
        words = [self.store, "--tokens", self.tokens_path, "--policy", "budget-global"]
        stored = self.plan(*words, "--budget", "1GB")["checkpoints"][0]["at_risk"]
        result = self.plan(*words, "--iteration-time", 1, "--host-bandwidth", "1GB/s", "--network-bandwidth", "1GB/s")
        sent = result["levels"]["remote"]["checkpoints"][0]
        self.assertEqual(sent["saved_tokens"] + sent["at_risk_tokens"], stored["of"])
        self.assertLess(result["checkpoints"][0]["at_risk"]["of"], stored["of"])

    def test_wrong_uses_of_bandwidths(self):
        host = ["--policy", "budget", "--tokens", self.tokens_path, "--iteration-time", 1, "--host-bandwidth", "1GB/s"]
        for words, said in ((["--host-bandwidth", 1, "--iteration-time", 1], "--host-bandwidth requires --policy budget"),
                            (["--policy", "budget", "--host-bandwidth", 1], "--host-bandwidth requires --iteration-time"),
                            (["--policy", "budget", "--network-bandwidth", 1], "--network-bandwidth requires --host-bandwidth"),
                            (["--policy", "gradient-log", "--iteration-time", 1, "--host-bandwidth", 1], "--policy budget"),
                            (["--iteration-time", 1], "--retrieval-time or --host-bandwidth"),
                            ([*host, "--k", 1], "--k cannot be combined with --host-bandwidth"),
                            ([*host, "--budget", "1GB"], "--budget cannot be combined with --host-bandwidth"),
                            ([*host, "--dynamic-k", 0.01], "--dynamic-k cannot be combined with --host-bandwidth"),
                            ([*host, "--network-bandwidth", 1, "--dead-ranks", 0], "--dead-ranks cannot be combined"),
                            ([*host[:-2], "--host-bandwidth", "18446744073GB", "--dp", 8],
                             "the budget does not fit in 64 bits")):
            with self.subTest(words=words):
                self.plan(*words, code=2)
                self.assertIn(said, self.stderr)
        self.plan(*host, "--network-bandwidth", 1, "--dp", 16400, code=8)
        self.assertIn("--network-bandwidth: 16400 x 1 workers", self.stderr)

    # Section 9.3: even loads where the printed algorithm gives 3, 4, 2, 2, 1, 0.
    def test_copies(self):
        words = [*figure(1, 2, 2, 1), "--copies", 2, "--pp", 3, "--ranks-per-node", 1]
        copies = self.plan(*words, "--copy-bandwidth", "100")["copies"]
        self.assertEqual([w["load"] for w in copies["workers"]], [2] * 6)
        self.assertEqual(copies["workers"][0]["holders"], [1, 2])
        self.assertEqual((copies["cheap"], copies["costly"]), (6, 6))
        # One group: peers do not have the expert, which is on rank 0 of each stage.
        self.assertEqual([w["send_bytes"] for w in copies["workers"]], [200, 0] * 3)
        self.assertEqual(copies["bytes"], sum(w["receive_bytes"] for w in copies["workers"]))
        self.assertEqual(copies["longest_s"], 2)
        few = self.plan(*figure(1, 2, 2, 1), "--copies", 2, "--pp", 2, "--ranks-per-node", 3)
        self.assertEqual(few["copies"]["incomplete"], [0, 1, 2])
        self.assertIn("not placed: workers 0-2", self.stdout)
        clamped = self.plan(*figure(1, 2, 2, 1), "--copies", 5, "--ranks-per-node", 1)["copies"]
        self.assertTrue(clamped["clamped"])
        self.assertEqual(clamped["replicas"], 1)

    def test_what_zero_shares_is_not_sent(self):
        words = ["--experts", 2, "--moe-layers", 1, "--ep", 2, "--dp", 4, "--k", 1,
                 "--expert-params", 20, "--nonexpert-params", 4, "--param-bytes", "1,2,4",
                 "--copies", 1]
        for zero, per_node, sent in ((0, 1, [0] * 4), (1, 1, [6 + 60, 6, 6 + 60, 6]),
                                     (3, 1, [7 + 70, 7, 7 + 70, 7]),
                                     (0, 2, [0] * 4)):
            copies = self.plan(*words, "--zero", zero, "--ranks-per-node", per_node)["copies"]
            self.assertEqual([w["send_bytes"] for w in copies["workers"]], sent, (zero, per_node))

    # Section 9.4: 2 P |both| + 10 P |new|.
    def test_gradients(self):
        words = ["--experts", 4, "--moe-layers", 1, "--expert-params", 1000, "--param-bytes",
                 "2,0,8", "--gradients"]
        one, two = self.plan(*words, "--k", 3, "--checkpoints", 2)["gradients"]
        self.assertEqual((one["gradient_experts"], one["full_experts"]), (0, 3))
        self.assertEqual((two["gradient_experts"], two["full_experts"]), (2, 1))
        self.assertEqual((two["bytes"], two["state_bytes"]), (2 * 2000 + 10000, 30000))
        every = self.plan(*words, "--policy", "full", "--checkpoints", 4, "--full-every", 2)
        self.assertEqual([g["factor"] for g in every["gradients"]], [1, 5, 5, 1])
        gaps = self.plan(*words, "--policy", "full", "--checkpoints", 3, "--interval", 2)
        self.assertEqual([g["gradient_experts"] for g in gaps["gradients"]], [0, 0, 0])

    # Section 9.4: gradients, and states of the longest chains from the rest of the budget.
    def test_least_bytes_within_a_budget(self):
        words = ["--experts", 4, "--moe-layers", 1, "--expert-params", 1000, "--param-bytes",
                 "2,0,8", "--policy", "full", "--checkpoints", 9, "--gradients"]
        for budget, window in ((8000, 9), (16000, 4), (24000, 2)):
            sent = self.plan(*words, "--gradient-budget", budget)["gradients"]
            self.assertEqual(sent[0]["over_bytes"], 40000 - budget)
            self.assertEqual([g["over_bytes"] for g in sent[1:]], [0] * 8)
            self.assertLessEqual(max(g["bytes"] for g in sent[1:]), budget)
            self.assertEqual(sent[-1]["window"], window)
        sent = self.plan(*words, "--gradient-budget", 8000, "--interval", 4)["gradients"]
        self.assertEqual([g["gradient_bytes"] for g in sent], [0] + [4 * 8000] * 8)
        self.assertEqual(sent[-1]["window"], 36)
        sent = self.plan(*words, "--gradient-budget", 7000)["gradients"]
        self.assertEqual(sent[-1]["over_bytes"], 1000)
        self.assertIn("exceeds the budget by 1000 B", self.stdout)

    def test_a_log_beside_the_checkpoints(self):
        words = ["--experts", 8, "--moe-layers", 2, "--expert-params", 1000, "--nonexpert-params",
                 100, "--k", 2, "--dp", 16, "--ep", 8, "--policy", "gradient-log"]
        log = self.plan(*words, "--interval", 3)["log"]
        partial, full = 1400 + 4 * 14000, 1400 + 16 * 14000
        # Four of 16 experts are in the checkpoint, so that their gradients are in no log.
        self.assertEqual(log, {"bytes": 48000, "rank_bytes": 3000, "interval": 3, "window": 12,
                               "interval_bytes": partial + 3 * 48000,
                               "pays_up_to": (full - partial) // 48000})
        # No chain is longer than 6 gradients; 100 bytes of an iteration buy no state.
        result = self.plan(*words, "--interval", 3, "--full-every", 6, "--budget", 100, "--checkpoints", 4)
        self.assertEqual([sum(map(len, one["layers"].values())) for one in result["selection"]["checkpoints"]], [0, 0, 16, 0])
        self.assertEqual(result["log"]["window"], 9)
        # With 4 iterations gradients are larger than states.
        result = self.plan(*words, "--interval", 4, "--budget", 100)
        self.assertEqual((result["log"]["bytes"], result["log"]["interval_bytes"]), (0, full))
        for wrong in (["--keep", "master"], ["--param-bytes", "2,0,8"]):
            self.plan(*words, *wrong, code=2)
            self.assertIn("--policy gradient-log: gradients are replayed on", self.stderr)
        self.run_tool("pec-save", self.work / "ckpt", self.store, "--policy", "gradient-log", code=2)
        self.assertIn("use pec-save agent, or shardwright.PartialCheckpoints(..., lossless=True)", self.stderr)
        agent = ["pec-save", "agent", self.work / "ckpt", self.store]
        for wrong, said in [(["--policy", "gradient-log", "--k-persist", 1], "with --policy gradient-log, which has one K"),
                            (["--policy", "gradient-log", "--keep", "master"], "with --policy gradient-log, which has one version"),
                            (["--full-every", 9], "--full-every requires --policy gradient-log"),
                            (["--log-memory", "1MiB"], "--log-memory requires --policy gradient-log"),
                            (["--budget", "1MiB"], "--budget requires --policy budget")]:
            self.run_tool(*agent, *wrong, code=2)
            self.assertIn(said, self.stderr)

    # Section 9.5: 1000 elements of 12 bytes in 12 seconds, a bubble of 9.
    def test_bubbles(self):
        result = self.plan("--experts", 1, "--moe-layers", 1, "--expert-params", 1,
                           "--nonexpert-params", 999, "--param-bytes", "12,0,0", "--pp", 4,
                           "--micro-batches", 8, "--forward-time", 1, "--backward-time", 2,
                           "--snapshot-bandwidth", 1000, "--copies", 1, "--ranks-per-node", 1,
                           "--copy-bandwidth", "500")
        bubbles = result["bubbles"]
        self.assertEqual((bubbles["iteration_s"], bubbles["bubble_s"]), (33, 9))
        self.assertEqual(bubbles["snapshot"],
                         {"seconds": 12, "in_bubble_bytes": 9000, "outside_bubble_bytes": 3000})
        self.assertEqual(bubbles["modules"], [
            {"name": "expert 0 of layer 0", "in_bubble_bytes": 12, "outside_bubble_bytes": 0},
            {"name": "module 0", "in_bubble_bytes": 8988, "outside_bubble_bytes": 3000}])
        self.assertEqual(bubbles["stages"][3], {"before_s": 3, "between_s": 0, "after_s": 6})
        # A worker without peers: all of it is copied.
        self.assertEqual(bubbles["copies"],
                         {"seconds": 24, "in_bubble_bytes": 4500, "outside_bubble_bytes": 7500})
        chunks = self.plan("--pp", 4, "--micro-batches", 8, "--forward-time", 1,
                           "--backward-time", 2, "--chunks", 3)["bubbles"]
        self.assertEqual(chunks["bubble_s"], 3)
        self.assertEqual(chunks["snapshot"]["outside_bubble_bytes"], 0)

    # Sections 9.6, 9.7 and 8.2.
    def test_recovery(self):
        result = self.plan("--capacity", 512, "--lost-tokens", 2000)
        self.assertEqual(result["capacity_increase"], {"capacity": 512, "lost_tokens": 2000,
                                           "extra_tokens": 51, "least_iterations": 40,
                                           "iterations": 40})
        self.plan("--capacity", 9, "--lost-tokens", 2000, code=2)
        result = self.plan("--checkpoint-time", 2.7, "--retrieval-time", 5, "--iteration-time", 8)
        self.assertAlmostEqual(result["wasted"]["wasted_s"], 11.7, 12)
        result = self.plan("--retrieval-time", 0, "--iteration-time", 1, "--interval", 10)
        self.assertAlmostEqual(result["wasted"]["wasted_s"],
                               result["shares"][0]["bottleneck_bytes"] / 2**31 + 5, 9)
        words = ["--dynamic-k", 0.0375, "--interval", 10, "--iterations", 30000]
        result = self.plan(*words)["dynamic_k"]
        self.assertEqual([(d["k"], d["faults"]) for d in result["levels"]],
                         [(1, 4), (2, 9), (4, 19), (8, 57)])
        self.assertAlmostEqual(result["share"], 0.009375, 12)
        self.assertEqual(result["faults"], 89)
        self.assertEqual(self.plan(*words, "--dynamic-k-mode", "predict")["dynamic_k"]["faults"], 85)

    def test_a_store_goes_on(self):
        words = ["--k", 2, "--k-persist", 1, "--tokens", self.tokens_path]
        self.save_series(range(3, 6), *words)
        planned = self.plan(self.store, "--checkpoints", 3, *words[:4])
        for t, iteration in enumerate(range(6, 9)):
            saved = self.save(iteration, *words)
            for layer in ("0", "1"):
                record = planned["selection"]["checkpoints"][t]
                self.assertEqual(saved["layers"][layer], record["layers"][layer])
                self.assertEqual(saved["persist"][layer], record["persist"][layer])
        self.assertEqual(planned["size"]["full"]["bytes"], saved["full_bytes"])
        self.plan(self.store, "--pp", 2, "--copies", 1, code=2)
        self.plan(self.store, "--experts", 4, code=2)

    def test_a_store_and_new_tokens(self):
        words = ["--k", 1, "--policy", "load-aware", "--tokens", self.tokens_path]
        self.save_series(range(3, 8), *words)
        planned = self.plan(self.store, *words)
        self.assertEqual(max(ITERATIONS), 8)
        saved = self.save(8, *words)
        self.assertEqual(planned["selection"]["checkpoints"][0]["layers"], saved["layers"])
        self.assertEqual(planned["checkpoints"][0]["at_risk"]["tokens"],
                         saved["tokens_at_risk"]["at_risk"])
        short = self.tokens_file([[1] * MODEL.experts] * 2)
        self.plan(self.store, "--tokens", short, code=2)
        self.assertIn("the store is at 8", self.stderr)

    def test_tables(self):
        self.plan("--k", 4, "--k-persist", 2, "--keep", "master", "--dp", 128, "--zero", 1)
        self.said("full", "checkpoint")
        self.said("the", "64", "largest", "of", "128", "ranks;")
        self.assertLessEqual(max(map(len, self.stdout.splitlines())), 100)
        self.assertNotIn("copies", self.report["result"])
        self.assertNotIn("COPIES", self.stdout)
        self.plan("--k", 20)
        self.assertIn("--k 20 is above the 16 experts", self.stderr)

    def test_refusals(self):
        for words, said in (
                (["--pp", 2], "--copies or --micro-batches"), (["--chunks", 2], "--micro-batches"),
                (["--micro-batches", 8], "--forward-time"), (["--capacity", 8], "--lost-tokens"),
                (["--lost-tokens", 8], "--capacity"), (["--full-every", 2], "--gradients"),
                (["--copy-bandwidth", 2], "--copies"), (["--interval", 2], "--dynamic-k"),
                (["--iterations", 2], "--dynamic-k"), (["--checkpoint-time", 2], "--retrieval"),
                (["--dynamic-k-mode", "predict"], "--dynamic-k"), (["--ranks-per-node", 2], "--copies"),
                (["--snapshot-bandwidth", 2], "--micro-batches"),
                (["--copies", 1, "--dead-ranks", 0], "--copies cannot be combined with --dead-ranks"),
                (["--retrieval-time", 1, "--checkpoint-time", 1, "--snapshot-bandwidth", 9],
                 "--checkpoint-time"),
                (["--dead-ranks", "1-0"], "--dead-ranks"), (["--dead-ranks", "99"], "99"),
                (["--dead-ranks", "1-2-3"], "1-2-3"), (["--zero", 4], "--zero"),
                (["--k", 1, "--k-persist", 2], "--k-persist"), (["--budget", 9], "budget"),
                (["--faults", 0], "--faults"), (["--dry-run"], "--dry-run"),
                (["--persist-bandwidth", 1], "--persist-bandwidth"), (["a", "b"], "unexpected argument"),
                (["--tokens", self.tokens_path, "--experts", 4], "--tokens"),
                (["--dp", 12], "12")):
            with self.subTest(words=words):
                self.plan(*words, code=2)
                self.assertIn(said, self.stderr)
        self.plan("--checkpoints", 100000, code=8)
        self.plan("--split-above", 1, code=8)
        self.plan("--copies", 1, "--pp", 10000, code=8)
        self.plan(self.work / "nothing", code=3)
        self.run_tool("pec-save", self.store, self.store, "--zero", 1, code=2)
        self.assertIn('unknown flag "--zero"', self.stderr)


class Ranks(Stores):
    def test_two_ranks_say_the_same(self):
        if Given.mpiexec is None:
            raise unittest.SkipTest("no launcher of ranks was given")
        self.save_series(range(3, 5), "--tokens", self.tokens_path)
        words = ["plan", self.store, "--policy", "load-aware", "--checkpoints", 2, "--copies", 1,
                 "--ranks-per-node", 1]
        alone = self.run_tool("pec-save", *words)
        text = self.stdout
        both = self.run_tool("pec-save", *words,
                             launcher=[Given.mpiexec, "--oversubscribe", "-n", 2])
        self.assertEqual(both, alone)
        self.assertEqual(self.stdout, text)


if __name__ == "__main__":
    stores.main()
