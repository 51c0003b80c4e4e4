#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A command continues the stopped run of the same command. It refuses that of another one and names what differs.

Usage: resume_test.py BIN
"""

import os
import shutil
import sys

sys.dont_write_bytecode = True

from demo import DemoTest, main  # pylint: disable=wrong-import-position

KILL = {"SHARDWRIGHT_FAULT": "write:20:kill"}
FLAGS = ("--target", "zero=3,dp=3", "--threads", "1")


class Resume(DemoTest):
    def killed(self, *words, **fault):
        self.run_in(*words, code=-9, **(fault or KILL))
        stage, = self.work.glob("out.partial-*")
        return stage

    def test_the_same_command_continues(self):
        self.run_in("ucp-load", "ckpt", "wanted", *FLAGS)
        self.killed("ucp-load", "ckpt", "out", *FLAGS)
        # These flags have no influence on the output.
        result = self.report_of("ucp-load", "ckpt", "out", *FLAGS[:2], "--threads=2", "--memory=1GiB", "--verify=readback")
        self.assertGreater(result["run"]["units_resumed"], 0)
        self.assertEqual(self.files("out"), self.files("wanted"))
        self.run_in("ucp-load", "ckpt", "out", *FLAGS, code=6)
        self.assertTrue(self.report_of("ucp-load", "ckpt", "out", *FLAGS, "--resume")["found_done"])

    def test_another_command_is_refused_and_changes_nothing(self):
        stage = self.killed("ucp-load", "ckpt", "out", *FLAGS)
        before = self.files(stage.name)
        for words, message in ((("--target", "zero=3,dp=4"), "it differs in --target (dp=3 before, dp=4 now);"),
                               (("--format", "dcp", "--target", "dp_shard=3"), "--format (deepspeed before, dcp now)"),
                               ((*FLAGS[:2], "--siblings=none"), "it differs in --siblings (copy before, none now)")):
            for more in ((), ("--resume",)):
                with self.subTest(words=words, more=more):
                    said = self.run_in("ucp-load", "ckpt", "out", *words, *more, code=6).stderr
                    self.assertIn(message, said)
                    self.assertIn("repeat the command of that run, or pass --no-resume to start again", said)
        path = next(iter((self.work / "ckpt").rglob("*optim_states.pt")))
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        said = self.run_in("ucp-load", "ckpt", "out", *FLAGS, code=6).stderr
        self.assertIn("it differs in the files of INPUT, which have changed", said)
        self.assertEqual(self.files(stage.name), before)
        self.run_in("ucp-load", "ckpt", "out", *FLAGS, "--no-resume")
        self.assertFalse(stage.exists())
        self.run_in("ucp-load", "--check", "ckpt", "out")

    def test_packs_and_atoms_too(self):
        for command, words, other in (("ucp-extract", ("--pack=zstd",), ("--pack",)), ("ucp-union", (), None)):
            with self.subTest(command):
                stage = self.killed(command, "ckpt", "out", *words, "--threads=1", SHARDWRIGHT_FAULT="write:8:kill")
                if other is not None:
                    self.assertIn("it differs in --pack (zstd before, copy now)",
                                  self.run_in(command, "ckpt", "out", *other, code=6).stderr)
                    self.assertTrue(stage.exists())
                self.run_in(command, "ckpt", "out", *words)
                self.run_in(command, "ckpt", "fresh", *words)
                self.assertEqual(self.files("out"), self.files("fresh"))
                for name in ("out", "fresh"):
                    shutil.rmtree(self.work / name)

    def test_a_compressed_pack_is_checked_like_every_output(self):
        extract = "ucp-extract", "ckpt", "out", "--pack=zstd"
        self.run_in(*extract, "--verify=readback")
        whole = self.files("out")
        self.assertTrue(self.report_of(*extract, "--resume")["found_done"])
        for verify, code in (("checksums", 0), ("readback", 7)):
            done = self.run_in(*extract, "--force", f"--verify={verify}", "--threads=1", code=code, SHARDWRIGHT_FAULT="write:8:flip")
            if code != 0:
                self.assertIn("the data read back differs from the data written", done.stderr)
        self.run_in(*extract, "--force")
        self.assertEqual(self.files("out"), whole)

    def test_an_old_output_that_was_taken_for_a_stage_leaves_nothing(self):
        self.run_in("ucp-load", "ckpt", "fresh", "--target", "zero=3,dp=2")
        self.run_in("ucp-load", "ckpt", "out", "--target", "zero=3,dp=4")
        self.run_in("ucp-load", "ckpt", "out", "--target", "zero=3,dp=2", "--force", code=-9,
                    SHARDWRIGHT_FAULT="commit.sync_parent:1:kill")
        (self.work / "out").rename(self.work / "moved")
        self.run_in("ucp-load", "ckpt", "out", "--target", "zero=3,dp=2")
        self.assertEqual(self.files("out"), self.files("fresh"))

    def test_a_folder_of_links_is_not_replaced(self):
        (self.work / "out").mkdir()
        (self.work / "out" / "model.safetensors").symlink_to("../blob")
        said = self.run_in("ucp-load", "ckpt", "out", *FLAGS, "--force", code=6).stderr
        self.assertIn("model.safetensors is neither a file nor a folder", said)
        self.assertTrue((self.work / "out" / "model.safetensors").is_symlink())

    def test_the_two_flags_exclude_each_other(self):
        said = self.run_in("ucp-load", "ckpt", "out", *FLAGS, "--resume", "--no-resume", code=2).stderr
        self.assertIn("--resume cannot be combined with --no-resume", said)


if __name__ == "__main__":
    main("resume_test.py BIN")
