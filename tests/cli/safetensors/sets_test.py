#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sets of .safetensors files as they are found: whole, incomplete, mixed up, hostile.

Usage: sets_test.py BIN
"""

import json
import os

from models import ModelTest, main, pack, tensor, unpack


class Sets(ModelTest):
    def test_the_index_says_which_files_count(self):
        (self.model / "model-00001-of-00003.safetensors").write_bytes(b"an older save, cut off")
        done = self.convert()
        self.assertIn("model-00001-of-00003.safetensors", done.stderr)
        self.expect_model()
        self.assertEqual(sorted(os.listdir(self.work / "out")), ["model.safetensors", "shardwright.json"])

    def test_files_without_an_index(self):
        self.index.unlink()
        self.convert()
        self.expect_model()

    def test_one_file_of_any_name(self):
        folder = self.work / "one"
        folder.mkdir()
        (folder / "diffusion_pytorch_model.safetensors").write_bytes(pack(self.first | self.second))
        self.convert(source="one")
        self.expect_model()

    def test_numbered_files_must_all_be_there(self):
        self.index.unlink()
        (self.model / self.names[1]).unlink()
        self.assertIn("number 2 is missing", self.convert(code=3).stderr)
        (self.model / self.names[0]).rename(self.model / "model-00003-of-00003.safetensors")
        self.assertIn("number 1 is missing", self.convert(code=3).stderr)

    def test_numbers_of_two_saves_are_not_mixed(self):
        self.index.unlink()
        (self.model / "model-00001-of-00001.safetensors").write_bytes(pack({"old": tensor("F32", 2)}))
        self.assertIn("of 1 and of 2 files", self.convert(code=9).stderr)

    def test_a_stale_index_is_named(self):
        self.write_index({"emb.weight": "model-00001-of-00030.safetensors", "ids": "model-00002-of-00030.safetensors"})
        said = self.convert(code=3).stderr
        for word in ("model.safetensors.index.json: stale index", "model-00001-of-00030.safetensors", self.names[1],
                     "move the index away"):
            self.assertIn(word, said)
        self.index.unlink()
        self.convert()
        self.expect_model()

    def test_shards_of_vllm_are_named(self):
        self.index.unlink()
        for rank, name in enumerate(self.names):
            (self.model / name).rename(self.model / f"model-rank-{rank}-part-0.safetensors")
        said = self.convert(code=9).stderr
        for word in ("vLLM sharded_state for 2 tensor-parallel ranks", "convert the original model instead"):
            self.assertIn(word, said)
        (self.model / "model-rank-1-part-0.safetensors").unlink()
        self.assertIn("vLLM sharded_state", self.convert(out="alone").stderr)

    def test_several_models_in_one_folder(self):
        self.index.unlink()
        (self.model / "ema.safetensors").write_bytes(pack(self.first))
        said = self.convert(code=9).stderr
        self.assertIn("several sets of weights in one folder: give one file as INPUT", said)
        self.convert(source="model/ema.safetensors", out="ema")

    def test_pickled_weights_are_named(self):
        for name, word in (("pytorch_model.bin", "save_pretrained"), ("pytorch_model.bin.index.json", "save_pretrained"),
                           ("weights.pt", "safetensors.torch.save_file"), ("consolidated.00.pth", "save_file")):
            folder = self.work / f"of_{name}"
            folder.mkdir()
            (folder / name).write_bytes(b"PK")
            (folder / "optimizer.pt").write_bytes(b"PK")
            for source in (folder, folder / name):
                said = self.convert(source=str(source), code=9).stderr
                self.assertIn(f"{name}: ", said)
                self.assertIn(word, said)
        for name in ("optimizer.pt", "training_args.bin"):
            folder = self.work / f"only_{name}"
            folder.mkdir()
            (folder / name).write_bytes(b"PK")
            self.assertIn("no checkpoint here", self.convert(source=str(folder), code=3).stderr)

    def test_a_file_of_a_checkpoint_is_not_the_checkpoint(self):
        states = "ckpt/global_step5/mp_rank_00_model_states.pt"
        said = self.convert(source=states, code=3).stderr
        self.assertIn("one of the files of a checkpoint (deepspeed): pass its folder, ckpt/global_step5", said)

    def test_empty_and_zero_filled_files_are_called_that(self):
        path = self.model / self.names[0]
        data = path.read_bytes()
        path.write_bytes(b"")
        self.assertIn("the file is empty (0 bytes)", self.convert(code=4).stderr)
        path.write_bytes(bytes(100000))
        self.assertIn("the file is filled with zeros", self.convert(code=4).stderr)
        path.write_bytes(data)
        states = self.work / "ckpt" / "global_step5" / "mp_rank_00_model_states.pt"
        data = states.read_bytes()
        states.write_bytes(data[:len(data) // 2] + bytes(len(data) - len(data) // 2))
        self.assertIn("the file ends in a block of zeros", self.convert(source="ckpt", code=4).stderr)
        states.write_bytes(b"")
        self.assertIn("mp_rank_00_model_states.pt: the file is empty", self.convert(source="ckpt", code=4).stderr)

    def test_an_incomplete_step_names_the_complete_ones(self):
        (self.work / "steps").mkdir()
        for name in ("step-1", "step-2", "step-10", "other"):
            self.run_in("ucp-load", "ckpt", f"steps/{name}", "--format", "dcp", "--siblings", "none")
        (self.work / "steps" / "step-10" / ".metadata").unlink()
        said = self.convert(source="steps/step-10", code=3).stderr
        for word in ("step-10/: no .metadata: an incomplete save", "complete checkpoints next to it: step-2, step-1\n"):
            self.assertIn(word, said)

    def test_the_single_file_comes_before_the_index(self):
        single = {"other": tensor("F32", 3)}
        (self.model / "model.safetensors").write_bytes(pack(single))
        self.assertIn("reading model.safetensors", self.convert().stderr)
        self.assertEqual(unpack(self.work / "out" / "model.safetensors")[0], single)

    def test_an_index_of_another_name(self):
        self.index.rename(self.model / "model.safetensors.index.fp16.json")
        self.convert()
        self.expect_model()
        (self.model / "other.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
        self.assertIn("several sets", self.convert(out="again", code=9).stderr)

    def test_files_that_the_index_names_must_be_there(self):
        (self.model / self.names[1]).unlink()
        done = self.convert(code=3)
        self.assertIn(self.names[1], done.stderr)
        self.assertIn("incomplete", done.stderr)

    def test_names_in_the_index_are_no_paths(self):
        outside = self.work / "outside.safetensors"
        outside.write_bytes(pack(self.second))
        for name in ("../outside.safetensors", str(outside), "..", "", "a/b.safetensors"):
            with self.subTest(name=name):
                self.write_index({"emb.weight": self.names[0], "head.weight": name})
                self.assertIn('weight_map of "head.weight"', self.convert(code=4).stderr)

    def test_an_index_that_is_none(self):
        for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "x", "a": "y"}}'):
            with self.subTest(text=text):
                self.index.write_text(text)
                self.convert(code=4)

    def test_the_index_and_the_files_must_agree(self):
        self.write_index({"emb.weight": self.names[1], "norm.weight": self.names[0], "head.weight": self.names[1],
                          "ids": self.names[1]})
        self.assertIn('tensor "emb.weight"', self.convert(code=4).stderr)
        self.write_index({"emb.weight": self.names[0], "gone": self.names[1]})
        self.assertIn('tensor "gone": the index lists it in', self.convert(code=4).stderr)

    def test_what_the_index_forgets_is_told(self):
        self.write_index({"emb.weight": self.names[0], "head.weight": self.names[1]}, total_size=1)
        said = self.convert().stderr
        self.assertIn("does not list: ", said)
        self.assertIn("the index records 1 bytes", said)
        self.expect_model()

    def test_a_tensor_in_two_files_is_refused(self):
        self.index.unlink()
        (self.model / self.names[1]).write_bytes(pack(self.second | {"emb.weight": tensor("F32", 1)}))
        done = self.convert(code=4)
        self.assertIn(f'tensor "emb.weight": in {self.names[0]} and in {self.names[1]}', done.stderr)

    def test_what_is_no_such_file_is_named(self):
        for content, word in ((b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "Git LFS"),
                              (b"PK\x03\x04" + bytes(60), "zip archive"), (b"\x80\x02}q\x00." + bytes(9), "pickle"),
                              (b"<!DOCTYPE html><html></html>", "web page"), (b"", "empty (0 bytes)")):
            with self.subTest(word=word):
                (self.model / self.names[0]).write_bytes(content)
                done = self.convert(code=4)
                self.assertIn(word, done.stderr)
                self.assertIn(self.names[0], done.stderr)

    def test_a_truncated_file_is_refused(self):
        whole = (self.model / self.names[0]).read_bytes()
        for length in (0, 7, 9, 60, len(whole) // 2, len(whole) - 1):
            (self.model / self.names[0]).write_bytes(whole[:length])
            self.convert(code=4)
        (self.model / self.names[0]).write_bytes(whole + b"x")
        self.assertIn("1 bytes follow the last tensor", self.convert(code=4).stderr)

    def test_pieces_of_unknown_places_are_refused(self):
        (self.model / self.names[0]).write_bytes(pack(self.first, {"DCP_SHARDING_INFO": "{}"}))
        self.assertIn("saved_offsets: list expected", self.convert(code=4).stderr)

    def test_the_only_folder_of_a_folder(self):
        parent = self.work / "parent"
        parent.mkdir()
        self.model.rename(parent / "model")
        (parent / "model" / "config.json").write_text("{}")
        (parent / "note.txt").write_text("of something else")
        self.convert(source="parent")
        self.expect_model()
        self.assertTrue((self.work / "out" / "config.json").exists())
        self.assertFalse((self.work / "out" / "note.txt").exists())

    def test_folders_of_checkpoints_stay_what_they_are(self):
        """A Trainer's folder has its weights as safetensors next to DeepSpeed's."""
        (self.work / "ckpt" / "model.safetensors").write_bytes(pack({"stale": tensor("F32", 2)}))
        self.convert(source="ckpt")
        found, _ = unpack(self.work / "out" / "model.safetensors")
        self.assertNotIn("stale", found)
        self.assertIn("embedding.weight", found)
        self.convert("--target", "shard-size=2KB", source="ckpt", out="many")
        self.assertFalse((self.work / "many" / "model.safetensors").exists())


if __name__ == "__main__":
    main("sets_test.py BIN")
