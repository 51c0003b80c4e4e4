#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults and limits that only some file systems have: closes that fail, syncs that are ignored, directories that cannot be
renamed, full disks.

Usage: faults_test.py BIN [ARGUMENTS OF unittest]
Exits with 77 where this machine cannot mount anything.
"""

import errno
import os
import pathlib
import shutil
import signal
import sys
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position
import mounts  # pylint: disable=wrong-import-position
from harness import DEMO, finish, run, start, tree  # pylint: disable=wrong-import-position


class Given:
    """The command line, and the folder of all mounts."""

    bin = pathlib.Path()
    world = pathlib.Path()


class Case(unittest.TestCase):
    def setUp(self):
        self.world = Given.world / self.id().rsplit(".", 1)[-1]
        self.world.mkdir()

    def mounted(self, system, *words):
        try:
            return system(self.world, *words)
        except mounts.Missing as why:
            self.assertFalse(mounts.OWN_MACHINE, str(why))
            self.skipTest(str(why))

    def tool(self, name, *argv, code=0, **options):
        done = run([Given.bin / name, *argv], **options)
        self.assertEqual(done.code, code, str(done))
        return done

    def load(self, output, *more, code=0, **options):
        return self.tool("ucp-load", DEMO, output, "--target", "zero=3,dp=3", "--threads", "1", *more, code=code, **options)


class Fuse(Case):
    def test_a_close_that_fails_is_exit_code_7_and_the_output_is_not_there(self):
        node, _ = self.mounted(mounts.faulty, "close-fails 9000")
        for tool, output in (("ucp-load", "zero"), ("ucp-union", "atoms")):
            argv = [DEMO, node / output, *(["--target", "zero=3,dp=3"] if tool == "ucp-load" else [])]
            done = self.tool(tool, *argv, code=7)
            self.assertIn("quota exceeded", done.stderr)
            self.assertFalse((node / output).exists())
        (self.world / "settings").write_text("", encoding="ascii")
        self.load(node / "zero", "--resume")
        self.load(self.world / "wanted")
        self.assertEqual(tree(node / "zero"), tree(self.world / "wanted"))

    def test_a_close_that_fails_is_no_saved_checkpoint(self):
        node, _ = self.mounted(mounts.faulty)
        moe_checkpoint.series(self.world / "series", moe_checkpoint.Model(), range(3, 5))
        self.tool("pec-save", self.world / "series/global_step3", node / "store")
        (self.world / "settings").write_text("close-fails 200", encoding="ascii")
        self.tool("pec-save", self.world / "series/global_step4", node / "store", code=7)
        (self.world / "settings").write_text("", encoding="ascii")
        self.tool("pec-save", "check", node / "store")
        self.tool("pec-save", self.world / "series/global_step4", node / "store")
        self.tool("pec-save", "check", node / "store")

    def test_every_file_is_synced_and_closed_before_the_output_has_its_name(self):
        node, _ = self.mounted(mounts.faulty)
        self.tool("ucp-union", DEMO, node / "atoms")
        files = sorted(path.relative_to(node / "atoms") for path in (node / "atoms").rglob("*") if path.is_file())
        calls = (self.world / "calls-a").read_text(encoding="utf-8").splitlines()
        (named,) = [at for at, call in enumerate(calls) if call == "rename /atoms"]
        before = [call for call in calls[:named] if "/atoms.partial-" in call]
        for call in ("fsync", "flush"):
            done = {line.split("/", 2)[2] for line in before if line.startswith(call + " ") and line.count("/") > 1}
            missing = [str(path) for path in files if str(path) not in done and path.name != "shardwright.json"]
            self.assertEqual(missing, [], call)


class Renames(Case):
    def refused(self, output, *words):
        before = tree(output.parent)
        done = self.load(output, "--force", code=6)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(tree(output.parent), before)

    def test_a_mount_point_is_refused_before_anything_is_written(self):
        (self.world / "here").mkdir()
        (self.world / "here/out").mkdir()
        self.load(self.world / "data")
        self.mounted(lambda world: mounts.mount(world / "here/out", "--bind", world / "data"))
        self.refused(self.world / "here/out", "a file system is mounted there")
        self.load(self.world / "here/out/inside")

    def test_a_directory_of_a_lower_layer_is_refused_before_anything_is_written(self):
        def overlay(world):
            if not mounts.kernel_has("overlay"):
                raise mounts.Missing("this kernel has no overlayfs")
            layers = mounts.mount(world / "layers", "-t", "tmpfs", "none")
            for name in ("lower", "upper", "work"):
                (layers / name).mkdir()
            self.load(layers / "lower/out")
            return mounts.mount(world / "a", "-t", "overlay", "-o",
                                f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work,redirect_dir=off",
                                "overlay")
        node = self.mounted(overlay)
        self.refused(node / "out", "lower layer of overlayfs")
        shutil.rmtree(node / "out")
        self.load(node / "out")
        self.load(node / "out", "--force")

    def test_an_old_output_is_moved_aside_where_names_cannot_be_exchanged(self):
        for error in ("exdev", "enotempty", "ebusy", "eperm"):
            output = self.world / error
            self.load(output)
            done = self.load(output, "--force", fault=f"exchange:1:{error}")
            self.assertIn("cannot exchange names", done.stderr)
            self.assertEqual(sorted(path.name for path in self.world.glob(f"{error}*")), [error])


class Vanished(Case):
    """Outputs that another program removes while they are written, as a purge of a scratch file system does."""

    def test_an_output_that_vanishes_is_a_failed_write(self):
        for tool, operation, more in (("ucp-load", "create:4", ()), ("ucp-load", "write:9", ()), ("ucp-load", "sync:4", ()),
                                      ("ucp-union", "write:9", ()), ("ucp-load", "commit.manifest:1", ()),
                                      ("ucp-load", "commit.rename:1", ()), ("ucp-load", "write:9", ("--verify=readback",))):
            with self.subTest(f"{tool} {operation} {more}"):
                target = ["--target", "zero=3,dp=3"] if tool == "ucp-load" else []
                output = self.world / "out"
                stopped = start([Given.bin / tool, DEMO, output, *target, "--threads", "1", *more], fault=f"{operation}:hang")
                status = pathlib.Path(f"/proc/{stopped.pid}/stat")
                while status.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "T":
                    self.assertIsNone(stopped.poll(), "ended before the call")
                    time.sleep(0.01)
                (stage,) = self.world.glob("out.partial-*")
                shutil.rmtree(stage)
                stopped.send_signal(signal.SIGCONT)
                done = finish(stopped)
                self.assertEqual(done.code, 7, str(done))
                self.assertIn("out.partial-", done.stderr)
                self.assertFalse(output.exists())
                self.tool(tool, DEMO, output, *target)
                shutil.rmtree(output)
                self.assertEqual(list(self.world.iterdir()), [])


class OtherMachines(Case):
    """Locks of a process on an unreachable machine, which do not lock here."""

    OWNER = "process 7 on elsewhere (run r1)"

    def lock(self, path, age=0):
        path.write_text(f"{self.OWNER}\nboot b7 start 5\n", encoding="ascii")
        os.utime(path, (time.time() - age,) * 2)

    def test_a_stopped_run_is_resumed_only_after_a_take_over(self):
        output = self.world / "out"
        self.load(output, fault="write:20:kill", code=137)
        self.lock(self.world / "out.lock")
        before = tree(self.world)
        for more in ((), ("--resume",), ("--force",)):
            self.assertIn(self.OWNER, self.load(output, *more, code=6).stderr)
        self.assertEqual(tree(self.world), before)
        self.lock(self.world / "out.lock", 3600)
        self.load(output, "--resume", code=6)
        self.load(output, "--resume", "--take-over")
        self.assertEqual([path.name for path in self.world.iterdir()], ["out"])

    def test_a_store_is_written_only_after_a_take_over(self):
        moe_checkpoint.series(self.world / "series", moe_checkpoint.Model(), range(3, 5))
        store = self.world / "store"
        save = ["pec-save", self.world / "series/global_step4", store]
        collect = ["pec-save", "gc", store, "--keep-last", "1"]
        self.tool("pec-save", self.world / "series/global_step3", store)
        (store / "incoming-r1").mkdir()
        self.lock(store / "lock", 3600)
        for command in (save, collect, ["pec-restore", store, self.world / "out"]):
            self.assertIn(self.OWNER, self.tool(*command, code=6).stderr)
        self.assertTrue((store / "incoming-r1").exists())
        self.tool("pec-save", "check", store)
        self.tool(*save, "--take-over")
        self.assertFalse((store / "incoming-r1").exists() or (store / "lock").exists())
        self.tool(*collect)


class Full(Case):
    def fill(self, folder):
        with open(folder / "filler", "wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    self.assertEqual(error.errno, errno.ENOSPC)
                    size //= 2
        for number in range(1 << 16):  # small files where nothing large fits
            try:
                (folder / f"filler{number}").write_bytes(bytes(256))
            except OSError:
                return

    def test_a_full_disk_does_not_stop_a_collection(self):
        node, _ = self.mounted(mounts.SYSTEMS["ext4"])
        moe_checkpoint.series(self.world / "series", moe_checkpoint.Model(), range(3, 6))
        for iteration in range(3, 6):
            self.tool("pec-save", self.world / f"series/global_step{iteration}", node / "store")
        self.fill(node)
        with self.assertRaises(OSError):
            (node / "more").write_bytes(bytes(4096))
        self.tool("pec-save", self.world / "series/global_step5", node / "store", "--policy", "full", code=7)
        before = len(list((node / "store/blobs").rglob("*.*")))
        self.tool("pec-save", "gc", node / "store", "--keep-last", "1")
        self.tool("pec-save", "check", node / "store")
        self.assertLessEqual(len(list((node / "store/blobs").rglob("*.*"))), before)
        self.tool("pec-restore", node / "store", self.world / "out", "--read-only")

    def test_dry_runs_compare_with_the_free_space(self):
        small = self.mounted(lambda world: mounts.mount(world / "a", "-t", "tmpfs", "-o", "size=4k", "none"))
        moe_checkpoint.series(self.world / "series", moe_checkpoint.Model(), range(3, 4))
        checkpoint = self.world / "series/global_step3"
        store = self.world / "store"
        self.tool("pec-save", checkpoint, store)
        for argv in (("ucp-load", DEMO, small / "out", "--target", "zero=3,dp=3"), ("ucp-union", DEMO, small / "out"),
                     ("pec-restore", store, small / "out", "--target", "zero=1")):
            done = self.tool(*argv, "--dry-run", code=7)
            self.assertRegex(done.stderr, r"out: .* of disk space needed, .* free; free some space")
        done = self.tool("pec-save", checkpoint, small / "store", "--dry-run")
        self.assertRegex(done.stderr, r"store: .* of disk space needed, .* free")
        self.assertEqual(list(small.iterdir()), [])

    def test_a_quota_counts_as_free_space(self):
        node, _ = self.mounted(mounts.SYSTEMS["ext4-quota"])
        self.mounted(lambda _: mounts.need("setquota", "quota"))
        for folder in (Given.world, self.world):
            folder.chmod(0o755)
        node.chmod(0o777)
        user = 65534
        mounts.made("setquota", "-u", user, 0, 40, 0, 0, node)  # KiB
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", Given.bin / "ucp-load", DEMO, node / "out",
                "--target", "zero=3,dp=3"]
        done = run([*argv, "--dry-run"])
        self.assertEqual(done.code, 7)
        self.assertIn(f" free in the quota of user {user}", done.stderr)
        done = run(argv)
        self.assertEqual(done.code, 7)
        self.assertIn(f" free in the quota of user {user}", done.stderr)
        mounts.made("setquota", "-u", user, 0, 0, 0, 5, node)
        done = run([*argv, "--dry-run"])
        self.assertIn(f"free in the quota of user {user}", done.stderr)
        mounts.made("setquota", "-u", user, 0, 0, 0, 0, node)
        self.assertEqual(run(argv).code, 0)


def main(programs, *arguments):
    Given.bin = pathlib.Path(programs).resolve()
    Given.world = mounts.enter()
    unittest.main(argv=[sys.argv[0], *arguments])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} BIN [ARGUMENTS OF unittest]")
    mounts.main(main, sys.argv[1:])
