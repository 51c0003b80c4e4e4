#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe-replace: token counts and maps as serving engines and scripts leave them.

Usage: forms_test.py BIN MPIRUN
"""

import json
import pathlib
import struct
import sys

from command import CLUSTER, EXPERTS, LAYERS, Case, flat, main, npy, shape_of, trace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))
import ptfile  # noqa: E402  pylint: disable=wrong-import-position,import-error

COUNTS = trace()


def tensor(values):
    numbers = flat(values)
    return ptfile.tensor("LongStorage", struct.pack(f"<{len(numbers)}q", *numbers), shape_of(values), 8)


class Forms(Case):
    def setUp(self):
        super().setUp()
        self.write("one.json", COUNTS[-1])
        self.write("all.jsonl", "".join(json.dumps({"iteration": i, "tokens": t}) + "\n" for i, t in enumerate(COUNTS)))
        self.one = self.loads_of("one.json")
        self.all = self.loads_of("all.jsonl", "--window", "all")
        self.assertNotEqual(self.one, self.all)

    def loads_of(self, name, *words, form=None, said=None):
        done = self.run_in(name, *CLUSTER, "--strategy", "eplb", *words, "-o", "p.json", "--force", "--json")
        if form:
            self.assertEqual(json.loads(done.stdout)["result"]["format"], form)
        if said:
            self.assertIn(said, done.stderr)
        return [layer["loads"] for layer in self.read("p.json")["layers"]]

    def binary(self, name, content):
        (self.work / name).write_bytes(content)
        return name

    def pt(self, name, content):
        ptfile.save(self.work / name, content)
        return name

    def test_arrays_of_numpy(self):
        self.assertEqual(self.loads_of(self.binary("a.npy", npy(COUNTS[-1])), form="npy"), self.one)
        self.assertEqual(self.loads_of(self.binary("a.npy", npy(COUNTS[-1], "<f4", "f"))), self.one)
        self.assertEqual(self.loads_of(self.binary("a.npy", npy(COUNTS, "<i4", "i"))), self.all)
        self.assertEqual(self.loads_of("a.npy", "--window", "1"), self.one)
        few = [[count % 100 for count in counts] for counts in COUNTS[-1]]
        self.write("few.json", few)
        wanted = self.loads_of("few.json")
        for kind, code in (("|i1", "b"), ("|u1", "B"), ("<i2", "h"), ("<u2", "H"), ("<u4", "I"), ("<u8", "Q")):
            self.assertEqual(self.loads_of(self.binary("a.npy", npy(few, kind, code))), wanted, kind)
        turned = [[COUNTS[-1][layer][e] for layer in range(LAYERS)] for e in range(EXPERTS)]
        self.assertEqual(self.loads_of(self.binary("f.npy", npy(turned, fortran=True, shape=(LAYERS, EXPERTS)))), self.one)

    def test_tensors(self):
        self.assertEqual(self.loads_of(self.pt("t.pt", tensor(COUNTS[-1])), form="pt"), self.one)
        self.assertEqual(self.loads_of(self.pt("t.pth", tensor(COUNTS))), self.all)
        for key in ("tokens_per_expert", "token_counts", "expert_counts", "tokens", "loads"):
            self.assertEqual(self.loads_of(self.pt("d.pt", {key: tensor(COUNTS[-1])})), self.one, key)

    def test_physical_experts(self):
        # Expert 0 has a second replica, which got a part of its tokens.
        physical = [[counts[0] - counts[0] // 3, *counts[1:], counts[0] // 3] for counts in COUNTS[-1]]
        maps = [[*range(EXPERTS), 0]] * LAYERS
        self.assertEqual(self.loads_of(self.pt("v.pt", {"expert_load_view": tensor(physical),
                                                        "physical_to_logical_map": tensor(maps)})), self.one)
        self.write("v.json", {"expert_load": physical, "physical_to_logical_map": maps})
        self.assertEqual(self.loads_of("v.json"), self.one)
        self.assertEqual(self.loads_of(self.pt("expert_load_view.pt", tensor(COUNTS[-1])),
                                       said="they are used as counts of logical experts"), self.one)
        passes = [{"forward_pass_id": i, "rank": 0, "gatherer_key": "primary",
                   "global_physical_count": tensor([[*counts, 0] for counts in step])} for i, step in enumerate(COUNTS)]
        dump = {"records": passes, "last_physical_to_logical_map": tensor(maps)}
        self.assertEqual(self.loads_of(self.pt("passes.pt", dump), form="sglang", said="has the passes of one SGLang rank"), self.all)

        # A slot without an expert.
        spare = [[*counts, 7] for counts in physical]
        none = [[*range(EXPERTS), 0, -1]] * LAYERS
        self.assertEqual(self.loads_of(self.pt("u.pt", {"tokens": tensor(spare), "physical_to_logical_map": tensor(none)})), self.one)
        self.write("u.json", {"tokens": [spare], "physical_to_logical_map": none})
        self.assertEqual(self.loads_of("u.json"), self.one)

    def test_sparse_rows_of_sglang(self):
        rows = [f"{layer},{e},{count}" for layer, counts in enumerate(COUNTS[-1]) for e, count in enumerate(counts)
                if (layer, e) not in ((2, 3), (4, 0))]
        self.write("rank0.csv", "\n".join(["layer_id,expert_id,count", *rows]) + "\n")
        wanted = [list(counts) for counts in self.one]
        wanted[2][3] = wanted[4][0] = 0
        self.assertEqual(self.loads_of("rank0.csv", said="2 counts have no row and are set to 0; the highest expert_id implies 16"),
                         wanted)
        self.write("rank0.csv", "layer_id,expert_id,count\n3,0,24990\n3,18,39249\n")
        self.run_in("rank0.csv", "--nodes", "1", "--gpus", "4", "--slots", "6", "-o", "q.json")
        layer = self.read("q.json")["layers"][0]
        self.assertEqual((layer["layer"], layer["loads"]), (3, [24990, *[0] * 17, 39249]))
        self.write("rows.csv", "layer,expert,count\n3,0,24990\n3,2,39249\n")
        self.refused(4, "no count for layer 3 expert 1", "rows.csv", *CLUSTER)

    def test_keys_of_json(self):
        for key in ("tokens_per_expert", "token_counts", "expert_counts", "expert_load", "logical_count"):
            self.write("k.json", {key: COUNTS[-1]})
            self.assertEqual(self.loads_of("k.json"), self.one, key)

    def test_a_server_that_was_restarted(self):
        maps = [list(range(EXPERTS))] * LAYERS
        lines = [json.dumps({"record_type": "eplb_load_stats", "version": 1, "step": step, "num_ranks": 1,
                             "expert_load": load, "p2l_map": maps}) + "\n"
                 for step, load in zip([1, 2, 1, 2], COUNTS)]
        self.write("v.jsonl", "".join(lines) + lines[0][:40])
        self.assertEqual(self.loads_of("v.jsonl", said="step 1 after step 2, as after a restart of the server"), self.all)
        self.loads_of("v.jsonl", said="the last line is truncated and is ignored")

    def test_a_rank_without_an_iteration(self):
        folder = self.work / "statistics"
        folder.mkdir()
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS}))
        for rank in (0, 1):
            header, data = {}, b""
            for step in (50, 51):
                for layer, counts in enumerate(COUNTS[0] if (rank, step) != (1, 51) else []):
                    more = struct.pack(f"<{len(counts)}q", *counts)
                    header[f"{step}_{layer}"] = {"dtype": "I64", "shape": [len(counts)],
                                                 "data_offsets": [len(data), len(data) + len(more)]}
                    data += more
            text = json.dumps(header).encode()
            (folder / f"rank{rank}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        self.loads_of("statistics", said="rank1.safetensors: lacks iteration 51, which other ranks have")

    def test_messages_name_the_form(self):
        bad = [[*COUNTS[-1][0][:-1], -5], *COUNTS[-1][1:]]
        for code, part, name in (
                (4, "layer 0 expert 15: not a count: -5", self.binary("n.npy", npy(bad))),
                (4, "layer 0 expert 15: not a count: -5", self.pt("n.pt", tensor(bad))),
                (4, "layer 0 expert 1: more than 9007199254740992 tokens", self.binary("most.npy", npy([[1, 2**53 + 1]]))),
                (4, "layer 0 expert 0: more than 9007199254740992 tokens", self.pt("most.pt", tensor([[2**62, 1]]))),
                (4, "layer 0 expert 0: not a count: -5", self.binary("i1.npy", npy([[-5]], "|i1", "b"))),
                (4, "layer 1 expert 0: not a number", self.binary("nan.npy", npy([[1.0, 2.0], [float("nan"), 3.0]], "<f8", "d"))),
                (4, "layer 1 expert 1: more than", self.binary("huge.npy", npy([[1.0, 2.0], [0.0, 1e300]], "<f8", "d"))),
                (9, "a .npy file of type '>i8'", self.binary("big.npy", npy(COUNTS[-1], ">i8"))),
                (4, "shape [2, 2]: expected 32 bytes of elements, found 24", self.binary("cut.npy", npy([[1, 2], [3, 4]])[:-8])),
                (4, "not a .npy file of NumPy", self.binary("no.npy", b"1,2,3\n4,5,6\n")),
                (4, "found the shape [1, 1, 1, 1]", self.binary("deep.npy", npy([[[[1]]]]))),
                (9, "token counts in a .npz file are not supported", self.binary("a.npz", b"PK")),
                (4, "a placement (physical_to_logical_map) without token counts",
                 self.pt("map.pt", {"physical_to_logical_map": tensor([[0, 1]])})),
                (4, "a placement (physical_to_logical_map) without token counts",
                 self.write("map.json", {"physical_to_logical_map": [[0, 1]]})),
                (4, "no token counts: found dict", self.pt("other.pt", {"weights": tensor([[1, 2]])})),
                (4, "lacks last_physical_to_logical_map", self.pt("r.pt", {"records": []})),
                (4, "counts [2, 3], but the physical_to_logical_map is [2, 2]",
                 self.pt("m.pt", {"expert_load": tensor([[1, 2, 3]] * 2), "physical_to_logical_map": tensor([[0, 1]] * 2)})),
                (4, 'column "gpu" is unknown: known columns are layer (layer_id)', self.write("c.csv", "layer_id,gpu,count\n1,2,3\n"))):
            with self.subTest(part):
                self.refused(code, part, name, *CLUSTER, "-o", "p")


class Maps(Case):
    """The experts on GPUs as tensors: the old plan."""

    def transfers(self, old):
        return self.result("loads.jsonl", *CLUSTER, "--strategy", "eplb+", "--old", old)["plan"]["migration"]["transfers"]

    def test_tensors_are_old_plans(self):
        self.plan("--strategy", "eplb+", "-o", "plan.json")
        layers = [layer["devices"] for layer in self.read("plan.json")["layers"]]
        slots = [[e for gpu in layer for e in gpu] for layer in layers]
        maps = [[[gpu.index(e) if e in gpu else -1 for e in range(EXPERTS)] for gpu in layer] for layer in layers]
        self.assertEqual(self.transfers("plan.json"), 0)
        for name, values in (("slots.pt", slots), ("maps.pth", maps)):
            ptfile.save(self.work / name, tensor(values))
            self.assertEqual(self.transfers(name), 0, name)
        ptfile.save(self.work / "moved.pth", tensor([[gpu[::-1] for gpu in layer] for layer in maps]))
        self.assertGreater(self.transfers("moved.pth"), 0)

    def test_wrong_maps(self):
        for part, values in (("layer 0 rank 1 expert 1: slot 0 holds expert 0 already", [[[0, -1], [0, 0]]]),
                             ("layer 0 rank 0 expert 0: slot -2", [[[-2, 0], [0, 1]]]),
                             ("holds slots from 0 to 1 and -1, found at most 7", [[[7, -1], [0, 1]]]),
                             ("[layers, ranks, experts], expected", [0, 1])):
            with self.subTest(part):
                ptfile.save(self.work / "old.pth", tensor(values))
                self.refused(4, part, "loads.jsonl", *CLUSTER, "--old", "old.pth", "-o", "p")


    def test_files_of_another_form(self):
        npy_map = [[e % EXPERTS for e in range(32)]] * LAYERS
        (self.work / "old.npy").write_bytes(npy(npy_map))
        done = self.refused(4, "old.npy: a binary file that is not a plan: plans are JSON, YAML, or tensors in .pt",
                            "loads.jsonl", *CLUSTER, "--old", "old.npy", "-o", "p")
        self.assertTrue(done.stderr.isascii())
        # A matrix of counts is not a plan, so nothing is swapped.
        self.write("counts.json", COUNTS[-1])
        self.write("small.json", [[5, 3, 1, 1]])
        for name, values in (("float.pt", npy_map), ("few.pt", [[0, 1, 2, 3]])):
            numbers = flat(values)
            content = struct.pack(f"<{len(numbers)}f", *numbers)
            ptfile.save(self.work / name, ptfile.tensor("FloatStorage", content, shape_of(values), 4))
            for counts in ("counts.json", "small.json"):
                done = self.refused(4, f"{name}: whole numbers [layers, slots]", "evaluate", name, counts, *CLUSTER)
                self.assertNotIn("swapped", done.stderr)


if __name__ == "__main__":
    main(__name__)
