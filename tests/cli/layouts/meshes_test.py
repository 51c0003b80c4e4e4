#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules that split a parameter along several dimensions: conversions there and back, over every format, bit for bit.

Usage: meshes_test.py BIN
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
ONE_RANK, OF_PYTORCH = DATA / "deepspeed/zero1_w2/ckpt", DATA / "dtensor/tp2x2_w4/ckpt"

REPLICATED = {"match": ".*", "split": "replicated"}
ROWS = {"split": "dim", "dim": 0, "uneven": True}
COLUMNS = {"split": "dim", "dim": 1, "uneven": True}
FUSED = {"split": "sub", "dim": 0, "sizes": [16, 4, 4], "granule": 2}


def mesh(match, *axes):
    """A rule; its first axis has two ranks and the second one the others."""
    return {"match": match, "split": "mesh", "axes": [{**axes[0], "ranks": 2}, *axes[1:]]}


BOXES = [mesh(r".*widen\.weight", ROWS, COLUMNS), mesh(r".*narrow\.weight", ROWS, COLUMNS),
         mesh(r".*attended\.weight", COLUMNS, ROWS), mesh(r".*widen\.bias", {"split": "replicated"}, ROWS)]
ALL = [*BOXES, mesh(r".*attend\.weight", FUSED, COLUMNS), mesh(r".*attend\.bias", FUSED, {"split": "replicated"}),
       REPLICATED]


