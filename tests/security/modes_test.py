#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--mode: users with read access to the output of the commands.

Usage: modes_test.py BIN
"""

import os

import users
from users import ATTACKER, GROUP, VICTIM, call_as, run_as


def rights(folder):
    """The permissions of all files and of all folders of a tree, each once."""
    paths = [folder, *folder.rglob("*")]
    return ({path.stat().st_mode & 0o777 for path in paths if path.is_file()},
            {path.stat().st_mode & 0o777 for path in paths if path.is_dir()})


class Modes(users.TestCase):
    def convert(self, *flags, **settings):
        out = users.WORLD / "shared/out"
        done = run_as(VICTIM, "ucp-load", users.WORLD / "data/demo", out, "--target", "zero=1,dp=2", *flags, **settings)
        return out, done

    def test_an_output_gets_the_mode_whatever_the_umask(self):
        for mode, files, folders in [("0600", 0o600, 0o700), ("0640", 0o640, 0o750), ("0664", 0o664, 0o775)]:
            for umask in (0, 0o077):
                with self.subTest(mode=mode, umask=umask):
                    self.setUp()
                    out, done = self.convert("--mode", mode, f"--json={users.WORLD}/shared/report", umask=umask)
                    self.expect_exit(0, done)
                    self.assertEqual(rights(out), ({files}, {folders}))
                    self.assertEqual((users.WORLD / "shared/report").stat().st_mode & 0o777, files)

    def test_without_it_the_umask_decides(self):
        out, done = self.convert(umask=0o027)
        self.expect_exit(0, done)
        self.assertEqual(rights(out), ({0o640}, {0o750}))

    def test_other_users_cannot_read_it(self):
        out, done = self.convert("--mode", "0600", umask=0)
        self.expect_exit(0, done)
        with self.assertRaisesRegex(AssertionError, "PermissionError"):
            call_as(ATTACKER, os.listdir, out)

    def test_a_store_gets_the_mode(self):
        store = users.WORLD / "group/store"
        done = run_as(VICTIM, "pec-save", users.WORLD / "data/demo", store, "--mode", "0640", groups=[GROUP], umask=0)
        self.expect_exit(0, done)
        self.assertEqual(rights(store), ({0o640}, {0o750}))

    def test_other_modes_are_refused(self):
        for mode in ("0400", "0777", "rw-------", "0640x"):
            self.expect_exit(2, self.convert("--mode", mode)[1], f'"{mode}" is not a mode such as 0600')


if __name__ == "__main__":
    users.main()
