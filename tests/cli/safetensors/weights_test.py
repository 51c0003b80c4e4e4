#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Weights of checkpoints with an optimizer that is missing, in part or whole: exported, and nothing more.

Usage: weights_test.py BIN
"""

import pathlib
import shutil

from models import ModelTest, main, unpack

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"


class Weights(ModelTest):
    def take(self, case):
        shutil.copytree(DATA / case / "ckpt", self.work / "src", ignore_dangling_symlinks=True)
        return self.work / "src"

    def export(self, out, *words, source="src", code=0):
        return self.run_in("ucp-load", source, out, "--format", "safetensors", "--siblings", "none", "--map", "none", *words,
                           code=code)

    def tensors(self, out):
        found = {}
        for path in (self.work / out).glob("*.safetensors"):
            found |= unpack(path)[0]
        self.assertTrue(found)
        return found

    def remove(self, pattern, keep=0):
        """The names of the files that are gone."""
        paths = sorted((self.work / "src").rglob(pattern))[keep:]
        self.assertTrue(paths)
        for path in paths:
            path.unlink()
        return [path.name for path in paths]

    def expect_weights_only(self, case, pattern, needs, keep=0):
        """An export without files equals one with them; other formats need them."""
        self.take(case)
        self.export("whole")
        gone = self.remove(pattern, keep)
        done = self.export("weights")
        self.assertEqual(self.tensors("weights"), self.tensors("whole"))
        self.assertIn("not carried over: the optimizer and other state, which was not read", done.stderr)
        for name in gone:
            self.assertIn(name, done.stderr)
        for words in needs:
            said = self.run_in("ucp-load", "src", "native", *words, code=3).stderr
            self.assertIn(gone[0], said)
            self.assertIn("the weights can be exported: ucp-load src native --format safetensors", said)
            self.assertIn("add it with --also DIR", said)
        self.assertFalse((self.work / "native").exists())
        said = self.run_in("ucp-load", "src", "--list").stderr
        self.assertIn(gone[0], said)

    def test_zero_without_any_shard(self):
        self.expect_weights_only("deepspeed/zero1_w2", "*optim_states.pt",
                                 [(), ("--target", "zero=1,dp=1"), ("--format", "universal"), ("--format", "dcp")])
        self.assertIn("not carried over", self.export("strict", "--strict", code=5).stderr.replace(
            "would not be carried over", "not carried over"))
        self.export("masters", "--only", "master")

    def test_zero_without_one_shard(self):
        self.expect_weights_only("deepspeed/zero1_w2", "*rank_1_*optim_states.pt", [(), ("--format", "dtensor")])

    def test_shards_in_another_folder_are_found(self):
        self.take("deepspeed/zero1_w2")
        self.export("whole", "--only", "master")
        other = self.work / "other" / "global_step4"
        other.mkdir(parents=True)
        for path in sorted((self.work / "src" / "global_step4").glob("*rank_1_*optim_states.pt")):
            path.rename(other / path.name)
        self.export("both", "--only", "master", "--also", "other")
        self.assertEqual(self.tensors("both"), self.tensors("whole"))

    def test_bf16_without_masters(self):
        self.expect_weights_only("deepspeed/bf16_zero2_w2", "*optim_states.pt", [()])
        said = self.export("masters", "--only", "master", code=3).stderr
        self.assertIn("--only master: the master weight of", said)
        self.assertIn("--only weight", said)

    def test_experts_without_shards(self):
        self.expect_weights_only("deepspeed/moe4_ep2_zero1_w2", "*optim_states.pt", [()])
        self.remove("layer_1_expert_3_mp_rank_00_model_states.pt")
        self.assertIn("layer_1_expert_3", self.export("fewer", code=3).stderr)

    def test_pipeline_without_shards(self):
        self.expect_weights_only("deepspeed/pp2_dp2_zero1", "*optim_states.pt", [()])
        self.remove("layer_02-model_states.pt")
        self.export("fewer", code=3)

    def test_stage_3_has_its_weights_in_the_shards(self):
        self.take("deepspeed/bf16_zero3_w3")
        gone = self.remove("*rank_2_*optim_states.pt")
        said = self.export("out", code=3).stderr
        self.assertIn(gone[0], said)
        self.assertNotIn("can be exported", said)

    def test_missing_model_states_are_named(self):
        self.take("deepspeed/zero1_w2")
        self.remove("mp_rank_00_model_states.pt")
        said = self.export("out", code=3).stderr
        self.assertIn("mp_rank_00_model_states.pt", said)
        self.assertNotIn("can be exported", said)

    def test_a_catalogue_of_what_is_there(self):
        self.take("deepspeed/zero1_w2")
        self.export("whole")
        self.remove("*optim_states.pt")
        self.assertIn("optim_states.pt", self.run_in("ucp-extract", "src", "catalogue", "--pack").stderr)
        shutil.rmtree(self.work / "src")
        self.export("weights", source="catalogue")
        self.assertEqual(self.tensors("weights"), self.tensors("whole"))
        self.assertIn("optim_states.pt", self.run_in("ucp-load", "catalogue", "native", code=3).stderr)

    def test_verl_without_optimizer_files_of_a_rank(self):
        self.expect_weights_only("dtensor/fsdp_w3", "optim_*_rank_1.pt", [(), ("--format", "deepspeed")])

    def test_verl_without_extra_state_of_a_rank(self):
        self.expect_weights_only("dtensor/fsdp_w3", "extra_state_*_rank_2.pt", [()])

    def test_accelerate_without_optimizer_files_of_a_rank(self):
        self.expect_weights_only("dtensor/accelerate_w2", "optimizer_0_rank1.bin", [()])

    def test_megatron_without_its_distributed_optimizer(self):
        self.expect_weights_only("megatron/legacy_pp2", "distrib_optim.pt", [("--format", "dcp")], keep=1)

    def test_atoms_without_the_optimizers_state(self):
        shutil.copytree(DATA / "deepspeed/zero1_w2/ckpt", self.work / "native")
        self.run_in("ucp-union", "native", "src", "--siblings", "none")
        self.export("whole", "--only", "master")
        self.remove("optimizer_state.pt")
        self.remove("exp_avg.pt")
        self.export("weights", "--only", "master")
        self.assertEqual(self.tensors("weights"), self.tensors("whole"))
        said = self.run_in("ucp-load", "src", "again", code=3).stderr
        self.assertIn("optimizer_state.pt", said)
        self.assertIn("--format safetensors", said)

    def test_atoms_of_deepspeed_without_the_optimizers_state(self):
        for case in ("universal_zero2_w2", "universal_bf16_zero3_w2"):
            with self.subTest(case=case):
                self.take(f"deepspeed/{case}")
                self.export(f"whole_{case}", "--only", "master")
                self.remove("optimizer_state.pt")
                self.export(case, "--only", "master")
                self.assertEqual(self.tensors(case), self.tensors(f"whole_{case}"))
                self.assertIn("optimizer_state.pt", self.run_in("ucp-load", "src", "again", code=3).stderr)
                shutil.rmtree(self.work / "src")

    def test_one_set_of_weights_has_no_masters_to_leave(self):
        for case in ("deepspeed/zero0_w1_fp32", "deepspeed/zero1_w2"):
            self.take(case)
            self.assertNotIn("master weights", self.export(pathlib.Path(case).name).stderr)
            shutil.rmtree(self.work / "src")
        self.take("deepspeed/bf16_zero2_w2")
        self.assertIn("the master weights", self.export("bf16").stderr)


if __name__ == "__main__":
    main("weights_test.py BIN")
