#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Equal layouts: the source's files come out as they are, and the two checkpoints stay two.

Usage: verbatim_test.py BIN
"""

import os
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True

from demo import TAG, DemoTest, main  # pylint: disable=wrong-import-position

SHARD = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
# A file system that can clone, for the commands alone: FICLONE copies.
CLONES = r"""
#include <dlfcn.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>
int ioctl(int fd, unsigned long request, ...) {
  va_list list;
  va_start(list, request);
  void* argument = va_arg(list, void*);
  va_end(list);
  if (request != FICLONE)
    return ((int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl"))(fd, request, argument);
  int from = (int)(long)argument;
  char buffer[4096];
  off_t at = 0;
  for (ssize_t n; (n = pread(from, buffer, sizeof buffer, at)) > 0; at += n)
    if (pwrite(fd, buffer, n, at) != n) return -1;
  return 0;
}
"""


def save_over(path):
    """Saves something else under a file's name, as torch.save does: the file is cut and written."""
    with open(path, "wb") as file:
        file.write(b"the next run")


class Verbatim(DemoTest):
    def clones(self):
        """The environment in which files can be cloned."""
        if os.environ.get("SHARDWRIGHT_TEST_SANITIZED"):
            self.skipTest("a sanitizer wants to be the first library")
        source = self.work / "clones.c"
        source.write_text("#define _GNU_SOURCE\n" + CLONES)
        library = self.work / "clones.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return {"LD_PRELOAD": str(library)}

    def without_manifest_digests(self, folder):
        return [line["path"] for line in self.manifest(folder)["files"] if "xxh3_128" not in line]

    def test_the_output_is_the_source_byte_for_byte(self):
        result = self.report_of("ucp-load", "ckpt", "out", "--target", "zero=2,dp=2", "--verify=readback")
        self.assertEqual(self.files("out"), self.files("ckpt"))
        self.assertTrue(result["verbatim"])
        self.assertFalse(result["linked"])
        self.assertEqual(result["run"]["members_without_checksum"], 0)
        self.assertGreater(result["run"]["members_verified"], 10)
        self.assertEqual(self.without_manifest_digests("out"), [])
        self.run_in("ucp-load", "--check", "ckpt", "out")

    def test_saving_over_either_side_leaves_the_other_whole(self):
        for side, other in (("ckpt", "out"), ("out", "ckpt")):
            self.run_in("ucp-load", "ckpt", "out")
            whole = self.files(other)
            for path in sorted((self.work / side).rglob("*")):
                if path.is_file():
                    save_over(path)
            self.assertEqual(self.files(other), whole, f"saved over {side}")
            shutil.rmtree(self.work / side)
            if side == "ckpt":
                shutil.move(self.work / "out", self.work / "ckpt")

    def test_saving_over_a_clone_leaves_the_source_whole(self):
        result = self.report_of("ucp-load", "ckpt", "out", **self.clones())
        self.assertEqual(result["run"]["files_cloned"], 3)
        self.assertEqual(result["run"]["payload_bytes_read"], 0)
        self.assertEqual(self.files("out"), self.files("ckpt"))
        self.assertEqual(len(self.without_manifest_digests("out")), 3)
        whole = self.files("ckpt")
        save_over(self.work / "out" / TAG / SHARD)
        self.assertEqual(self.files("ckpt"), whole)

    def test_what_is_to_be_verified_is_not_cloned(self):
        result = self.report_of("ucp-load", "ckpt", "out", "--verify=readback", **self.clones())
        self.assertEqual(result["run"]["files_cloned"], 0)
        self.assertEqual(self.without_manifest_digests("out"), [])

    def test_damage_in_any_storage_is_found_while_copying(self):
        path = self.work / "ckpt" / TAG / SHARD
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        done = self.run_in("ucp-load", "ckpt", "out", "--verify=readback", code=4)
        self.assertIn(SHARD, done.stderr)
        self.assertIn("CRC-32", done.stderr)
        self.assertEqual(self.left(), ["ckpt"])

    def test_a_killed_copy_is_resumed(self):
        self.run_in("ucp-load", "ckpt", "wanted", "--verify=readback")
        self.run_in("ucp-load", "ckpt", "out", "--verify=readback", "--threads=1", code=-9,
                    SHARDWRIGHT_FAULT="write:10:kill")
        result = self.report_of("ucp-load", "ckpt", "out", "--verify=readback", "--resume")
        self.assertGreater(result["run"]["units_resumed"], 0)
        self.assertEqual(self.files("out"), self.files("wanted"))
        self.assertEqual(self.manifest("out"), self.manifest("wanted"))

    def test_links_share_their_bytes_and_say_so(self):
        done = self.run_in("ucp-load", "ckpt", "out", "--link")
        self.assertIn("changes both checkpoints", done.stderr)
        self.assertEqual(self.inodes(f"out/{TAG}"), self.inodes(f"ckpt/{TAG}"))
        self.assertTrue(self.manifest("out")["linked"])
        self.assertEqual({line.get("clone_mode") for line in self.manifest("out")["files"]}, {"link", None})
        self.assertNotEqual((self.work / "out/latest").stat().st_ino,
                            (self.work / "ckpt/latest").stat().st_ino)

    def test_a_file_that_is_a_symbolic_link_is_followed(self):
        path = self.work / "ckpt" / TAG / SHARD
        shutil.move(path, self.work / "elsewhere.pt")
        path.symlink_to("../../elsewhere.pt")
        for flags in ((), ("--verify=readback",), ("--link",)):
            self.run_in("ucp-load", "ckpt", "out", *flags)
            self.assertFalse((self.work / "out" / TAG / SHARD).is_symlink())
            self.assertEqual(self.files("out"), self.files("ckpt"))
            shutil.rmtree(self.work / "out")

    def test_what_cannot_be_linked_is_not_copied_instead(self):
        self.run_in("ucp-union", "ckpt", "atoms")
        self.run_in("ucp-extract", "ckpt", "packed", "--pack")
        for words in (("ckpt", "--target", "dp=3"), ("ckpt", "--format", "universal"), ("atoms",), ("packed",),
                      ("ckpt", "--verify=readback"), ("ckpt", "--node-local")):
            done = self.run_in("ucp-load", words[0], "out", "--link", *words[1:], code=2)
            self.assertIn("leave --link out", done.stderr)
        error = self.report_of("ucp-load", "ckpt", "out", "--link", code=9,
                               SHARDWRIGHT_FAULT="link:2:eacces")
        self.assertIn("cannot link", error["message"])
        self.assertEqual(self.left(), ["atoms", "ckpt", "packed"])

    def test_what_a_stopped_linking_left_is_never_written_into(self):
        whole = self.files("ckpt")
        kill = {"SHARDWRIGHT_FAULT": "link:3:kill"}
        self.run_in("ucp-load", "ckpt", "out", "--link", code=-9, **kill)
        self.run_in("ucp-load", "ckpt", "out", code=6)  # a copy is another run
        self.assertEqual(self.files("ckpt"), whole)
        stage, = self.work.glob("out.partial-*")
        shutil.rmtree(stage / ".journal")
        (stage / ".journal").mkdir()
        self.run_in("ucp-load", "ckpt", "out", "--resume")
        self.assertEqual(self.files("ckpt"), whole)
        self.assertEqual(self.files("out"), whole)
        save_over(self.work / "out" / TAG / SHARD)
        self.assertEqual(self.files("ckpt"), whole)

    def test_stopped_linking_is_resumed(self):
        self.run_in("ucp-load", "ckpt", "out", "--link", code=-9, SHARDWRIGHT_FAULT="link:3:kill")
        self.run_in("ucp-load", "ckpt", "out", "--link", "--resume")
        self.assertEqual(self.inodes(f"out/{TAG}"), self.inodes(f"ckpt/{TAG}"))

    def test_a_catalogue_of_an_equal_layout_copies_the_files_that_it_describes(self):
        self.run_in("ucp-extract", "ckpt", "catalogue")
        self.run_in("ucp-load", "catalogue", "out")
        self.assertEqual(self.files("out"), self.files("ckpt"))
        self.run_in("ucp-load", "catalogue", "linked", "--link")
        self.assertEqual(self.inodes(f"linked/{TAG}"), self.inodes(f"ckpt/{TAG}"))

    def test_changed_files_are_neither_copied_nor_linked(self):
        self.run_in("ucp-extract", "ckpt", "catalogue")
        with open(self.work / "ckpt" / TAG / "mp_rank_00_model_states.pt", "ab") as file:
            file.write(b"\0")
        for flags in ((), ("--link",), ("--verify=readback",)):
            done = self.run_in("ucp-load", "catalogue", "out", *flags, code=3)
            self.assertIn("changed since it was catalogued", done.stderr)
            self.assertFalse((self.work / "out").exists())

    def test_a_dry_run_tells_links_from_bytes(self):
        size = sum(map(len, self.files("ckpt").values()))
        plan = self.report_of("ucp-load", "ckpt", "out", "--dry-run")["plan"]
        self.assertEqual((plan["output_bytes"], plan["linked_files"]), (size, 0))
        plan = self.report_of("ucp-load", "ckpt", "out", "--dry-run", "--link")["plan"]
        self.assertEqual((plan["output_bytes"], plan["linked_files"]), (len(TAG), 3))
        self.assertEqual(self.left(), ["ckpt"])


if __name__ == "__main__":
    main("verbatim_test.py BIN")
