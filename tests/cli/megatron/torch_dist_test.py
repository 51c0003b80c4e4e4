#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_dist: the files written for a model with Megatron's names, and the errors for an incomplete folder.

Usage: torch_dist_test.py BIN
"""

import json
import pathlib
import shutil
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import harness  # pylint: disable=wrong-import-position
import moe_checkpoint  # pylint: disable=wrong-import-position

USAGE, MISSING, BAD, UNSUPPORTED, INFEASIBLE = 2, 3, 4, 9, 10
LAYERS = 4
SHAPES = {"input_layernorm.weight": (8,), "self_attention.linear_proj.weight": (8, 8),
          "self_attention.linear_qkv.weight": (24, 8), "pre_mlp_layernorm.weight": (8,),
          "mlp.linear_fc1.weight": (32, 8), "mlp.linear_fc2.weight": (8, 16)}


def names():
    yield "embedding.word_embeddings.weight", (10, 8)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            yield f"decoder.layers.{layer}.{name}", shape
    yield "decoder.final_layernorm.weight", (8,)


class TorchDist(unittest.TestCase):
    bin = pathlib.Path()

    @classmethod
    def setUpClass(cls):
        cls.scratch = harness.Scratch("megatron-")
        cls.addClassCleanup(cls.scratch.__exit__)
        cls.base, cls.made = cls.scratch.path / "base", cls.scratch.path / "made"
        model = moe_checkpoint.Model(dtype="bf16", extra=dict(names()), hidden=8,
                                     config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
        moe_checkpoint.write(cls.base, model, 7)
        harness.succeed(cls.load(cls.base, cls.made, "--format", "megatron"))

    @classmethod
    def load(cls, source, out, *more):
        return [cls.bin / "ucp-load", source, out, *more, "--progress", "off"]

    def setUp(self):
        scratch = harness.Scratch("megatron-")
        self.addCleanup(scratch.__exit__)
        self.work = scratch.path
        self.copy = self.work / "copy"
        shutil.copytree(self.made, self.copy)
        self.folder = self.copy / "iter_0000007"

    def check(self, a, b):
        return harness.run(self.load(a, b, "--check"))

    def expect(self, code, what):
        done = self.check(self.copy, self.made)
        self.assertEqual(done.code, code, f"{what}: {done}")
        return done.stderr

    def test_layers_are_stacked_under_one_key(self):
        index = (self.folder / ".metadata").read_bytes()
        self.assertIn(b"decoder.layers.mlp.linear_fc2.weight", index)
        self.assertIn(b"optimizer.state.param.decoder.layers.mlp.linear_fc2.weight", index)
        self.assertIn(b"decoder.layers.self_attention.linear_qkv.layer_norm_weight", index)
        self.assertIn(b"decoder.layers.mlp.linear_fc1._extra_state/shard_3_4", index)
        self.assertNotIn(b"decoder.layers.0.", index)
        found = json.loads((self.folder / "metadata.json").read_text())
        self.assertEqual(found["sharded_backend"], "torch_dist")
        self.assertEqual((self.copy / "latest_checkpointed_iteration.txt").read_text(), "7")

    def test_other_layouts_hold_the_same(self):
        for target in ("pp=4", "pp=2,vpp=2", "pp=3,first=1,last=1", "optimizer=none", "optimizer=dp_reshardable,ep=1",
                       "optimizer=dp_reshardable,bucket=300,pp=2,vpp=2,dp=1,ep=1"):
            with self.subTest(target=target):
                out = self.work / target
                harness.succeed(self.load(self.made, out, "--format", "megatron", "--target", target))
                done = self.check(self.made, out)
                self.assertEqual(done.code, 0, done)
        self.assertEqual(len(list((self.work / "pp=4" / "iter_0000007").glob("*.distcp"))), 4)

    def test_experts_are_parameters_like_others_to_deepspeed(self):
        """Its optimizer has no group for them, and Megatron's has again."""
        extra = {name: shape for name, shape in names() if "mlp.linear" not in name}
        for layer in range(LAYERS):
            extra[f"decoder.layers.{layer}.mlp.router.weight"] = (4, 8)
            for expert in range(4):
                for name, shape in (("linear_fc1", (32, 8)), ("linear_fc2", (8, 16))):
                    extra[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}.weight"] = shape
        model = moe_checkpoint.Model(dtype="bf16", extra=extra, hidden=8, layers=0,
                                     config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
        first, there, back = self.work / "first", self.work / "there", self.work / "back"
        moe_checkpoint.write(first, model, 7)
        harness.succeed(self.load(first, there, "--format", "megatron", "--target", "ep=2,dp=2"))
        self.assertEqual(len(list((there / "iter_0000007").glob("*.distcp"))), 2)
        self.assertEqual(self.check(first, there).code, 0)
        buckets = self.work / "buckets"
        harness.succeed(self.load(there, buckets, "--format", "megatron", "--target", "optimizer=dp_reshardable"))
        self.assertEqual(self.check(first, buckets).code, 0)
        self.assertIn(b"chained_1.optimizer.distributed.dp_group_idx_1.", (buckets / "iter_0000007/.metadata").read_bytes())
        for target in ("zero=1,dp=2", "zero=3,dp=3"):
            harness.succeed(self.load(there, back, "--force", "--format", "deepspeed", "--target", target))
            done = self.check(there, back)
            self.assertEqual(done.code, 0, f"{target}: {done}")
            self.assertFalse(list(back.glob("*/*expert*")))
        done = harness.run(self.load(there, self.work / "none", "--format", "deepspeed", "--target", "zero=1,dp=2,ep=2"))
        self.assertEqual(done.code, INFEASIBLE)
        self.assertIn("the model has no experts", done.stderr)

    def layout(self, out):
        return json.loads((out / "shardwright.json").read_text())["layout"]

    def test_megatron_lm_gets_what_it_compares(self):
        """hops_test.py of the interoperability tests resumes such outputs."""
        first, then, weights = self.work / "first", self.work / "then", self.work / "weights"
        run = {"lr": 3e-4, "min_lr": 1e-5, "heads": 2, "samples": 56}
        words = ",".join(f"{key}={value}" for key, value in run.items())
        done = harness.run(self.load(self.base, first, "--format", "megatron", "--target", words))
        self.assertEqual(done.code, 0, done)
        self.assertNotIn("--finetune", done.stderr)
        common = (first / "iter_0000007/common.pt").read_bytes()
        for key in (b"opt_param_scheduler", b"num_attention_heads", b"hidden_size"):
            self.assertIn(key, common)
        self.assertEqual(self.check(self.base, first).code, 0)
        harness.succeed(self.load(first, then, "--format", "megatron", "--target", "pp=2"))
        for out in (first, then):
            self.assertLessEqual(run.items(), self.layout(out).items())
        done = harness.run(self.load(self.base, weights, "--format", "megatron"))
        self.assertIn("--finetune", done.stderr)
        self.assertNotIn("lr", self.layout(weights))

    def test_a_run_that_cannot_resume_is_refused(self):
        for target, code, message in (
                ("min_lr=1e-5", USAGE, "target min_lr: add lr"), ("lr=0,heads=2", USAGE, "a learning rate expected"),
                ("lr=nan,heads=2", USAGE, "a learning rate expected"), ("lr=3e-4", USAGE, "add heads=N"),
                ("lr=3e-4,min_lr=1e-3,heads=2", USAGE, "more than lr=3e-4"), ("lr=3e-4,heads=0", USAGE, "from 1 expected"),
                ("lr=3e-4,heads=3,samples=8,tp=2", UNSUPPORTED, "3 attention heads do not divide"),
                ("lr=3e-4,heads=2,samples=8,files=torch", UNSUPPORTED, "legacy files require the arguments")):
            with self.subTest(target):
                done = harness.run(self.load(self.base, self.work / "out", "--format", "megatron", "--target", target))
                self.assertEqual(done.code, code, done)
                self.assertIn(message, done.stderr)
        dcp, out = self.work / "dcp", self.work / "out"
        harness.succeed(self.load(self.base, dcp, "--format", "dcp"))
        done = harness.run(self.load(dcp, out, "--format", "megatron", "--target", "lr=3e-4,heads=2"))
        self.assertEqual(done.code, USAGE, done)
        self.assertIn("add samples=N, the samples of its 7 iterations", done.stderr)
        source = harness.SOURCE / "tests/data/megatron/dist_full_tp2/ckpt"
        done = harness.run(self.load(source, out, "--format", "megatron", "--target", "lr=3e-4,heads=2"))
        self.assertEqual(done.code, UNSUPPORTED, done)
        self.assertIn("leave lr out", done.stderr)

    def test_what_no_rule_cuts_is_refused(self):
        done = harness.run(self.load(self.made, self.work / "out", "--format", "megatron", "--target", "tp=2"))
        self.assertEqual(done.code, UNSUPPORTED)
        self.assertIn("--patterns", done.stderr)

    def test_what_is_not_whole_is_refused(self):
        data = next(self.folder.glob("*.distcp"))
        whole = data.read_bytes()
        data.write_bytes(whole[:-1000])
        self.expect(BAD, "a lost end")
        data.write_bytes(whole + b"x")
        self.expect(BAD, "bytes of another save")
        data.unlink()
        self.assertIn(data.name, self.expect(MISSING, "no data"))
        data.write_bytes(whole)
        for name, code in ((".metadata", MISSING), ("common.pt", BAD)):
            kept = (self.folder / name).read_bytes()
            (self.folder / name).unlink()
            self.expect(code, f"no {name}")
            (self.folder / name).write_bytes(kept)
        self.expect(0, "whole again")

    def test_what_the_folder_says_of_itself(self):
        tracker, kind = self.copy / "latest_checkpointed_iteration.txt", self.folder / "metadata.json"
        tracker.write_text("8")
        self.expect(MISSING, "another iteration")
        tracker.write_text("seven")
        self.expect(BAD, "no iteration")
        tracker.write_text("7\n")
        self.expect(0, "white space")
        kind.write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
        self.expect(UNSUPPORTED, "zarr")
        kind.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}')
        self.expect(UNSUPPORTED, "version 2")

    def test_a_part_of_another_save_is_noticed(self):
        other = self.work / "other"
        model = moe_checkpoint.Model(dtype="bf16", extra=dict(names()), hidden=8, seed=1,
                                     config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
        moe_checkpoint.write(self.work / "base", model, 7)
        harness.succeed(self.load(self.work / "base", other, "--format", "megatron", "--target", "pp=2"))
        for path in self.folder.glob("*.distcp"):
            shutil.copy(other / "iter_0000007" / path.name, path)
        self.assertIn(self.check(self.copy, self.made).code, {MISSING, BAD, 5})


if __name__ == "__main__":
    TorchDist.bin = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
