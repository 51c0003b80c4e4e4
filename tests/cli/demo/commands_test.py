#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commands on the small real checkpoint: what their flags promise, by exit code and on disk.

Usage: commands_test.py BIN
"""

import json
import shutil
import sys

sys.dont_write_bytecode = True

from demo import TAG, DemoTest, main  # pylint: disable=wrong-import-position


class Commands(DemoTest):
    def test_the_flags_of_ds_to_universal_make_its_folder(self):
        self.run_in("ucp-union", "--input_folder", f"ckpt/{TAG}", "--output_folder", "ckpt/made",
                    "--num_extract_workers", "2", "--num_merge_workers", "1", "--keep_temp_folder",
                    "--no_strict", "--inject_missing_state")
        self.assertEqual((self.work / "ckpt" / "latest_universal").read_text(), "made")
        self.assertTrue((self.work / "ckpt/made/zero/embedding.weight/fp32.pt").is_file())
        self.assertTrue((self.work / "ckpt/made/mp_rank_00_model_states.pt").is_file())
        self.run_in("ucp-load", "--check", f"ckpt/{TAG}", "ckpt/made")

    def test_output_folder_excludes_a_positional_output(self):
        done = self.run_in("ucp-union", "ckpt", "atoms", "--output_folder", "made", code=2)
        self.assertIn("--output_folder cannot be combined with OUTPUT", done.stderr)
        self.assertEqual(self.left(), ["ckpt"])

    def test_an_output_is_still_needed(self):
        for command in ("ucp-extract", "ucp-union", "ucp-load"):
            self.assertIn("OUTPUT is missing", self.run_in(command, "ckpt", code=2).stderr)

    def test_the_place_of_the_output_is_checked_first(self):
        (self.work / "ckpt" / TAG / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
        for command in ("ucp-extract", "ucp-union", "ucp-load"):
            done = self.run_in(command, "ckpt", "nowhere/out", code=3)
            self.assertIn('nowhere/out: cannot find the parent directory "nowhere"', done.stderr)
            for force in ([], ["--force"]):
                done = self.run_in(command, "ckpt", "./ckpt/", *force, code=2)
                self.assertIn("OUTPUT is the same path as INPUT", done.stderr)
        self.assertEqual(self.left(), ["ckpt"])

    def test_input_and_output_that_have_changed_places_are_told(self):
        for command in ("ucp-extract", "ucp-union", "ucp-load"):
            done = self.run_in(command, "out", "ckpt", code=3)
            self.assertIn("OUTPUT ckpt contains a checkpoint; the arguments may be swapped: pass INPUT first", done.stderr)
            self.assertNotIn("may be swapped", self.run_in(command, "out", "none", code=3).stderr)
        self.assertEqual(self.left(), ["ckpt"])

    def test_a_key_of_another_format_is_told_with_it(self):
        done = self.run_in("ucp-load", "ckpt", "out", "--target", "dp_shard=3", code=2)
        self.assertIn("it belongs to --format dcp, --format dtensor", done.stderr)

    def test_packed_catalogues_outlive_their_source(self):
        self.run_in("ucp-load", "ckpt", "wanted", "--target", "zero=1,dp=3")
        for pack in ("copy", "zstd"):
            self.run_in("ucp-extract", "ckpt", pack, f"--pack={pack}")
            self.assertEqual(self.manifest(pack)["packed"], pack)
        shutil.move(self.work / "ckpt", self.work / "gone")
        for pack in ("copy", "zstd"):
            self.run_in("ucp-load", pack, f"out_{pack}", "--target", "zero=1,dp=3")
            self.assertEqual(self.files(f"out_{pack}"), self.files("wanted"))
            # An equal layout has no files to copy here: they are written again.
            self.assertFalse(self.report_of("ucp-load", pack, f"same_{pack}")["verbatim"])
            self.run_in("ucp-load", "--check", "gone", f"same_{pack}")

    def test_a_catalogue_must_say_how_it_is_packed(self):
        self.run_in("ucp-extract", "ckpt", "catalogue", "--pack")
        for packed in (True, "lz4", None):
            manifest = self.manifest("catalogue")
            manifest["packed"] = packed
            (self.work / "catalogue/shardwright.json").write_text(json.dumps(manifest))
            done = self.run_in("ucp-load", "catalogue", "out", code=4)
            self.assertIn("none, copy or zstd expected", done.stderr)

    def test_check_needs_two_checkpoints(self):
        said = self.run_in("ucp-load", "--check", "ckpt", code=2).stderr
        self.assertIn("--check compares INPUT with a second checkpoint, OUTPUT, which is missing", said)

    def test_check_names_what_differs(self):
        self.run_in("ucp-load", "ckpt", "out", "--target", "dtype=fp32")
        done = self.run_in("ucp-load", "--check", "ckpt", "out", code=5)
        self.assertIn('"embedding.weight" weight: bfloat16 and float32', done.stdout)

    def test_through_atoms_the_bytes_are_the_same(self):
        self.run_in("ucp-union", "ckpt", "atoms")
        for target in ("zero=3,dp=4", "zero=1,dp=3,dtype=fp16", "zero=0,dp=1,dtype=fp32"):
            self.run_in("ucp-load", "ckpt", f"a_{target}", "--target", target)
            self.run_in("ucp-load", "atoms", f"b_{target}", "--target", target)
            self.assertEqual(self.files(f"a_{target}"), self.files(f"b_{target}"), target)


if __name__ == "__main__":
    main("commands_test.py BIN")
