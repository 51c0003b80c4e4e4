#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Symbolic links in a checkpoint of another user, planted before a command runs or while it runs.

The victim converts the checkpoint into a folder that others can read. No byte of the victim's private files may get there.

Usage: links_test.py BIN
"""

import ctypes
import os
import pathlib
import shutil
import time

import users
from users import ATTACKER, VICTIM, call_as, kernel_setting, run_as, stopped_at

RACE_SECONDS = 3
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def exchange(a, b):
    """Swaps two names in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


class Links(users.TestCase):
    def setUp(self):
        super().setUp()
        self.checkpoint = users.WORLD / "shared/ckpt"
        self.out = users.WORLD / "group/out"
        os.chmod(users.WORLD / "group", 0o755)
        os.chown(users.WORLD / "group", VICTIM, VICTIM)
        self.secret = self.private_file(name="key")
        shutil.copytree(users.WORLD / "data/demo", self.checkpoint)
        self.link = users.WORLD / "shared/link"  # to be put in the place of a file
        self.link.symlink_to(self.secret)

    def sibling(self, size):
        """A sibling file with the size and time of the secret, which the attacker can know if the size is equal."""
        path = self.checkpoint / "notes.txt"
        path.write_text("n" * size, encoding="ascii")
        stat = self.secret.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return path

    def command(self):
        return ["ucp-load", self.checkpoint, self.out, "--target", "zero=1,dp=1", "--threads", "1"]

    def give_away(self):
        """The attacker owns the checkpoint."""
        for path in [self.checkpoint, *self.checkpoint.rglob("*"), self.link]:
            os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)

    def expect_no_secret(self, what):
        for path in self.out.parent.rglob("*"):
            if path.is_file():
                self.assertNotIn(b"private ", path.read_bytes(), f"{what}: {path}")

    def test_a_link_out_of_the_checkpoint_is_not_followed(self):
        (self.checkpoint / "notes.txt").symlink_to(self.secret)
        self.give_away()
        self.expect_exit(0, run_as(VICTIM, *self.command()), "notes.txt", "a link that leads out of the folder")
        self.assertFalse((self.out / "notes.txt").exists())
        self.expect_no_secret("a link")

    def test_a_file_that_becomes_a_link_at_any_open_is_not_read(self):
        for size in (100, self.secret.stat().st_size * 3):  # kept when it is found, or copied later
            self.secret.write_bytes(b"private " * (size // 8))
            size = self.secret.stat().st_size
            opens = 0
            for call in range(1, 400):
                shutil.rmtree(self.out, ignore_errors=True)
                notes = self.sibling(size)
                self.give_away()
                with stopped_at(f"open:{call}", VICTIM, *self.command()) as stopped:
                    if stopped is None:
                        break
                    call_as(ATTACKER, exchange, notes, self.link)
                exchange(notes, self.link)
                opens += 1
                self.expect_no_secret(f"{size} bytes, open {call}")
            self.assertGreater(opens, 5)
            self.assertLess(opens, 399)

    def test_a_folder_that_becomes_a_link_is_not_entered(self):
        tag = self.checkpoint / (self.checkpoint / "latest").read_text(encoding="ascii").strip()
        other = users.home(VICTIM) / "private"
        shutil.copytree(tag, other)
        for path in [other, *other.rglob("*")]:
            os.chown(path, VICTIM, VICTIM)
        swapped = users.WORLD / "shared/swapped"
        swapped.symlink_to(other)
        self.give_away()
        with stopped_at("create:2", VICTIM, *self.command()) as stopped:  # everything is found, nothing is read
            self.assertIsNotNone(stopped)
            exchange(tag, swapped)
        self.assertEqual(stopped.returncode, 3, stopped.output)
        self.assertIn(str(self.checkpoint), stopped.output)

    def test_a_race_is_never_won(self):
        notes = self.sibling(self.secret.stat().st_size)
        self.give_away()
        until = time.monotonic() + RACE_SECONDS
        child = os.fork()
        if child == 0:
            os.setresgid(ATTACKER, ATTACKER, ATTACKER)
            os.setresuid(ATTACKER, ATTACKER, ATTACKER)
            while time.monotonic() < until:
                exchange(notes, self.link)
            os._exit(0)
        try:
            while time.monotonic() < until:
                shutil.rmtree(self.out, ignore_errors=True)
                run_as(VICTIM, *self.command())
                self.expect_no_secret("a race")
        finally:
            os.waitpid(child, 0)

    def test_a_snapshot_of_a_cache_leads_to_blobs_of_its_model_only(self):
        model = users.WORLD / "shared/models--org--name"
        snapshot = model / "snapshots/1"
        snapshot.parent.mkdir(parents=True)
        shutil.move(self.checkpoint, snapshot)
        (model / "blobs").mkdir()
        (model / "blobs/abc").write_text("of the model", encoding="ascii")
        (snapshot / "readme.txt").symlink_to("../../blobs/abc")
        (snapshot / "notes.txt").symlink_to(self.secret)
        self.checkpoint = snapshot
        self.expect_exit(0, run_as(VICTIM, *self.command()))
        self.assertEqual((self.out / "readme.txt").read_text(encoding="ascii"), "of the model")
        self.assertFalse(pathlib.Path(self.out / "notes.txt").exists())


class Logs(users.TestCase):
    def test_a_log_is_not_appended_to_through_a_link_of_another_user(self):
        secret, log = self.private_file(), users.WORLD / "shared/log"
        out = users.WORLD / "shared/out"
        command = ["ucp-load", users.WORLD / "data/demo", out, "--target", "zero=1,dp=1", "--log-file", log]
        for value in (0, 1):
            with self.subTest(protected_symlinks=value), kernel_setting("protected_symlinks", value):
                log.unlink(missing_ok=True)
                call_as(ATTACKER, os.symlink, secret, log)
                with self.unchanged(secret):
                    self.expect_exit(7, run_as(VICTIM, *command), log, "link that another user owns")
                self.assertFalse(out.exists())
        log.unlink()
        call_as(VICTIM, os.symlink, secret, log)
        self.expect_exit(0, run_as(VICTIM, *command))
        self.assertIn(b"done", secret.read_bytes())


if __name__ == "__main__":
    users.main()