def files(folder):
    """Content of all files below a folder, by relative path, without the manifest."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "shardwright.json"}


class MeshesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        self.all = self.rules("all.json", *ALL)
        self.boxes = self.rules("boxes.json", *BOXES, REPLICATED)

    def command(self, program, *words, code=0):
        argv = [BIN / program, "-q", *map(str, words)]
        done = subprocess.run(argv, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, f"{argv}\n{done.stderr}")
        return done.stdout + done.stderr

    def load(self, *words, code=0):
        return self.command("ucp-load", *words, code=code)

    def rules(self, name, *rules):
        path = self.work / name
        path.write_text(json.dumps({"version": 1, "family": "test", "rules": list(rules)}), encoding="utf-8")
        return path

    def mesh_of_four(self):
        self.load(ONE_RANK, "four", "--target", "tp=4,dp=2", "--patterns", self.all)
        return self.work / "four"

    def test_deepspeed_there_and_back(self):
        for target in ("tp=4,dp=1", "tp=4,dp=2,zero=2", "tp=6,dp=2,zero=3", "tp=2,dp=1", "tp=4,dp=1,zero=0"):
            with self.subTest(target=target):
                self.load(ONE_RANK, target, "--target", target, "--patterns", self.all)
                self.load("--check", target, ONE_RANK, "--patterns", self.all)
                # The affine map of the output describes the split, so no rules are needed.
                self.load("--check", target, ONE_RANK)
                self.load(target, f"{target} back", "--target", "tp=1,dp=2,zero=1")
                self.load("--check", f"{target} back", ONE_RANK)

    def test_ranks_have_their_boxes(self):
        four = self.mesh_of_four()
        text = self.command("ucp-extract", four, "--explain", "blocks.0.widen.weight", "--patterns", self.all)
        for box in ("dim 0 [0, 9) of 17, dim 1 [0, 4) of 8", "dim 0 [0, 9) of 17, dim 1 [4, 8) of 8",
                    "dim 0 [9, 17) of 17, dim 1 [0, 4) of 8", "dim 0 [9, 17) of 17, dim 1 [4, 8) of 8"):
            self.assertIn(box, text)
        listed = self.command("ucp-extract", four, "--list", "--patterns", self.all)
        self.assertIn("mesh 2 x any: rows (dim 0), columns (dim 1)", listed)
        self.assertIn("mesh 2 x 2: rows (dim 0), columns (dim 1)", self.command("ucp-extract", four, "--list"))

    def test_over_atoms_and_a_catalogue(self):
        four = self.mesh_of_four()
        self.load(four, "direct", "--target", "tp=2,dp=1", "--patterns", self.all)
        self.command("ucp-union", four, "atoms", "--patterns", self.all)
        self.assertIn('"split":"mesh"', next(self.work.glob("atoms/*/shardwright_atoms.json")).read_text(encoding="utf-8"))
        self.load("--check", "atoms", ONE_RANK)
        self.load("atoms", "from atoms", "--target", "tp=2,dp=1")
        self.command("ucp-extract", four, "catalogue", "--patterns", self.all)
        self.load("catalogue", "from catalogue", "--target", "tp=2,dp=1", "--patterns", self.all)
        direct = files(self.work / "direct")
        self.assertEqual(files(self.work / "from catalogue"), direct)
        self.load("--check", "from atoms", "direct", "--patterns", self.all)
        for name, content in files(self.work / "from atoms").items():
            if name.endswith("optim_states.pt"):
                self.assertEqual(content, direct[name], name)
        # The rule in the atoms serves as many ranks as the source has, without rules of the user.
        self.load("atoms", "four again", "--target", "tp=4,dp=2")
        self.load("--check", "four again", four, "--patterns", self.all)

    def test_atoms_warn_that_deepspeed_cannot_split_them(self):
        said = self.command("ucp-union", self.mesh_of_four(), "atoms", "--patterns", self.all, "--json=report.json")
        report = json.loads((self.work / "report.json").read_text(encoding="utf-8"))
        self.assertIn("blocks.0.widen.weight", json.dumps(report["warnings"]) + said)

    def test_per_rank_files_of_tensors(self):
        self.load(ONE_RANK, "four", "--target", "tp=4,dp=2", "--patterns", self.boxes)
        for trainer in ("torch_checkpointing", "accelerate"):
            with self.subTest(trainer=trainer):
                self.load("four", trainer, "--format", "dtensor", "--trainer", trainer, "--target", "tp=2x2,dp_shard=2",
                          "--patterns", self.boxes)
                self.load("--check", trainer, ONE_RANK)
                listed = self.command("ucp-extract", trainer, "--list")
                self.assertIn("mesh 2 x 2: rows (dim 0), columns (dim 1)", listed)
                self.assertIn("mesh 2 x 2: columns (dim 1), rows (dim 0)", listed)
                self.assertIn("mesh 2 x 2: replicated, rows (dim 0)", listed)
                # Another number of data-parallel ranks, and one that changes nothing.
                self.load(trainer, f"{trainer} wide", "--target", "dp_shard=4")
                self.load("--check", f"{trainer} wide", trainer)
                self.assertIn("mesh 2 x 2: rows (dim 0), columns (dim 1)",
                              self.command("ucp-extract", f"{trainer} wide", "--list"))
                self.load(f"{trainer} wide", f"{trainer} back", "--target", "dp_shard=2")
                self.assertEqual(files(self.work / f"{trainer} back"), files(self.work / trainer))

    def test_per_rank_files_that_pytorch_made(self):
        listed = "mesh 2 x 2: rows (dim 0), columns (dim 1)"
        self.assertIn(listed, self.command("ucp-extract", OF_PYTORCH, "--list"))
        self.load(OF_PYTORCH, "old", "--torch", "2.9")
        self.load("--check", "old", OF_PYTORCH)
        self.assertIn(listed, self.command("ucp-extract", "old", "--list"))
        # Extents of this model are odd. Placements do not specify how DeepSpeed's ranks would divide them.
        buffer = self.rules("buffer.json", {"match": "positions", "split": "replicated"})
        said = self.load(OF_PYTORCH, "out", "--format", "deepspeed", "--target", "tp=4,dp=1", "--patterns", buffer, code=9)
        for word in ("embed.weight", "axis 1 of the mesh 2 x 2", "extent 11"):
            self.assertIn(word, said)
        rules = self.rules("odd.json", mesh(r".*\.weight", ROWS, COLUMNS), mesh(r".*scale", ROWS, {"split": "replicated"}),
                           REPLICATED)
        self.load(OF_PYTORCH, "deepspeed", "--format", "deepspeed", "--target", "tp=4,dp=1", "--patterns", rules)
        self.load("--check", "deepspeed", OF_PYTORCH)
        self.load("deepspeed", "atoms", "--format", "universal")
        for source in ("deepspeed", "atoms"):
            self.load(source, f"{source} back", "--format", "dtensor", "--trainer", "verl", "--target", "tp=2x2")
            self.load("--check", f"{source} back", OF_PYTORCH)
            self.assertIn(listed, self.command("ucp-extract", f"{source} back", "--list"))

    def test_per_rank_files_need_the_same_axes(self):
        said = self.load(ONE_RANK, "out", "--format", "dtensor", "--target", "tp=4", "--patterns", self.boxes, code=9)
        for word in ("attended.weight", "mesh 2 x any", "tp=4", "tp=2x2"):
            self.assertIn(word, said)
        said = self.load(ONE_RANK, "out", "--format", "dtensor", "--target", "tp=2x2", "--patterns", self.all, code=9)
        for word in ("attend.weight", "sub-tensors 16+4+4", "no DTensor placement"):
            self.assertIn(word, said)
        for value in ("2x", "x2", "2x0", "2y2", "1000x1001"):
            said = self.load(ONE_RANK, "out", "--format", "dtensor", "--target", f"tp={value}", code=2)
            self.assertIn(f"tp={value}", said)

    def test_dcp_has_a_box_for_each_rank(self):
        self.load(ONE_RANK, "dcp", "--format", "dcp", "--target", "tp=4,dp_shard=1", "--patterns", self.all)
        self.load("--check", "dcp", ONE_RANK)
        text = self.command("ucp-extract", "dcp", "--explain", "blocks.1.narrow.weight")
        for box in ("dim 0 [0, 4) of 8, dim 1 [0, 9) of 17", "dim 0 [0, 4) of 8, dim 1 [9, 17) of 17",
                    "dim 0 [4, 8) of 8, dim 1 [0, 9) of 17", "dim 0 [4, 8) of 8, dim 1 [9, 17) of 17"):
            self.assertIn(box, text)
        self.load("dcp", "sharded", "--target", "tp=4,dp_shard=3", "--patterns", self.all)
        self.load("--check", "sharded", ONE_RANK)
        # Three ranks do not form the mesh of the rules, so they have copies.
        self.load(ONE_RANK, "three", "--format", "dcp", "--target", "tp=3,dp_shard=1", "--patterns", self.all)
        self.load("--check", "three", ONE_RANK)

    def test_other_numbers_of_ranks_are_refused(self):
        said = self.load(ONE_RANK, "out", "--target", "tp=3,dp=1", "--patterns", self.all, code=9)
        for word in ("3 tensor-parallel ranks", "mesh 2 x any", "all.json rule", "weight"):
            self.assertIn(word, said)
        # A source with a rule that does not fit its shards names file, rule, tensor and both sides.
        turned = self.rules("turned.json", mesh(r".*widen\.weight", COLUMNS, ROWS), *ALL)
        said = self.load("--check", self.mesh_of_four(), ONE_RANK, "--patterns", turned, code=4)
        for word in ("turned.json rule 1", "blocks.0.widen.weight", "rank 2", "expected", "found"):
            self.assertIn(word, said)

    def test_megatron_is_refused(self):
        said = self.load(ONE_RANK, "out", "--format", "megatron", "--target", "tp=4", "--patterns", self.all, code=9)
        self.assertIn("along one dimension", said)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
