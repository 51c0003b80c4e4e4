#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names next to an output, where other users can write too: stages, journals, outputs moved aside, locks.

The attacker plants what a run would find. The victim's command continues, restores, removes and writes nothing of
theirs, and names the owner.

Usage: resume_test.py BIN
"""

import fcntl
import os
import socket
import subprocess

import users
from users import ATTACKER, GROUP, VICTIM, call_as, kernel_setting, run_as

TARGET = ["--target", "zero=3,dp=3", "--threads", "1"]
NOT_YOURS = f"belongs to user {ATTACKER}, not to you (user {VICTIM})"


def load(out, *flags, uid=VICTIM, before=(), **settings):
    """Converts the demo into `out`."""
    return run_as(uid, *before, "ucp-load", users.WORLD / "data/demo", out, *TARGET, *flags, **settings)


def killed(out, *flags, at="write:9", before=(), **settings):
    """A conversion that is killed at a call, so that its stage stays; returns the stage."""
    done = load(out, *flags, env={"SHARDWRIGHT_FAULT": f"{at}:kill"}, before=before, **settings)
    assert done.returncode in (-9, 137), done
    (stage,) = [path for path in out.parent.glob(f"{out.name}.partial-*") if path.name.count(".") == 1]
    return stage


def plant(folder, files):
    """Makes a folder that all users can write to; a file with an absolute path as its text is a link to it."""
    os.mkdir(folder)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("/"):
            path.symlink_to(text)
        else:
            path.write_text(text, encoding="ascii")
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            os.chmod(path, 0o777)


class Case(users.TestCase):
    def setUp(self):
        super().setUp()
        self.shared = users.WORLD / "shared"
        self.out = self.shared / "out"
        self.thesis = self.private_file()

    def plant(self, name, files, uid=ATTACKER, **who):
        call_as(uid, plant, self.shared / name, files, umask=0, **who)
        return self.shared / name

    def links(self):
        """The files of the output as links to the private file, and a journal folder."""
        names = ["global_step5/mp_rank_00_model_states.pt", "global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                 "latest", "shardwright.json", ".journal/0"]
        return dict.fromkeys(names, str(self.thesis))

    def expect_output(self, out=None):
        out = out or self.out
        self.assertTrue((out / "shardwright.json").is_file())
        self.assertEqual({path.stat().st_uid for path in [out, *out.rglob("*")]}, {VICTIM})
        self.assertEqual([path for path in out.rglob("*") if path.is_symlink()], [])
        self.assertFalse((out / ".journal").exists())


class Stages(Case):
    def test_a_stage_of_another_user_is_not_resumed(self):
        for setting in ("protected_symlinks", "protected_regular"):
            for value in (0, 1):
                with self.subTest(setting=setting, value=value), kernel_setting(setting, value):
                    self.setUp()
                    evil = self.plant("out.partial-evil", self.links())
                    with self.unchanged(self.thesis):
                        done = load(self.out, "--resume")
                    self.expect_exit(6, done, evil, NOT_YOURS, "without --resume")
                    self.assertFalse(self.out.exists())

    def test_without_resume_it_is_left_alone(self):
        evil = self.plant("out.partial-evil", self.links())
        with self.unchanged(self.thesis):
            done = load(self.out)
        self.expect_exit(0, done, f"left {evil} alone", NOT_YOURS)
        self.expect_output()
        self.assertTrue((evil / "latest").is_symlink())

    def test_a_run_of_ones_own_is_resumed_next_to_it(self):
        stage = killed(self.out)
        evil = self.plant("out.partial-evil", self.links())
        with self.unchanged(self.thesis):
            self.expect_exit(0, load(self.out, "--resume"), evil, NOT_YOURS)
        self.expect_output()
        self.assertFalse(stage.exists())

    def test_many_of_them_do_not_flood_the_messages(self):
        for number in range(20):
            self.plant(f"out.partial-evil{number}", {})
        done = load(self.out)
        self.expect_exit(0, done, "more of these")
        self.assertLess(done.stderr.count("alone"), 6)

    def test_the_stage_is_closed_to_others(self):
        stage = killed(self.out, umask=0)
        self.assertEqual(stage.stat().st_mode & 0o777, 0o700)
        self.expect_exit(0, load(self.out, "--resume", umask=0))
        self.assertEqual(self.out.stat().st_mode & 0o777, 0o777)

    def test_a_stage_that_others_may_write_to_is_not_resumed(self):
        stage = killed(self.out)
        os.chmod(stage, 0o777)
        done = load(self.out, "--resume")
        self.expect_exit(6, done, stage, "others may write to it (permissions 0777)", "chmod go-w")
        os.chmod(stage, 0o755)
        self.expect_exit(0, load(self.out, "--resume"))

    def test_links_and_second_names_in_a_stage_are_not_written_through(self):
        for make in (os.link, os.symlink):
            with self.subTest(make=make.__name__):
                self.setUp()
                stage = killed(self.out, at="write:30")
                file = max((path for path in stage.rglob("*.pt")), key=lambda path: path.stat().st_size)
                other = self.shared / "other"
                other.write_bytes(self.thesis.read_bytes())
                os.chown(other, VICTIM, VICTIM)
                file.unlink()
                make(other, file)
                with self.unchanged(other):
                    self.expect_exit(0, load(self.out, "--resume"))
                self.expect_output()
                self.assertEqual(other.stat().st_nlink, 1)

    def test_a_journal_with_a_second_name_is_not_written(self):
        stage = killed(self.out)
        journal = stage / ".journal/0"
        journal.unlink()
        other = self.shared / "other"
        other.write_bytes(self.thesis.read_bytes())
        os.chown(other, VICTIM, VICTIM)
        os.link(other, journal)
        with self.unchanged(other):
            self.expect_exit(6, load(self.out, "--resume"), journal, "not a regular file with one name")

    def test_a_journal_and_an_old_output_of_another_user_are_left_alone(self):
        old = self.plant("out.partial-evil.old", {"latest": "evil"})
        journal = self.plant("out.partial-evil.journal", {"0": "evil"})
        done = load(self.out)
        self.expect_exit(0, done, f"left {old} alone", f"left {journal} alone")
        self.expect_output()
        self.assertEqual((old / "latest").read_text(encoding="ascii"), "evil")


class Folders(Case):
    def test_where_everybody_may_rename_nothing_is_resumed_or_removed(self):
        stage = killed(self.out)
        os.chmod(self.shared, 0o777)  # not sticky
        self.expect_exit(6, load(self.out, "--resume"), stage, "others may rename", "sticky")
        self.expect_exit(0, load(self.out), f"left {stage} alone")
        self.assertTrue((stage / ".journal").is_dir())
        self.expect_output()

    def test_a_planted_stage_in_a_folder_without_sticky_bit(self):
        os.chmod(self.shared, 0o2777)
        evil = self.plant("out.partial-evil", self.links())
        with self.unchanged(self.thesis):
            self.expect_exit(6, load(self.out, "--resume"), evil, NOT_YOURS)

    def test_the_user_resumes_a_run_of_their_own(self):
        stage = killed(self.out)
        self.expect_exit(0, load(self.out, "--resume"))
        self.expect_output()
        self.assertFalse(stage.exists())

    def test_the_user_resumes_in_a_project_folder(self):
        out = users.WORLD / "group/out"
        settings = {"groups": [GROUP], "umask": 0o002}
        stage = killed(out, **settings)
        self.assertEqual((stage.stat().st_uid, stage.stat().st_mode & 0o777), (VICTIM, 0o700))
        self.expect_exit(0, load(out, "--resume", **settings))
        self.assertEqual((out.stat().st_gid, out.stat().st_mode & 0o7777), (GROUP, 0o2775))
        for path in out.rglob("*"):
            wanted = 0o070 if path.is_dir() else 0o060
            self.assertEqual((path.stat().st_gid, path.stat().st_mode & 0o070), (GROUP, wanted), path)

    def test_two_users_of_a_project_folder_leave_each_others_runs_alone(self):
        out = users.WORLD / "group/out"
        settings = {"groups": [GROUP], "umask": 0o002}
        stage = killed(out, uid=ATTACKER, **settings)
        self.expect_exit(6, load(out, "--resume", **settings), stage, NOT_YOURS)
        self.expect_exit(0, load(out, **settings), f"left {stage} alone")
        self.assertEqual(out.stat().st_uid, VICTIM)
        # The other one ends theirs under another name.
        self.expect_exit(0, load(out, "--resume", "--force", uid=ATTACKER, **settings))
        self.assertFalse(stage.exists())

    def test_root_of_a_container_resumes(self):
        container = ["unshare", "--user", "--map-root-user"]
        if run_as(VICTIM, *container, "true").returncode != 0:
            self.skipTest("this user may make no user namespace")
        stage = killed(self.out, before=container)
        self.assertEqual(stage.stat().st_uid, VICTIM)
        self.expect_exit(0, load(self.out, "--resume", before=container))
        self.expect_output()


class OldOutputs(Case):
    def test_an_output_of_another_user_in_a_sticky_folder_is_refused_before_anything_is_written(self):
        self.expect_exit(0, load(self.out, uid=ATTACKER))
        self.expect_exit(6, load(self.out, "--force"), self.out, f"belongs to user {ATTACKER}", "sticky")
        self.assertEqual([path.name for path in self.shared.iterdir()], ["out"])
        self.expect_exit(0, load(self.out, "--force", uid=ATTACKER))

    def test_an_output_of_another_user_in_a_group_folder_stays_with_a_warning(self):
        out = users.WORLD / "group/out"
        settings = {"groups": [GROUP]}
        self.expect_exit(0, load(out, uid=ATTACKER, **settings))
        self.expect_exit(0, load(out, "--force", **settings), "warning: ", "was not removed, ", "KiB")
        self.assertEqual(out.stat().st_uid, VICTIM)
        (left,) = out.parent.glob("out.partial-*")
        self.assertTrue(any(left.rglob("*.pt")))
        # It is the attacker's, so that the next run leaves it alone.
        self.expect_exit(0, load(out, "--force", **settings))


class Locks(Case):
    def lock(self, text, uid=ATTACKER, mode=0o666):
        path = self.shared / "out.lock"
        call_as(uid, path.write_text, text, "ascii")
        os.chmod(path, mode)
        return path

    def test_a_lock_file_of_another_user_is_never_written(self):
        for value in (0, 1):
            with self.subTest(protected_regular=value), kernel_setting("protected_regular", value):
                self.setUp()
                for text in ("", f"process 1 on {socket.gethostname()} (run x)\n", "something else"):
                    lock = self.lock(text)
                    self.expect_exit(0, load(self.out))
                    self.expect_output()
                    self.assertEqual((lock.read_text(encoding="ascii"), lock.stat().st_uid), (text, ATTACKER))
                    subprocess.run(["rm", "-r", self.out, lock], check=True)

    def test_a_lock_that_another_user_holds_or_hides_is_named(self):
        lock = self.lock("process 1 on nowhere (run x)\n")
        with open(lock, encoding="ascii") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            self.expect_exit(6, load(self.out), lock, "in use by process 1 on nowhere", f"belongs to user {ATTACKER}")
        os.chmod(lock, 0o600)
        self.expect_exit(6, load(self.out), lock, NOT_YOURS, "choose another name")

    def test_a_lock_file_of_another_user_and_machine_is_named(self):
        lock = self.lock("process 1 on nowhere (run x)\nboot 1 start 1\n")
        os.utime(lock, (0, 0))
        for more in ((), ("--take-over",)):
            self.expect_exit(6, load(self.out, *more), lock, f"belongs to user {ATTACKER}")
            self.assertTrue(lock.exists())

    def test_a_link_is_no_lock(self):
        for value in (0, 1):
            with self.subTest(protected_symlinks=value), kernel_setting("protected_symlinks", value):
                self.setUp()
                call_as(ATTACKER, os.symlink, self.thesis, self.shared / "out.lock")
                with self.unchanged(self.thesis):
                    self.expect_exit(6, load(self.out), "out.lock", "not a lock file", f"belongs to user {ATTACKER}")

    def test_another_file_of_the_user_is_no_lock(self):
        lock = self.lock("results of a week\n", uid=VICTIM)
        with self.unchanged(lock):
            self.expect_exit(6, load(self.out), lock, "not a lock file")
        self.assertTrue(lock.exists())
        os.unlink(lock)
        os.link(self.thesis, lock)
        with self.unchanged(self.thesis):
            self.expect_exit(6, load(self.out), lock, "not a lock file")

    def test_a_lock_of_a_killed_run_is_no_obstacle(self):
        killed(self.out)
        self.assertTrue((self.shared / "out.lock").exists())
        self.expect_exit(0, load(self.out))
        self.assertFalse((self.shared / "out.lock").exists())


if __name__ == "__main__":
    users.main()
