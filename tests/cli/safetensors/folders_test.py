#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Other files that trainers and caches keep with the files of a checkpoint: configurations, links, nested folders.

Usage: folders_test.py BIN
"""

import json
import pathlib
import shutil
import sys

sys.dont_write_bytecode = True

from models import ModelTest, main, pack, tensor, unpack  # pylint: disable=wrong-import-position

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
CONFIG = json.dumps({"model_type": "llama"})


class Configuration(ModelTest):
    """verl keeps the configuration and the tokenizer of a model in huggingface/."""

    def setUp(self):
        super().setUp()
        shutil.copytree(DATA / "dtensor/fsdp_w3/ckpt", self.work / "actor")
        self.kept = self.work / "actor/huggingface"
        self.kept.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (self.kept / name).write_text(name)

    def test_an_export_of_weights_has_it_next_to_them(self):
        done = self.convert(source="actor")
        out = self.files("out")
        self.assertEqual({name for name in out if not name.startswith("extra_state")},
                         {"config.json", "tokenizer.json", "model.safetensors"})
        self.assertEqual(out["config.json"], b"config.json")
        self.assertIn("embed.weight", unpack(self.work / "out/model.safetensors")[0])
        self.assertIn("huggingface/model.safetensors: readers would mistake it for a part of the output", done.stderr)

    def test_a_file_that_is_next_to_the_checkpoint_comes_first(self):
        (self.work / "actor/config.json").write_text("mine")
        done = self.convert(source="actor")
        self.assertEqual((self.work / "out/config.json").read_text(), "mine")
        self.assertIn("huggingface/config.json: the output has a file or folder of that name", done.stderr)

    def test_files_for_a_trainer_keep_the_folder(self):
        self.run_in("ucp-load", "actor", "out", "--format", "dtensor", "--target", "dp_shard=2")
        self.assertEqual((self.work / "out/huggingface/tokenizer.json").read_text(), "tokenizer.json")
        self.assertFalse((self.work / "out/config.json").exists())

    def test_the_family_of_a_map_is_found_there(self):
        (self.kept / "config.json").write_text(CONFIG)
        for source in ("actor", "actor/"):
            refused = self.run_in("ucp-load", source, "out", "--format", "megatron", "--map", "auto", code=9)
            self.assertIn("llama", refused.stderr)  # the model of this test is not one
            self.assertIn("actor/", refused.stderr)
        (self.kept / "config.json").unlink()
        refused = self.run_in("ucp-load", "actor", "out", "--format", "megatron", "--map", "auto", code=2)
        self.assertIn("in a folder huggingface", refused.stderr)


class Cache(ModelTest):
    """A cache of Hugging Face: models--ORG--NAME/snapshots/REVISION has links to ../../blobs."""

    def cached(self, name="models--org--tiny"):
        blobs = self.work / name / "blobs"
        snapshot = self.work / name / "snapshots/abc"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        files = {"config.json": CONFIG.encode(), "tokenizer.json": b"{}" * 50_000,
                 "model.safetensors": pack({"w": tensor("BF16", 4, 2)})}
        for number, (name_of, data) in enumerate(files.items()):
            (blobs / f"{number}f").write_bytes(data)
            (snapshot / name_of).symlink_to(f"../../blobs/{number}f")
        return snapshot

    def test_links_to_its_blobs_are_followed(self):
        snapshot = self.cached()
        self.convert("--target", "dtype=float32", source=str(snapshot))
        out = self.files("out")
        self.assertEqual((out["config.json"], len(out["tokenizer.json"])), (CONFIG.encode(), 100_000))
        self.assertFalse((self.work / "out/config.json").is_symlink())

    def test_other_links_are_not(self):
        snapshot = self.cached()
        (self.work / "secret").write_text("key")
        other = self.work / "models--org--other/blobs"
        other.mkdir(parents=True)
        (other / "0f").write_text("another model's")
        (snapshot.parents[1] / "blobs/out").symlink_to(self.work / "secret")
        for name, to in (("a.txt", "../../../secret"), ("b.txt", "../../../models--org--other/blobs/0f"),
                         ("c.txt", "../../blobs/out"), ("d.txt", "../../blobs/../../secret")):
            (snapshot / name).symlink_to(to)
        done = self.convert("--target", "dtype=float32", source=str(snapshot))
        self.assertIn("a.txt, b.txt, c.txt, d.txt: a link that leads out of the folder", done.stderr)
        self.assertEqual({name for name in self.files("out") if name.endswith(".txt")}, set())

    def test_only_a_cache_has_blobs(self):
        done = self.convert("--target", "dtype=float32", source=str(self.cached("somebody")))
        self.assertIn("config.json, tokenizer.json: a link that leads out of the folder", done.stderr)

    def test_a_configuration_is_not_read_from_elsewhere(self):
        snapshot = self.cached()
        (self.work / "secret").write_text(CONFIG)
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(self.work / "secret")
        refused = self.run_in("ucp-load", str(snapshot), "out", "--format", "megatron", "--map", "auto", code=4)
        self.assertIn("config.json: a link that leads out of the folder", refused.stderr)


class Folders(ModelTest):
    """Folders of torch.distributed.checkpoint in folders."""

    def pair(self, above):
        """As slime has it: a folder for the model, one for the optimizer, one for the scheduler."""
        self.run_in("ucp-load", str(DATA / "dcp/nested_w3/ckpt"), "made", "--format", "dcp", "--flavour", "accelerate")
        pair = self.work / above
        pair.mkdir(parents=True)
        (self.work / "made/pytorch_model_fsdp_0").rename(pair / "model")
        (self.work / "made/optimizer_0").rename(pair / "optimizer")
        (pair / "lr_scheduler").mkdir()
        (pair / "lr_scheduler/.metadata").write_bytes(b"index")
        (pair / "lr_scheduler/__0_0.distcp").write_bytes(b"items")
        (pair / "meta.json").write_text("{}")
        return pair

    def expect_all(self, source, *more):
        self.run_in("ucp-load", source, "out", *more, "--format", "dcp", "--target", "dp_shard=2", "--force")
        said = self.run_in("ucp-load", "--check", str(DATA / "dcp/nested_w3/ckpt"), "out").stdout
        self.assertIn(" 0 differences", said)
        names = set(self.files("out"))
        self.assertLessEqual({"model/.metadata", "optimizer/.metadata", "model/__1_0.distcp"}, names)
        return names

    def test_model_and_optimizer_of_slime_are_one_checkpoint(self):
        self.pair("run/iter_0000004")
        (self.work / "run/latest_checkpointed_iteration.txt").write_text("4")
        for source in ("run", "run/iter_0000004"):
            names = self.expect_all(source)
            self.assertLessEqual({"lr_scheduler/.metadata", "lr_scheduler/__0_0.distcp", "meta.json"}, names)

    def test_both_folders_may_be_named(self):
        self.pair("iter")
        self.expect_all("iter/model", "--also", "iter/optimizer")
        self.expect_all("iter/optimizer/", "--also", "iter/model/")

    def test_an_empty_folder_of_the_optimizer_means_weights_only(self):
        pair = self.pair("iter")
        shutil.rmtree(pair / "optimizer")
        (pair / "optimizer").mkdir()
        done = self.run_in("ucp-load", "iter", "out", "--format", "safetensors")
        self.assertIn("optimizer/ is empty", done.stderr)

    def test_folders_of_these_names_that_hold_something_else_are_not_taken(self):
        for name in ("model", "optimizer"):
            (self.work / "other" / name).mkdir(parents=True)
            (self.work / "other" / name / "x.npz").write_text("x")
        refused = self.run_in("ucp-load", "other", "out", code=3)
        self.assertIn("model/: no torch.distributed.checkpoint files found", refused.stderr)

    def test_what_olmo_core_has_around_its_folder_is_reported(self):
        step = self.work / "step4"
        shutil.copytree(DATA / "dcp/nested_w3/ckpt", step / "model_and_optim")
        (step / "train").mkdir()
        (step / "train/rank0.pt").write_bytes(b"state")
        for name in ("config.json", ".metadata.json"):
            (step / name).write_text("{}")
        for source in ("step4", "step4/model_and_optim", "step4/model_and_optim/"):
            result = self.report_of("ucp-load", source, "out", "--format", "dcp", "--target", "dp_shard=1", "--force")
            self.assertEqual({one["name"] for one in result["siblings"]["left_out"]},
                             {"config.json", ".metadata.json", "train"}, source)
            done = self.run_in("ucp-load", source, "-n", "out2", "--format", "dcp")
            self.assertIn("next to model_and_optim, not carried over: .metadata.json, config.json, train", done.stderr)
            self.run_in("ucp-load", "--check", str(DATA / "dcp/nested_w3/ckpt"), "out")

    def test_of_several_folders_one_has_to_be_named(self):
        for name in ("step-1", "step-10", "step-9"):
            shutil.copytree(DATA / "dcp/nested_w3/ckpt", self.work / "run" / name)
        refused = self.run_in("ucp-load", "run", "out", code=3)
        self.assertIn("step-10, step-9 and step-1 are checkpoints: name one of them", refused.stderr)


if __name__ == "__main__":
    main("folders_test.py BIN")
