#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of weights as a user meets them: a folder that programs open as a model, a check against the source, the
default format without --format, and a dry run that reports whether the output fits.

Usage: exports_test.py BIN
"""

import json
import os
import pathlib
import shutil
import struct
import sys

sys.dont_write_bytecode = True

from models import ModelTest, main, pack, unpack  # pylint: disable=wrong-import-position

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
CONFIG = ('{\n  "torch_dtype": "bfloat16",\n  "text_config": {"dtype" : "float16", "width": 3},\n'
          '  "quantization_config": {"bnb_4bit_compute_dtype": "float16"},\n  "note": "dtype\\""\n}\n')
OF_MODEL = {"config.json": CONFIG, "generation_config.json": "{}", "tokenizer.json": "{}", "merges.txt": "a b", "LICENSE.txt": "free",
            "tokenizer.model": "\x00", "chat_template.jinja": "{{ }}", "modeling_own.py": "pass", "README.md": "#"}
OF_TRAINER = {"trainer_state.json": "{}", "rng_state_0.pth": "0", "rng_state_7.pth": "7", "training_args.bin": "args",
              "zero_to_fp32.py": "#!", "scheduler.pt": "s", "random_states_0.pkl": "p", "train.py": "pass"}


class ModelFolder(ModelTest):
    def setUp(self):
        super().setUp()
        for name, text in (OF_MODEL | OF_TRAINER).items():
            (self.work / "ckpt" / name).write_text(text)

    def test_holds_only_what_belongs_to_a_model(self):
        done = self.run_in("ucp-load", "ckpt", "out", "--format", "safetensors", "--json=report")
        self.assertEqual(set(self.files("out")), set(OF_MODEL) | {"model.safetensors"})
        left = {one["name"] for one in json.loads((self.work / "report").read_text())["result"]["siblings"]["left_out"]}
        self.assertLessEqual(set(OF_TRAINER), left)
        self.assertNotIn("rng_state", done.stderr)
        # Files for a trainer have all of it.
        self.run_in("ucp-load", "ckpt", "again", "--target", "dp=3,zero=3")
        self.assertLessEqual(set(OF_MODEL) | set(OF_TRAINER) - {"rng_state_7.pth"}, set(self.files("again")))

    def dtypes(self, out):
        config = json.loads((self.work / out / "config.json").read_text())
        self.assertEqual(config["quantization_config"], {"bnb_4bit_compute_dtype": "float16"})
        self.assertEqual((config["note"], config["text_config"]["width"]), ('dtype"', 3))
        return config["torch_dtype"], config["text_config"]["dtype"]

    def test_the_configuration_has_the_type_of_the_weights(self):
        for words, name in (((), "bfloat16"), (("--only", "master"), "float32"), (("--target", "dtype=fp16"), "float16")):
            with self.subTest(words):
                done = self.convert(*words, source="ckpt", out=f"out_{name}")
                self.assertEqual(self.dtypes(f"out_{name}"), (name, name))
                self.assertIn(f"config.json: the element type is set to {name}", done.stderr)
        self.run_in("ucp-load", "ckpt", "native", "--target", "zero=3,dp=3")
        self.assertEqual((self.work / "native/config.json").read_text(), CONFIG, "files for a trainer keep every byte")

    def test_a_missing_configuration_is_a_warning(self):
        said = "no config.json was found next to the checkpoint"
        self.assertNotIn(said, self.convert(source="ckpt", out="with").stderr)
        (self.work / "ckpt/config.json").unlink()
        self.assertIn(said, self.convert(source="ckpt", out="without").stderr)
        self.assertNotIn(said, self.convert("--siblings", "none", source="ckpt", out="none").stderr)
        self.assertNotIn(said, self.run_in("ucp-load", "ckpt", "native", "--target", "zero=3").stderr)


class DefaultFormat(ModelTest):
    def wrote(self, *words):
        """The format of an output without --format."""
        shutil.rmtree(self.work / "out", ignore_errors=True)
        done = self.run_in("ucp-load", "-v", *words)
        kind = self.manifest("out")["kind"]
        self.assertIn(f"the output has the checkpoint format of the source, {kind}; use --format to choose another", done.stderr)
        return kind

    def test_is_that_of_the_source(self):
        shutil.copytree(DATA / "dtensor/fsdp_w3/ckpt", self.work / "actor")
        shutil.copytree(DATA / "dcp/nested_w3/ckpt", self.work / "dcp")
        self.assertEqual(self.wrote("ckpt", "out", "--target", "zero=3"), "deepspeed")
        self.assertEqual(self.wrote("actor", "out"), "dtensor")
        self.assertEqual(self.wrote("dcp", "out", "--target", "dp_shard=2"), "dcp")
        self.assertEqual(self.wrote("model", "out"), "safetensors")
        self.assertNotIn("format of the source", self.run_in("ucp-load", "dcp", "named", "--format", "dcp").stderr)

    def test_of_catalogues_and_atoms_is_that_of_what_they_were_made_from(self):
        shutil.copytree(DATA / "dcp/nested_w3/ckpt", self.work / "dcp")
        for source, kind in (("ckpt", "deepspeed"), ("dcp", "dcp")):
            self.run_in("ucp-extract", source, f"{kind}_catalogue")
            self.run_in("ucp-union", source, f"{kind}_atoms")
            self.assertEqual(self.wrote(f"{kind}_catalogue", "out"), kind)
            self.assertEqual(self.wrote(f"{kind}_atoms", "out"), kind)
            (self.work / f"{kind}_atoms/shardwright.json").unlink()
            self.assertEqual(self.wrote(f"{kind}_atoms", "out"), "deepspeed", "nothing tells")

    def test_keys_of_another_format_name_it(self):
        done = self.run_in("ucp-load", "model", "out", "--target", "zero=2,dp=2", code=2)
        self.assertIn('target key "zero" is not one of', done.stderr)
        self.assertIn("--format deepspeed", done.stderr)
        self.assertFalse((self.work / "out").exists())


class Checks(ModelTest):
    def check(self, *words, code=0):
        return self.run_in("ucp-load", "--check", *words, code=code)

    def test_an_export_is_compared_with_its_source(self):
        for only in ("weight", "master"):
            self.convert("--only", only, source="ckpt", out=only)
            tensors = len(unpack(self.work / only / "model.safetensors")[0])
            done = self.check("ckpt", only, "--only", only)
            self.assertIn(f"{tensors} tensors equal, 0 differences", done.stdout)
            self.check(only, "ckpt", "--only", only)
        # Rounded masters are the compute weights; compute weights are not the masters.
        self.check("master", "ckpt", "--only", "weight")
        self.assertIn("largest difference", self.check("weight", "ckpt", "--only", "master", code=5).stdout)
        self.assertIn("step", self.check("ckpt", "weight", code=5).stdout, "without --only all is compared")

    def change(self, path, name, dtype, *values):
        """Writes numbers over the first elements of a tensor."""
        tensors, metadata = unpack(path)
        kind, shape, data = tensors[name]
        self.assertEqual(kind, dtype)
        new = struct.pack(f"<{len(values)}f", *values)
        tensors[name] = kind, shape, new + data[len(new):]
        path.write_bytes(pack(tensors, metadata))

    def test_tensors_are_told_worst_first_with_their_differences(self):
        count, elems = 25, 8
        tensors = {f"w{number:02}": ("F32", [elems], struct.pack(f"<{elems}f", *[1.0] * elems)) for number in range(count)}
        for name in ("a", "b"):
            (self.work / name).mkdir()
            (self.work / name / "model.safetensors").write_bytes(pack(tensors, {"format": "pt"}))
        path = self.work / "b/model.safetensors"
        for number in range(count):
            self.change(path, f"w{number:02}", "F32", 1.0, 1.0 + number, 1.0 - number)
        self.change(path, "w03", "F32", float("nan"))
        lines = self.check("a", "b", code=5).stdout.splitlines()
        self.assertEqual(lines[0].split(":")[0], '"w03" weight [8]')
        self.assertIn("largest difference inf", lines[0])
        self.assertIn('"w24" weight [8]: element 1: 1', lines[1])
        self.assertIn("; largest difference 24, mean 6", lines[1])
        self.assertEqual([line[1:4] for line in lines[2:5]], ["w23", "w22", "w21"])
        self.assertEqual(lines[20:], ["and 4 more", "1 tensor equal, 24 differences, 800 B compared"])

    def test_other_flags_of_formats_mean_nothing(self):
        self.assertIn("--adapter cannot be combined with --check", self.check("ckpt", "ckpt", "--adapter", "all", code=2).stderr)


class Space(ModelTest):
    def test_a_dry_run_compares_it(self):
        free = os.statvfs(self.work)
        size = min(2 * free.f_blocks * free.f_frsize, 8 << 40)  # more than the file system holds
        if size <= free.f_bavail * free.f_frsize:
            self.skipTest("a file system of several terabytes")
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        path = self.work / "large/model.safetensors"
        path.parent.mkdir()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        try:
            os.truncate(path, 8 + len(header) + size)  # a hole
        except OSError:
            self.skipTest("a file system without files of this size")
        done = self.run_in("ucp-load", "large", "out", "--format", "safetensors", "--dry-run", "--json=report", code=7)
        self.assertIn("needed, ", done.stderr)
        self.assertIn(" free", done.stderr)
        self.assertIn("disk ", done.stdout)
        disk = json.loads((self.work / "report").read_text())["result"]["disk"]
        self.assertGreater(disk["needed_bytes"], disk["free_bytes"])
        disk = self.report_of("ucp-load", "ckpt", "out", "--target", "zero=3", "--dry-run")["disk"]
        self.assertGreater(disk["free_bytes"], disk["needed_bytes"])


if __name__ == "__main__":
    main("exports_test.py BIN")
