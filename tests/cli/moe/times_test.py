#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: times and memory of plans, compared with the formulas of docs/placement.md.

Usage: times_test.py BIN MPIRUN
"""

import math

from command import CLUSTER, LAYERS, LINKS, TIMES, Case, main, trace

NODES, GPUS = 4, 2  # of CLUSTER
PARAM_BYTES = 14_000_000 // 7
GPU_RATE, NODE_RATE = 100e9, 10e9  # of LINKS
FLOPS, TOKEN_BYTES, NONMOE = 1e14, 2048, 0.001  # of TIMES


def layer_times(gpus, tokens):
    """Experts and AllToAll of a layer where each expert is on one GPU."""
    own = [sum(tokens[e] for e in gpu if e >= 0) for gpu in gpus]
    gpu_in = [load / (NODES * GPUS) * (GPUS - 1) for load in own]
    gpu_out = [0.0] * len(gpus)
    node_in, node_out = [0.0] * NODES, [0.0] * NODES
    for gpu, load in enumerate(own):
        node = gpu // GPUS
        for other in range(node * GPUS, node * GPUS + GPUS):
            gpu_out[other] += load / (NODES * GPUS) if other != gpu else 0
        for other in range(NODES):
            part = load / NODES if other != node else 0
            node_in[node] += part
            node_out[other] += part
    links = max(max(gpu_in + gpu_out) / GPU_RATE, max(node_in + node_out) / NODE_RATE)
    return 3 * max(own) * PARAM_BYTES / FLOPS, 4 * links * TOKEN_BYTES


class Times(Case):
    def timed(self, *words, **more):
        return self.result("loads.jsonl", *CLUSTER, *LINKS, *TIMES, *words, **more)["plan"]

    def test_plain_expert_parallelism(self):
        plan = self.timed("--strategy", "vanilla", "-o", "p.json")
        total = 3 * NONMOE * LAYERS
        for layer, found in zip(self.read("p.json")["layers"], plan["times"]["layers"]):
            self.assertEqual(found["layer"], layer["layer"])
            experts, all_to_all = layer_times(layer["devices"], layer["loads"])
            self.assertAlmostEqual(found["expert_seconds"], experts, delta=1e-9 * experts)
            self.assertAlmostEqual(found["all_to_all_seconds"], all_to_all, delta=1e-9 * all_to_all)
            self.assertEqual((found["gather_seconds"], found["exposed_seconds"], found["speedup"]), (0, 0, 1))
            total += experts + all_to_all
        self.assertAlmostEqual(plan["times"]["seconds"], total, delta=1e-9 * total)
        self.assertEqual(plan["times"]["speedup"], 1)
        self.assertEqual(plan["memory"]["gpu"], plan["memory"]["vanilla_gpu"])
        # Two experts of each layer on every GPU, with gradients of the size of the weights.
        self.assertEqual(plan["memory"]["gpu"], {"weight_bytes": 12 * PARAM_BYTES, "gradient_bytes": 12 * PARAM_BYTES,
                                                 "optimizer_bytes": 12 * 12_000_000, "bytes": 12 * 16_000_000})

    def test_copies(self):
        plan = self.timed("--strategy", "hecate", "--overlap", "16", "-o", "p.json")
        slower = self.result("loads.jsonl", *CLUSTER, *LINKS, *TIMES[:4], "--strategy", "hecate", "--overlap", "16")
        times, slower, ratios = plan["times"], slower["plan"]["times"], []
        for volumes, layer, bare in zip(plan["volumes"], times["layers"], slower["layers"]):
            # Every expert passes each link at most once.
            self.assertLessEqual(layer["gather_seconds"], volumes["bound_experts"] * PARAM_BYTES / NODE_RATE * (1 + 1e-9))
            self.assertGreaterEqual(layer["gather_seconds"], max(volumes["gather_in_experts"]) * PARAM_BYTES / GPU_RATE / 2)
            self.assertEqual(layer["reduce_seconds"], layer["gather_seconds"])
            first, second = layer["gather_seconds"] - NONMOE, layer["gather_seconds"] - 2 * NONMOE
            self.assertAlmostEqual(layer["exposed_seconds"], max(0, first) + max(0, second), delta=1e-12)
            self.assertAlmostEqual(bare["exposed_seconds"], 2 * layer["gather_seconds"], delta=1e-12)
            self.assertGreaterEqual(layer["rematerialized_seconds"], layer["seconds"])
            ratios.append(layer["speedup"])
        self.assertAlmostEqual(times["layer_speedup_mean"], math.exp(sum(map(math.log, ratios)) / LAYERS), delta=1e-9)
        self.assertAlmostEqual(times["speedup"], times["vanilla_seconds"] / times["seconds"], delta=1e-9)
        memory = plan["memory"]
        self.assertLess(memory["rematerialized_gpu"]["bytes"], memory["gpu"]["bytes"])
        self.assertEqual(memory["rematerialized_gpu"]["gradient_bytes"], memory["gpu"]["gradient_bytes"])
        copies = [[sum(e >= 0 and e not in own for e in gpu) for gpu, own in zip(layer["devices"], layer["owners"])]
                  for layer in self.read("p.json")["layers"]]
        owned = [sum(sum(e >= 0 for e in layer["owners"][gpu]) for layer in self.read("p.json")["layers"])
                 for gpu in range(NODES * GPUS)]
        whole = max(owned[gpu] * 16_000_000 + (sum(layer[gpu] for layer in copies) + max(layer[gpu] for layer in copies))
                    * PARAM_BYTES for gpu in range(NODES * GPUS))
        self.assertEqual(memory["gpu"]["bytes"], whole)

    def test_every_strategy_has_times(self):
        rows = self.result("compare", "loads.jsonl", *CLUSTER, *LINKS, *TIMES)["strategies"]
        plain = next(row for row in rows if row["strategy"] == "vanilla")["times"]["seconds"]
        for row in rows:
            if "reason" not in row:
                self.assertEqual(row["times"]["vanilla_seconds"], plain)
                self.assertEqual(len(row["times"]["layers"]), LAYERS)
                self.assertIn("memory", row)
        text = self.compare(*LINKS, *TIMES).stdout
        self.assertRegex(text, r"(?m)^STRATEGY +MS +EXPERTS +ALL-TO-ALL +EXPOSED +DROPPED +SPEED-UP +LAYERS +MEMORY$")
        self.assertTrue(all(len(line) <= 100 for line in text.splitlines()), text)

    def test_lines(self):
        text = self.plan(*LINKS, *TIMES, "--strategy", "hecate", "--overlap", "4").stdout
        self.assertRegex(text, r"\ntime      \d+\.\d{3} ms per iteration, 18\.000 of it in other layers\n"
                               r"          experts \d+\.\d{3}, all-to-all \d+\.\d{3}, copies and gradients \d+\.\d{3}\n"
                               r"          \d+\.\d\d times as fast as vanilla; MoE layers \d+\.\d\d to \d+\.\d\d times, "
                               r"\d+\.\d\d in the geometric mean\n"
                               r"          \d+\.\d{3} ms if copies are dropped after each layer\n"
                               r"memory    \S+ MiB on the fullest gpu: weights \S+ MiB, gradients \S+ MiB, optimizer \S+ MiB\n"
                               r"          \S+ MiB if copies are dropped after each layer; \S+ MiB with vanilla\n")
        self.assertTrue(all(len(line) <= 100 for line in text.splitlines()), text)

    def test_plans_from_files_and_from_a_cluster_file(self):
        planned = self.timed("--strategy", "lazarus", "-o", "p.json")
        self.assertEqual(self.result("evaluate", "p.json", "loads.jsonl", *TIMES)["plan"]["times"], planned["times"])
        self.write("c.json", {"nodes": NODES, "gpus": GPUS, "slots": 4, "expert_bytes": "14MB",
                              "bandwidth": {"gpu": GPU_RATE, "node": NODE_RATE}})
        found = self.result("loads.jsonl", "--cluster", "c.json", *TIMES, "--strategy", "lazarus")["plan"]
        self.assertEqual(found["times"], planned["times"])

    def test_counts_are_those_of_the_measured_iteration(self):
        plan = self.timed("--strategy", "vanilla", "--measured-at", "0", "-o", "p.json")
        first = trace()[0]
        for layer, tokens, found in zip(self.read("p.json")["layers"], first, plan["times"]["layers"]):
            self.assertAlmostEqual(found["expert_seconds"], layer_times(layer["devices"], tokens)[0], delta=1e-9)

    def test_several_iterations_are_timed_as_their_mean(self):
        self.write("twice.jsonl", '{"iteration": 0, "tokens": [[8, 16]]}\n{"iteration": 1, "tokens": [[8, 32]]}\n')
        words = ["twice.jsonl", "--nodes", "1", "--gpus", "2", "--slots", "1", "--expert-bytes", "14MB", *LINKS, *TIMES]
        found = self.result(*words, "--window", "2", "--strategy", "vanilla")["plan"]["times"]["layers"][0]
        self.assertAlmostEqual(found["expert_seconds"], 3 * 24 * PARAM_BYTES / FLOPS, delta=1e-15)

    def test_dispatch(self):
        shares = [self.timed("--strategy", "eplb", "--dispatch", rule)["times"] for rule in ("proportional", "topology")]
        self.assertLess(sum(layer["all_to_all_seconds"] for layer in shares[1]["layers"]),
                        sum(layer["all_to_all_seconds"] for layer in shares[0]["layers"]))
        self.assertNotEqual([layer["expert_seconds"] for layer in shares[0]["layers"]],
                            [layer["expert_seconds"] for layer in shares[1]["layers"]])

    def test_missing_inputs(self):
        flops, token = ["--gpu-flops", "1e14"], ["--token-bytes", "2048"]
        self.plan("-o", "old.json")
        for part, words in (
                ("--gpu-flops requires --token-bytes", ["loads.jsonl", *CLUSTER, *LINKS, *flops]),
                ("--token-bytes requires --gpu-flops", ["loads.jsonl", *CLUSTER, *LINKS, *token]),
                ("--dispatch requires --gpu-flops", ["loads.jsonl", *CLUSTER, *LINKS, "--dispatch", "topology"]),
                ("the bandwidth between GPUs of a node: pass --gpu-bandwidth", ["loads.jsonl", *CLUSTER, *flops, *token]),
                ("the bandwidth between nodes: pass --node-bandwidth", ["loads.jsonl", *CLUSTER, *LINKS[:2], *flops, *token]),
                ("the size of an expert: pass --expert-bytes", ["loads.jsonl", *CLUSTER[:6], *LINKS, *flops, *token]),
                ("the bandwidth between GPUs of a node", ["evaluate", "old.json", "loads.jsonl", *flops, *token]),
                ("--nonmoe-seconds requires --gpu-flops", ["evaluate", "old.json", "loads.jsonl", "--nonmoe-seconds", "1"]),
                ("--gpu-bandwidth requires --nodes, --gpus and --slots", ["evaluate", "old.json", "loads.jsonl", *LINKS]),
                ("--node-bandwidth cannot be combined with --cluster",
                 ["loads.jsonl", "--cluster", "c.json", "--node-bandwidth", "1GB/s"]),
                ("--nonmoe-seconds cannot be combined with --strategy best",
                 ["loads.jsonl", *CLUSTER, *LINKS, "--nonmoe-seconds", "1"])):
            with self.subTest(part):
                self.refused(2, part, *words)


if __name__ == "__main__":
    main(__name__)
