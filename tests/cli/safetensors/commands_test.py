#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commands on .safetensors files: written files, meanings of flags, errors.

Usage: commands_test.py BIN
"""

import json
import os
import shutil

from models import ModelTest, main, pack, tensor, unpack

NOTES = "shardwright"


class Commands(ModelTest):
    def test_a_checkpoint_becomes_model_files_and_comes_back(self):
        report = self.report_of("ucp-load", "ckpt", "files", "--format", "safetensors")
        self.assertTrue(any("exp_avg" in left for left in report["not_carried"]), report["not_carried"])
        found, metadata = unpack(self.work / "files" / "model.safetensors")
        self.assertEqual(metadata["format"], "pt")
        self.assertEqual(found["embedding.weight"][0], "BF16")
        done = self.run_in("ucp-load", "files", "back", "--format", "deepspeed", "--target", "zero=1,dp=3")
        self.assertIn("master weights, which the source lacks", done.stderr)
        self.assertEqual((self.work / "back" / "latest").read_text(), "global_step5")
        self.convert(source="back", out="again")
        self.assertEqual(self.files("again"), self.files("files"))

    def test_masters_there_and_back(self):
        self.convert("--only", "master", source="ckpt", out="files")
        found, _ = unpack(self.work / "files" / "model.safetensors")
        self.assertEqual({found[name][0] for name in ("embedding.weight", "norm_out.bias")}, {"F32"})
        done = self.run_in("ucp-load", "files", "back", "--format", "deepspeed", "--target", "zero=2,dp=2")
        self.assertNotIn("master weights", done.stderr, "those of float32 are their own")
        self.convert("--only", "master", source="back", out="again")
        self.assertEqual(self.files("again"), self.files("files"))
        said = self.run_in("ucp-load", "--check", "ckpt", "files", code=5).stderr
        self.assertIn("add --only weight or --only master", said)
        self.assertNotIn("--map auto", said)
        # The weights are the masters, rounded, as they were.
        self.convert(source="back", out="weights")
        self.convert(source="ckpt", out="wanted")
        self.assertEqual(unpack(self.work / "weights" / "model.safetensors")[0],
                         unpack(self.work / "wanted" / "model.safetensors")[0])

    def test_files_are_cut_by_size(self):
        self.convert("--target", "shard-size=3KB", source="ckpt", out="many")
        index = json.loads((self.work / "many" / "model.safetensors.index.json").read_text())
        files = sorted((self.work / "many").glob("model-*.safetensors"))
        self.assertGreater(len(files), 2)
        self.assertEqual(sorted(set(index["weight_map"].values())), [path.name for path in files])
        total = 0
        for number, path in enumerate(files, start=1):
            self.assertEqual(path.name, f"model-{number:05}-of-{len(files):05}.safetensors")
            tensors, _ = unpack(path)
            size = sum(len(data) for _, _, data in tensors.values())
            total += size
            self.assertTrue(size <= 3000 or len(tensors) == 1, (path.name, size))
            self.assertEqual({index["weight_map"][name] for name in tensors}, {path.name})
        self.assertEqual(index["metadata"]["total_size"], total)
        self.convert(source="ckpt", out="one")
        self.run_in("ucp-load", "--check", "one", "many")

    def test_values_of_keys(self):
        for words, word in ((("--target", "shard-size=0"), "a size above 0"),
                            (("--target", "shard-size=many"), "is not a size"),
                            (("--target", "dtype=int8"), "a floating type expected"),
                            (("--target", "dtype=float8_e8m0fnu"), "a floating type expected"),
                            (("--target", "zero=2"), "is not one of shard-size, dtype, only"),
                            (("--only", "both"), "--only")):
            with self.subTest(words=words):
                self.assertIn(word, self.convert(*words, code=2).stderr)
        self.assertIn("--only requires --format", self.run_in("ucp-load", "ckpt", "out", "--only", "master", code=2).stderr)

    def test_types_are_converted_by_name_only(self):
        self.convert("--target", "dtype=float32")
        found, _ = unpack(self.work / "out" / "model.safetensors")
        self.assertEqual({name: dtype for name, (dtype, _, _) in found.items()},
                         {"emb.weight": "F32", "norm.weight": "F32", "head.weight": "F32", "ids": "I64"})
        self.convert(out="same")
        self.expect_model("same")

    def test_metadata_is_kept_where_files_agree(self):
        for name, tensors, value in zip(self.names, (self.first, self.second), "ab"):
            (self.model / name).write_bytes(pack(tensors, {"format": "pt", "note": "kept", "part": value}))
        self.assertIn("differs from file to file", self.convert().stderr)
        self.assertEqual(unpack(self.work / "out" / "model.safetensors")[1], {"format": "pt", "note": "kept"})

    def test_files_of_others_have_no_order(self):
        done = self.run_in("ucp-load", "model", "out", "--format", "deepspeed", "--target", "zero=2,dp=2", code=9)
        self.assertIn("neither the order of the parameters", done.stderr)
        self.run_in("ucp-load", "model", "atoms", "--format", "universal")
        self.run_in("ucp-load", "--check", "model", "atoms", code=5)  # masters and weights
        self.convert(source="atoms", out="back")
        self.expect_model("back")
        # Nor do atoms that were made of them.
        done = self.run_in("ucp-load", "atoms", "out", "--format", "deepspeed", "--target", "zero=2,dp=2", code=9)
        self.assertIn("neither the order of the parameters", done.stderr)

    def test_notes_of_other_tensors_are_not_used(self):
        self.convert(source="ckpt", out="files")
        path = self.work / "files" / "model.safetensors"
        tensors, metadata = unpack(path)
        notes = json.loads(metadata[NOTES])
        for change in ("names", "places", "groups", "tied", "no json", "extra tensor"):
            with self.subTest(change=change):
                changed, more = json.loads(json.dumps(notes)), {}
                if change == "names":
                    changed["names"] ^= 1
                elif change == "places":
                    changed["places"][0] = changed["places"][1]
                elif change == "groups":
                    changed["groups"][0] = 99
                elif change == "tied":
                    changed["tied"] = {"a": ["nobody", 9999]}
                elif change == "extra tensor":
                    more = {"lora": tensor("F32", 2)}
                text = "{" if change == "no json" else json.dumps(changed)
                path.write_bytes(pack(tensors | more, metadata | {NOTES: text}))
                done = self.run_in("ucp-load", "files", "out", "--format", "deepspeed", "--target", "zero=1,dp=1", code=9)
                self.assertIn("notes of Shardwright are not used", done.stderr)
                done = self.convert(source="files")
                self.assertNotIn(NOTES, unpack(self.work / "out" / "model.safetensors")[1])
                shutil.rmtree(self.work / "out")

    def test_names_that_save_model_has_dropped_are_tied(self):
        (self.work / "tied").mkdir()
        (self.work / "tied" / "model.safetensors").write_bytes(
            pack(self.first, {"format": "pt", "head.weight": "emb.weight"}))
        rows = self.report_of("ucp-load", "tied", "--list")["parameters"]
        self.assertEqual({row["name"]: row["kind"] for row in rows},
                         {"emb.weight": "trainable", "head.weight": "tied to emb.weight",
                          "norm.weight": "trainable"})
        self.convert(source="tied")
        found, metadata = unpack(self.work / "out" / "model.safetensors")
        self.assertEqual(found, self.first)
        self.assertEqual(metadata["head.weight"], "emb.weight")

    def test_eight_bit_weights_stay(self):
        (self.work / "eight").mkdir()
        tensors = {"w": tensor("F8_E4M3", 4, 4), "w_scale_inv": tensor("F32", 1, 1, seed=1), "s": tensor("F32", 4)}
        (self.work / "eight" / "model.safetensors").write_bytes(pack(tensors))
        report = self.report_of("ucp-load", "eight", "out", "--format", "safetensors", "--target", "dtype=bf16")
        self.assertTrue(any("float8_e4m3fn" in left for left in report["not_carried"]), report)
        found, _ = unpack(self.work / "out" / "model.safetensors")
        self.assertEqual(found["w"], tensors["w"])
        self.assertEqual(found["w_scale_inv"], tensors["w_scale_inv"])
        self.assertEqual(found["s"][0], "BF16")
        self.run_in("ucp-load", "eight", "atoms", "--format", "universal")
        scale = next((self.work / "atoms").glob("*/zero/w_scale_inv"))
        self.assertEqual([path.name for path in scale.iterdir()], ["buffer.pt"])

    def test_list_and_explain(self):
        self.assertIn("safetensors checkpoint model", self.run_in("ucp-load", "model", "--list").stdout)
        said = self.run_in("ucp-load", "model", "--explain", "head.weight").stdout
        self.assertIn(self.names[1], said)

    def test_a_file_in_place_of_a_folder(self):
        (self.model / "config.json").write_text("{}")
        (self.model / "one.safetensors").write_bytes(pack(self.first | self.second))
        one = "model/one.safetensors"
        self.convert(source=one)
        self.expect_model()
        self.assertEqual(sorted(os.listdir(self.work / "out")), ["model.safetensors", "shardwright.json"])
        self.run_in("ucp-load", "--check", one, "model")
        self.assertIn("safetensors checkpoint one", self.run_in("ucp-load", one, "--list").stdout)
        self.assertIn("one.safetensors", self.run_in("ucp-load", one, "--explain", "head.weight").stdout)
        self.run_in("ucp-load", one, "atoms", "--format", "universal")
        self.convert(source="atoms", out="back")
        self.expect_model("back")
        self.run_in("ucp-extract", one, "catalogue")
        self.convert(source="catalogue", out="again")
        self.expect_model("again")

    def test_other_files_are_no_checkpoints(self):
        for name in (f"model/{self.names[0]}", "model/model.safetensors.index.json", "ckpt/latest",
                     "ckpt/global_step5/mp_rank_00_model_states.pt"):
            with self.subTest(name=name):
                done = self.convert(source=name, code=3)
                self.assertIn(f"{name}: a file, where a folder is expected", done.stderr)
        self.assertIn("absent.safetensors: no such file",
                      self.convert(source="model/absent.safetensors", code=3).stderr)

    def test_a_check_compares_hyper_parameters(self):
        """The files have no options of a trainer, but record hyper-parameters for every optimizer."""
        self.convert("--only", "master", source="ckpt", out="files")
        self.run_in("ucp-load", "files", "native", "--format", "deepspeed", "--target", "zero=1,dp=1")
        self.run_in("ucp-load", "--check", "native", "files")
        path = self.work / "files" / "model.safetensors"
        tensors, metadata = unpack(path)
        notes = json.loads(metadata[NOTES])
        was = notes["hyper"][0]["lr"]
        notes["hyper"][0]["lr"] = 0.75
        path.write_bytes(pack(tensors, metadata | {NOTES: json.dumps(notes)}))
        done = self.run_in("ucp-load", "--check", "native", "files", code=5)
        self.assertIn(f'parameter groups 0 and 0 ("embedding.weight") lr: {was} and 0.75', done.stdout)

    def test_catalogues_and_packs(self):
        self.convert(out="wanted")
        for pack_as in ("", "copy", "zstd"):
            with self.subTest(pack=pack_as):
                catalogue, out = f"catalogue{pack_as}", f"from{pack_as}"
                self.run_in("ucp-extract", "model", catalogue, *([f"--pack={pack_as}"] if pack_as else []))
                self.convert(source=catalogue, out=out)
                self.assertEqual(self.files(out), self.files("wanted"))

    def test_what_lies_beside_comes_along(self):
        (self.model / "config.json").write_text("{}")
        (self.model / "tokenizer.json").write_bytes(bytes(range(256)) * 1000)
        self.convert()
        self.assertEqual((self.work / "out" / "config.json").read_text(), "{}")
        self.assertEqual((self.work / "out" / "tokenizer.json").read_bytes(), bytes(range(256)) * 1000)
        self.assertFalse((self.work / "out" / self.names[0]).exists())
        self.assertFalse((self.work / "out" / self.index.name).exists())


if __name__ == "__main__":
    main("commands_test.py BIN")
