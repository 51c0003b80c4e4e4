#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: every format that it reads and writes, and every bad input by its exit code and message.

Usage: inputs_test.py BIN MPIRUN
"""

import json
import pathlib
import random
import struct
import sys

from command import CLUSTER, EXPERTS, FORMATS, LAYERS, Case, Places, jsonl, main, trace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))
import ptfile  # noqa: E402  pylint: disable=wrong-import-position,import-error


def safetensors(path, tensors):
    """A file of lists of int64 by name."""
    header, data = {}, b""
    for name, values in tensors.items():
        more = struct.pack(f"<{len(values)}q", *values)
        header[name] = {"dtype": "I64", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def long_tensor(values, shape):
    return ptfile.tensor("LongStorage", struct.pack(f"<{len(values)}q", *values), shape, 8)


def flat(nested):
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


class Loads(Case):
    """Every format gives the same token counts as this project's own, so the same plan comes out."""

    def setUp(self):
        super().setUp()
        self.records = trace()
        self.plan("--strategy", "eplb", "-o", "wanted.json")
        self.wanted = [layer["loads"] for layer in self.read("wanted.json")["layers"]]
        self.assertEqual(self.wanted, self.records[-1])

    def same(self, loads, form, *words):
        result = self.result(loads, *CLUSTER, "--strategy", "eplb", "--window", "1", "-o", "p.json", "--force", *words)
        self.assertEqual(result["format"], form)
        self.assertEqual([layer["placement"] for layer in self.read("p.json")["layers"]],
                         [layer["placement"] for layer in self.read("wanted.json")["layers"]], form)
        return result

    def test_matrices_and_objects(self):
        self.same(self.write("m.json", self.records[-1]), "json")
        self.same(self.write("r.json", self.records), "json")
        self.same(self.write("o.json", json.dumps({"iteration": 7, "tokens": self.records[-1]}, indent=1)), "json")
        self.same("wanted.json", "json")

    def test_csv(self):
        rows = "".join(",".join(map(str, layer)) + "\n" for layer in self.records[-1])
        self.same(self.write("wide.csv", "# by layer\n" + rows), "csv")
        lines = ["step,rank,layer,expert,count"]
        for layer, counts in enumerate(self.records[-1]):
            for expert, count in enumerate(counts):
                # Counts of the ranks are added.
                lines += [f"3,0,{layer},{expert},{count // 3}", f"3,1,{layer},{expert},{count - count // 3}"]
        result = self.same(self.write("long.csv", "\r\n".join(lines)), "csv")
        self.assertEqual(result["iteration"], 3)

    def test_sglang(self):
        steps = [*self.records, [[0] * EXPERTS] * LAYERS]  # a row of the ring that no pass has filled
        self.same(self.write("s.json", {"rank": 0, "logical_count": steps}), "sglang", "--at", "3")
        counts = struct.pack(f"<{len(flat(steps))}i", *flat(steps))
        tensor = ptfile.tensor("IntStorage", counts, (len(steps), LAYERS, EXPERTS), 4)
        ptfile.save(self.work / "s.pt", {"rank": 0, "logical_count": tensor,
                                         "average_utilization_rate_over_window": None})
        self.same("s.pt", "sglang")

    def test_vllm(self):
        # Physical experts: each expert once, expert 0 a second time.
        maps = [[*range(EXPERTS), 0]] * LAYERS
        lines = [{"record_type": "eplb_load_meta", "version": 1, "num_ranks": 1}]
        for step, record in enumerate(self.records):
            load = [[*counts, counts[0] // 4] for counts in record]
            for row in load:
                row[0] -= row[-1]
            lines.append({"record_type": "eplb_load_stats", "version": 1, "step": 10 * step, "num_ranks": 1,
                          "expert_load": load, "p2l_map": maps})
        self.same(self.write("v.jsonl", "".join(json.dumps(line) + "\n" for line in lines)), "vllm")

    def test_tensorrt_llm(self):
        folder = self.work / "statistics"
        folder.mkdir()
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": 2}))
        for rank in (0, 1):
            safetensors(folder / f"rank{rank}.safetensors", {
                f"{50 + step}_{layer}": [count // 2 if rank else count - count // 2 for count in counts]
                for step, record in enumerate(self.records) for layer, counts in enumerate(record)})
        result = self.same("statistics", "tensorrt-llm")
        self.assertEqual((result["iteration"], result["records"]), (53, 4))
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": 99}))
        self.refused(4, "99 experts in meta_info.json, found 16", "statistics", *CLUSTER)

    def test_counters_of_a_checkpoint(self):
        folder = self.work / "ckpt" / "global_step8"
        folder.mkdir(parents=True)
        (self.work / "ckpt" / "latest").write_text("global_step8\n")
        shares = [[[c // 3 for c in counts] for counts in self.records[-1]],
                  [[c - c // 3 for c in counts] for counts in self.records[-1]]]
        for rank, share in enumerate(shares):
            module = {f"model.layers.{layer}.mlp.tokens_per_expert": long_tensor(counts, (EXPERTS,))
                      for layer, counts in enumerate(share)}
            ptfile.save(folder / f"mp_rank_0{rank}_model_states.pt", {"module": module, "global_steps": 8})
        done = self.run_in("ckpt", *CLUSTER, "--strategy", "eplb", "-o", "p.json")
        self.assertIn("counters differ between ranks, so they were added up", done.stderr)
        result = self.same("ckpt", "checkpoint")
        self.assertEqual(result["iteration"], 8)
        for path in folder.iterdir():
            ptfile.save(path, {"module": {"w": long_tensor([1], (1,))}})
        self.refused(4, "no token counters in 2 model files", "ckpt", *CLUSTER)


class Plans(Case):
    """Every format that is written is read back as the same plan."""

    def test_formats_measure_the_same(self):
        wanted = self.result("loads.jsonl", *CLUSTER, "--strategy", "eplb+")["plan"]
        for form in FORMATS:
            self.plan("--strategy", "eplb+", "--format", form, "-o", form)
            found = self.result("evaluate", form, "loads.jsonl", *CLUSTER)["plan"]
            self.assertEqual((found["strategy"], found["file"]), (form, form))
            self.assertEqual(found["metrics"], wanted["metrics"], form)
            self.assertEqual(found["recovery"], wanted["recovery"], form)

    def test_formats_are_old_plans_too(self):
        for form in FORMATS:
            self.plan("--strategy", "eplb+", "--format", form, "-o", form)
            moves = self.result("loads.jsonl", *CLUSTER, "--strategy", "eplb+", "--old", form)["plan"]["migration"]
            self.assertEqual(moves["transfers"], 0, form)

    def test_layers_of_a_plan_are_those_of_the_recording(self):
        rows = [f"{layer},{e},{count}\n" for layer, counts in enumerate(trace()[-1], 3) for e, count in enumerate(counts)]
        self.write("c.csv", "layer,expert,tokens\n" + "".join(rows))
        part = ["--layers", "4,6", "--strategy", "eplb+"]
        for form in FORMATS:
            self.run_in("c.csv", *CLUSTER, "--strategy", "eplb+", "--format", form, "-o", form)
            moves = self.result("c.csv", *CLUSTER, *part, "--old", form)["plan"]["migration"]
            self.assertEqual(moves["transfers"], 0, form)
            found = self.result("evaluate", form, "c.csv", *CLUSTER, "--layers", "4,6")["plan"]["metrics"]
            self.assertEqual(found, self.result("c.csv", *CLUSTER, *part)["plan"]["metrics"], form)
        self.write("more", [list(range(EXPERTS)) * 2] * (LAYERS + 1))
        self.refused(4, "more: plan: 7 layers without layer numbers, the token counts have 6", "c.csv", *CLUSTER, "--old", "more")

    def test_a_plan_tells_its_own_cluster(self):
        for form in ("plan", "eplb"):
            self.plan("--strategy", "eplb", "--format", form, "-o", form)
            result = self.result("evaluate", form, "loads.jsonl")
            self.assertEqual((result["nodes"], result["gpus"], result["live_slots"]), (4, 8, 32))
        self.plan("--strategy", "eplb", "--format", "vllm", "-o", "v")
        self.refused(2, "does not describe its cluster", "evaluate", "v", "loads.jsonl")
        self.refused(4, "v is a plan; the arguments may be swapped: pass PLAN first", "evaluate", "loads.jsonl", "v", *CLUSTER)

    def test_a_map_of_sglang_in_a_tensor(self):
        self.plan("--strategy", "eplb", "--format", "sglang", "-o", "p.json")
        rows = self.read("p.json")["physical_to_logical_map"]
        ptfile.save(self.work / "p.pt", {"physical_to_logical_map": long_tensor(flat(rows), (LAYERS, len(rows[0])))})
        self.assertEqual(self.result("evaluate", "p.pt", "loads.jsonl", *CLUSTER)["plan"]["metrics"],
                         self.result("evaluate", "p.json", "loads.jsonl", *CLUSTER)["plan"]["metrics"])

    def test_what_a_format_cannot_say(self):
        for form in ("eplb", "sglang", "vllm", "tensorrt-llm", "vllm-ascend"):
            # Fifteen slots do not divide among two gpus.
            self.write("c.json", {"nodes": [{"gpus": [9, 10]}]})
            self.refused(9, "the format requires the same number on every gpu", "loads.jsonl", "--cluster", "c.json", "--format",
                         form, "-o", "p")
        # One hot expert, so that eplb puts it on a gpu twice.
        self.write("hot.json", [[1000] + [1] * 7])
        short = ["--nodes", "1", "--gpus", "2", "--slots", "8", "--strategy", "eplb"]
        self.refused(9, "occurs twice on rank", "hot.json", *short, "--format", "vllm-ascend", "-o", "p")
        done = self.run_in("hot.json", *short, "--format", "vllm", "-o", "v")
        self.assertIn("the second copy wastes memory", done.stderr)

    def test_slots_without_another_expert_are_filled(self):
        self.write("few.json", [[5, 3], [5, 3, 2, 1, 1, 1, 4, 4]])
        self.write("pins.json", [[5, 3, 1, 1]])
        for name, slots, words in (("few.json", 4, []), ("pins.json", 6, []),
                                   ("pins.json", 3, ["--pin", "0,1:0", "--pin", "2:1"])):
            words = [name, "--nodes", "2", "--gpus", "1", "--slots", slots, *words]
            for form in ("sglang", "tensorrt-llm"):
                done = self.run_in(*words, "--format", form, "-o", "p", "--force")
                self.assertRegex(done.stderr, f"warning: filled [0-9]+ slots? with an expert that the gpu already holds: the "
                                              f"format requires {slots} experts on every gpu")
                self.assertNotIn("wastes memory", done.stderr)
                moves = self.result(*words, "--old", "p")["plan"]["migration"]
                self.assertEqual((moves["transfers"], moves["lost"]), (0, []))
        self.refused(9, "the format requires the same number on every gpu", "few.json", "--nodes", "2", "--gpus", "1",
                     "--slots", "4", "--format", "vllm-ascend", "-o", "q")

    def test_a_part_of_the_model_is_told(self):
        for form in ("eplb", "vllm", "tensorrt-llm"):
            done = self.plan("--strategy", "eplb", "--layers", "2-3", "--format", form, "-o", form)
            self.assertIn("the reader needs all MoE layers, these are 2 of 6", done.stderr)
        done = self.plan("--strategy", "eplb", "--layers", "2-3", "--format", "sglang", "-o", "s")
        self.assertIn("4 layers without a plan", done.stderr)
        self.assertEqual(len(self.read("s")["physical_to_logical_map"]), LAYERS)


class Logs(Case):
    def test_a_log_of_a_restarted_training(self):
        """1 to 7, then from 6 on again, and killed within a line: as the log of a training that was never interrupted."""
        records = trace(records=10)
        lines = [json.dumps({"iteration": i + 1, "tokens": tokens}) + "\n" for i, tokens in enumerate(records)]
        stale = [json.dumps({"iteration": i, "tokens": records[0]}) + "\n" for i in (6, 7)]
        self.write("clean.jsonl", "".join(lines[:9]))
        self.write("resumed.jsonl", "".join(lines[:5] + stale + lines[5:9]) + lines[9][:30])
        for words in (["--at", "9"], ["--at", "7", "--window", "7"], ["--window", "9"]):
            plans = []
            for name in ("clean", "resumed"):
                done = self.run_in(f"{name}.jsonl", *CLUSTER, *words, "-o", f"{name}.json", "--force")
                plans.append(self.read(f"{name}.json"))
            self.assertEqual(*[plan["layers"] for plan in plans])
            self.assertIn("warning: resumed.jsonl:8: iteration 6 occurs again, as after a restart of training: earlier lines "
                          "of iterations from 6 on are ignored\n", done.stderr)
            self.assertIn("warning: resumed.jsonl:12: the last line is truncated and is ignored\n", done.stderr)
        self.write("torn.jsonl", lines[0] + lines[1][:30] + "\n" + lines[2])
        self.refused(4, "torn.jsonl:2: line 1, column", "torn.jsonl", *CLUSTER, "-o", "p")


class BadInput(Case):
    def test_loads(self):
        for code, part, text in (
                (4, "is empty", ""), (4, "layer 0 expert 1: negative", "[[1,-2]]"),
                (4, 'cannot read "NaN"', "[[1,NaN]]"),
                (4, "layer 0 expert 0: more than", "[[1e300]]"), (4, "more than", "[[9007199254740992,1]]"),
                (4, "expected lists of counts, found a list of objects", '[{"iteration":1,"tokens":[[1,2]]}]'),
                (4, "a count expected, found a text", '[["1"]]'), (4, "layer 0: no experts", "[[]]"),
                (4, "no token counts: expected one of tokens", '{"token":[[1]]}'), (4, 'key "tokens" appears twice',
                                                                     '{"tokens":[[1]],"tokens":[[2]]}'),
                (4, "bad:2: line 1, column", '{"iteration":3,"tokens":[[1]]}\n{"iteration":4,"tok\n{"iteration":5,"tokens":[[1]]}'),
                (4, "bad:2: tokens: 2 layers of 2 experts, the first record has 1",
                 '{"tokens":[[1,2]]}\n{"tokens":[[1,2],[3,4]]}'),
                (4, 'layer 1 expert 1: "x" is not a count', "1,2\n3,x\n"),
                (4, "layer 0 expert 0: not a number", "layer,expert,tokens\n0,0,nan\n"),
                (8, "levels", "[" * 99), (8, "at most 4096 layers", "layer,expert,tokens\n99999,0,1\n"),
                (8, "of 65536", "[[" + "1," * 70000 + "1]]"), (8, "at most 4096 layers", json.dumps([[1]] * 5000))):
            with self.subTest(part):
                self.refused(code, part, self.write("bad", text), *CLUSTER, "-o", "p")
        self.refused(3, "gone.jsonl", "gone.jsonl", *CLUSTER, "-o", "p")
        (self.work / "bad.pt").write_bytes(b"PK\x03\x04 not a zip")
        self.refused(4, "bad.pt", "bad.pt", *CLUSTER, "-o", "p")
        (self.work / "empty").mkdir()
        self.refused(4, "no token counters", "empty", *CLUSTER, "-o", "p")

    def test_slots_by_layer(self):
        self.write("c.json", {"nodes": 2, "gpus": 2, "slots": [4, 8]})
        self.refused(4, "slots: one number for all layers expected, found a list", "loads.jsonl", "--cluster", "c.json",
                     "-o", "p")

    def test_windows(self):
        for part, words in (("layer 9", ["--layers", "9"]), ("window of 9", ["--window", "9"]),
                            ("the end of a range is before its start", ["--layers", "3-1"]),
                            ("a list of layers below", ["--layers", "a"])):
            self.refused(2, part, "loads.jsonl", *CLUSTER, *words, "-o", "p")
        self.write("late.jsonl", '{"iteration":5,"tokens":[[1,2]]}\n')
        self.refused(2, "the token counts start at iteration 5", "late.jsonl", *CLUSTER, "--at", "4", "-o", "p")
        self.refused(2, "the token counts start at iteration 5", "late.jsonl", *CLUSTER, "--measured-at", "4", "-o", "p")

    def test_zero_loads_have_a_plan(self):
        self.write("zero", [[0] * EXPERTS] * 2)
        for strategy in ("best", "lazarus", "eplb", "eplb+", "spread", "hecate"):
            self.run_in("zero", *CLUSTER, "--strategy", strategy, "-o", strategy)
            for layer in self.read(strategy)["layers"]:
                self.assertEqual({e for node in layer["placement"] for e in node}, set(range(EXPERTS)))

    def test_clusters(self):
        for code, part, cluster in (
                (4, "nodes is missing", {}), (4, 'unknown member "node"', {"node": 3}),
                (4, "gpus is missing", {"nodes": 2, "slots": 1}), (4, "slots or memory is missing", {"nodes": 2, "gpus": 2}),
                (4, "memory requires expert_bytes", {"nodes": 2, "gpus": 2, "memory": "80GB"}),
                (4, "slots cannot be combined with memory", {"nodes": 2, "gpus": 2, "slots": 1, "memory": "1GB"}),
                (4, 'the name "a" is taken', {"nodes": [{"name": "a"}, {"name": "a"}], "gpus": 2, "slots": 9}),
                (4, "id 0 is taken", {"nodes": [{"gpus": [{"id": 0, "slots": 9}, {"id": 0, "slots": 9}]}]}),
                (4, 'id "u" is taken', {"nodes": [{"gpus": [{"id": "u", "slots": 9}]}, {"gpus": [{"id": "u", "slots": 9}]}]}),
                (4, "is not a bandwidth", {"nodes": 2, "gpus": 2, "slots": 9, "bandwidth": {"gpu": "fast"}}),
                (4, "nodes", {"nodes": -1, "gpus": 2, "slots": 9}), (4, "alive", {"nodes": [{"alive": 1}], "gpus": 2, "slots": 9}),
                (8, "slots", {"nodes": 16384, "gpus": 16, "slots": 4000000}),
                (10, "do not fit", {"nodes": [{"alive": True}, {"alive": False}], "gpus": 1, "slots": 12})):
            with self.subTest(part):
                self.write("c.json", cluster)
                self.refused(code, part, "loads.jsonl", "--cluster", "c.json", "-o", "p")
        self.refused(3, "gone.json", "loads.jsonl", "--cluster", "gone.json", "-o", "p")
        self.refused(2, "no cluster: pass --cluster", "loads.jsonl", "-o", "p")
        self.refused(2, "the cluster is incomplete: add --gpus (GPUs of each node) and --slots", "loads.jsonl", "--nodes", "4", "-o", "p")
        self.refused(2, "the cluster is incomplete: add --slots (expert replicas that fit on each GPU), or pass --cluster",
                     "loads.jsonl", "--nodes", "4", "--gpus", "2", "-o", "p")
        self.refused(2, "expected at most 262144 GPUs, found 16367616", "loads.jsonl", "--nodes", "16384", "--gpus", "999", "--slots", "1")

    def test_no_plan_exists(self):
        base = ["loads.jsonl", "--gpus", "1"]
        self.refused(10, "16 experts do not fit in 2 live slots", *base, "--nodes", "2", "--slots", "1", "-o", "p")
        self.refused(10, "the largest --faults is 1", "loads.jsonl", *CLUSTER, "--faults", "2", "-o", "p")
        self.refused(10, "the largest --faults is 2", *base, "--nodes", "3", "--slots", "16", "--faults", "3", "-o", "p")
        for strategy in ("vanilla", "smartmoe", "fastermoe", "hecate"):
            # Seven slots each hold 16 experts together, but no gpu's run of experts.
            done = self.run_in(*base, "--nodes", "2", "--slots", "7", "--strategy", strategy, code=10)
            self.assertIn("do not fit", done.stderr)
        self.write("c.json", {"nodes": [{"gpus": 2}, {"gpus": 1}], "slots": 8})
        self.refused(10, "use best, or eplb+", "loads.jsonl", "--cluster", "c.json", "--strategy", "eplb", "-o", "p")
        self.refused(10, "multiple", "loads.jsonl", *CLUSTER, "--strategy", "eplb", "--groups", "3", "-o", "p")

    def test_old_plans(self):
        for part, text in (("old: plan: 1 layer without layer numbers, the token counts have 6", "[[0,1,2]]"),
                           ("old: is empty", ""), ("layer 0 slot 1: a whole number", "[[0,-7]]"),
                           ("slots", json.dumps([[0] * 5] * LAYERS)), ("not a plan: expected one of layers", "{}"),
                           ("a plan without layers", '{"layers":[]}'),
                           ("16", '{"layers":[{"layer":0,"placement":[[0,1]]}]}'),
                           ("layer 0 occurs twice", '{"layers":[{"layer":0,"placement":[[0]]},{"layer":0,"placement":[[0]]}]}'),
                           ("cannot read", "hello\n"), ("eplb_initial_mapping", '{"record_type":"x"}')):
            with self.subTest(part):
                self.write("old", text)
                self.refused(4, part, "loads.jsonl", *CLUSTER, "--old", "old", "-o", "p")
        self.refused(3, "gone", "loads.jsonl", *CLUSTER, "--old", "gone", "-o", "p")
        self.plan("--strategy", "eplb", "-o", "four.json")
        self.refused(4, "gpus", "loads.jsonl", "--nodes", "4", "--gpus", "3", "--slots", "4", "--old", "four.json")
        self.write("few.jsonl", jsonl(trace(experts=8)))
        self.refused(4, "16 experts, the token counts have 8", "few.jsonl", *CLUSTER, "--old", "four.json")

    def test_plans_of_others(self):
        self.write("p", [[e % EXPERTS for e in range(32)]] * (LAYERS - 1) + [[0] * 32])
        self.refused(4, "p: layer 5 expert 1", "evaluate", "p", "loads.jsonl", *CLUSTER)
        self.write("p", [[e % EXPERTS for e in range(40)]] * LAYERS)
        self.refused(4, "p: ", "evaluate", "p", "loads.jsonl", *CLUSTER)

    def test_the_reader_is_not_led_astray(self):
        self.write("bad", '[["\x1b[31m"]]')
        done = self.run_in("bad", *CLUSTER, code=4)
        self.assertNotIn("\x1b", done.stderr)
        name = "node\x1b[2J"
        self.write("c.json", {"nodes": [{"name": name}], "gpus": 2, "slots": 16})
        self.run_in("loads.jsonl", "--cluster", "c.json", "-o", "p.json", "--html", "r.html")
        self.assertEqual(self.read("p.json")["cluster"]["nodes"][0]["name"], name)
        page = (self.work / "r.html").read_text()
        self.assertNotIn("\x1b", page)
        self.write("c.json", {"nodes": [{"name": "</script><script>alert(1)"}], "gpus": 2, "slots": 16})
        self.run_in("loads.jsonl", "--cluster", "c.json", "--html", "r.html", "--force")
        self.assertNotIn("<script>alert", (self.work / "r.html").read_text())


def node_events(seed):
    """24 nodes from the start, then one after the other goes and comes again."""
    dice = random.Random(seed)
    there, time = [True] * 24, 0
    lines = [f"0,add,m{node}\n" for node in range(24)]
    while len(lines) < 150:
        time += dice.randrange(1000, 9000)
        node = dice.randrange(24)
        if there[node] and (sum(there) <= 16 or dice.random() < 0.3):
            continue
        there[node] = not there[node]
        lines.append(f"{time},{'add' if there[node] else 'remove'},m{node}\n")
    return "".join(lines)


class Real(Case):
    """With the token counts of a run of the project's own trainer."""

    loads = Places.source / "tests" / "data" / "deepspeed" / "routing_12x32" / "tokens.jsonl"

    def test_the_trace_of_a_real_run(self):
        result = self.result(self.loads, "--nodes", "2", "--gpus", "8", "--slots", "4", "--strategy", "eplb", "--at", "75")
        self.assertEqual((result["layers"], result["experts"], result["records"]), (12, 32, 30))
        even = result["plan"]["metrics"]["imbalance_mean"]
        self.assertLess(even, 1.5)
        vanilla = self.result(self.loads, "--nodes", "2", "--gpus", "8", "--slots", "2", "--strategy", "vanilla", "--at", "75")
        self.assertGreater(vanilla["plan"]["metrics"]["imbalance_mean"], 2 * even)

    def survived(self, loads, nodes, events, failures):
        """By strategy, after the summary of a simulation was compared with its steps."""
        survived = {}
        for strategy in ("lazarus", "spread", "compact"):
            (run,) = self.result("simulate-failures", loads, events, "--nodes", nodes, "--gpus", "1", "--slots", "8", "--faults", "1",
                                 "--strategy", strategy, "--expert-bytes", "63MiB")["strategies"]
            if failures:
                self.assertEqual(run["failures"], failures)
            self.assertEqual(run["failures"], sum(step["failure"] for step in run["steps"]))
            lost = [step for step in run["steps"] if step["failure"] and step["experts_lost"]]
            self.assertEqual(run["survived"], run["failures"] - len(lost))
            self.assertEqual(run["bytes"], run["transfers"] * 63 * 2**20)
            survived[strategy] = run["survived"]
        return survived

    def test_nodes_that_come_and_go(self):
        events = self.write("nodes.csv", node_events(3))
        removed = node_events(3).count("remove")
        survived = self.survived(self.loads, 24, events, removed)
        self.assertEqual(survived["lazarus"], removed, "any one node may fail")
        self.assertGreater(survived["lazarus"], survived["compact"])


class Published(Real):
    """The published trace and the events of real spot instances, which the project does not carry."""

    loads = Places.shared() / "fixtures" / "routing" / "gpt_moe_24x32.jsonl"

    def test_the_trace_of_a_real_run(self):
        result = self.result(self.loads, "--nodes", "2", "--gpus", "8", "--slots", "3", "--strategy", "eplb", "--at", "201")
        self.assertEqual((result["layers"], result["experts"], result["records"]), (24, 32, 51))
        self.assertLess(result["plan"]["metrics"]["imbalance_mean"], 1.3)

    def test_nodes_that_come_and_go(self):
        for name, failures in (("g4dn", 47), ("p3", 79)):
            events = Places.shared() / "fixtures" / "nodes" / f"{name}.csv"
            survived = self.survived(self.loads, 32, events, failures)
            # The order that the published runs found.
            self.assertGreater(survived["lazarus"], survived["spread"])
            self.assertGreater(survived["spread"], survived["compact"])


if not Published.loads.exists():
    del Published


if __name__ == "__main__":
    main(__name__)
