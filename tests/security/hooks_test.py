#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The scripts for Slurm, while another user plants links and files under the names that they use, writes a Python module
into the folder that a job was submitted from, or writes reports.

Usage: hooks_test.py BIN
"""

import contextlib
import json
import os
import shutil
import sys

sys.dont_write_bytecode = True

import users  # pylint: disable=wrong-import-position
from users import ATTACKER, GROUP, VICTIM, home, kernel_setting, run_as  # pylint: disable=wrong-import-position

BUSY = 6
# Stands for Slurm's launcher; WRITES_REPORT then writes a report of its own in place of the command's.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@"
code=$?
[[ -z ${WRITES_REPORT:-} ]] || printf '{\\n  "exit_code": %s,\\n}\\n' "$WRITES_REPORT" >"$REPORT"
exit "$code"
"""


class Hooks(users.TestCase):
    def setUp(self):
        super().setUp()
        self.shared = users.WORLD / "shared"
        tools = users.WORLD / "tools"
        tools.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\n"}.items():
            (tools / name).write_text(text, encoding="ascii")
            (tools / name).chmod(0o755)
        self.path = f"{tools}:{users.WORLD}/bin:/usr/bin:/bin"

    def hook(self, name, *words, **variables):
        settings = {"cwd": variables.pop("cwd", self.shared), "groups": variables.pop("groups", ())}
        env = {"PATH": self.path, **variables}
        return run_as(VICTIM, "bash", users.WORLD / "scripts" / "slurm" / name, *words, env=env, **settings)

    def plant(self, path, target=None, uid=ATTACKER):
        """A link of the attacker to `target`, or a file."""
        if target is None:
            path.write_text("", encoding="ascii")
            path.chmod(0o666)
        else:
            os.symlink(target, path)
        os.lchown(path, uid, uid)

    def checkpoint(self, name="ck"):
        path = self.shared / name
        shutil.copytree(users.SOURCE / "tests" / "data" / "demo", path)
        for place in [path, *path.rglob("*")]:
            os.chown(place, VICTIM, VICTIM)
        return path

    @contextlib.contextmanager
    def stopped_agent(self, *words):
        try:
            yield
        finally:
            self.expect_exit(0, self.hook("pec-agent.sh", "stop", *words, groups=[GROUP]))


class AgentScript(Hooks):
    def start(self, socket, store=None, **settings):
        return self.hook("pec-agent.sh", "start", socket, self.shared / "ck", store or home(VICTIM) / "st", **settings)

    def test_planted_links_and_files_are_refused_by_name(self):
        thesis = self.private_file()
        for protected in (0, 1):
            for name, target in (("a.turn", thesis), ("a.log", thesis), ("a.log", self.shared / "none"),
                                 ("a.turn", None), ("a.log", None)):
                with self.subTest(protected_symlinks=protected, name=name, target=target), \
                        kernel_setting("protected_symlinks", protected), self.unchanged(thesis):
                    self.plant(self.shared / name, target)
                    done = self.start(self.shared / "a")
                    self.expect_exit(BUSY, done, self.shared / name, str(ATTACKER), "not a file of yours")
                    self.assertFalse((self.shared / "none").exists())
                for path in self.shared.iterdir():
                    path.unlink()

    def test_a_link_of_ones_own_and_a_second_name_are_refused(self):
        thesis = self.private_file()
        with self.unchanged(thesis):
            self.plant(self.shared / "a.log", thesis, VICTIM)
            self.expect_exit(BUSY, self.start(self.shared / "a"), "symbolic link")
            (self.shared / "a.log").unlink()
            os.link(thesis, home(VICTIM) / "a.log")
            self.expect_exit(BUSY, self.start(home(VICTIM) / "a"), "has another name")

    def test_agents_in_folders_of_ones_own_sticky_ones_and_of_groups(self):
        thesis = self.private_file()
        shutil.copytree(users.SOURCE / "tests" / "data" / "deepspeed" / "moe4_ep2_series" / "ckpt", self.shared / "ck")
        for folder in (home(VICTIM), self.shared, users.WORLD / "group"):
            self.plant(folder / "a.pid", thesis)
            with self.subTest(folder=folder.name), self.unchanged(thesis), kernel_setting("protected_symlinks", 0):
                if folder == self.shared:
                    (folder / "a.pid").unlink()  # only root and its owner may replace it there
                with self.stopped_agent(folder / "a"):
                    done = self.start(folder / "a", groups=[GROUP])
                    self.expect_exit(0, done)
                    self.assertFalse((folder / "a.pid").is_symlink())
                    pid = int((folder / "a.pid").read_text(encoding="ascii"))
                    self.assertTrue(os.path.exists(f"/proc/{pid}"))
                    self.expect_exit(0, self.start(folder / "a", groups=[GROUP]))
                    done = self.start(folder / "a", store=home(VICTIM) / "other", groups=[GROUP])
                    self.expect_exit(BUSY, done, "saves into")


class RestoreHook(Hooks):
    def setUp(self):
        super().setUp()
        self.folder = users.WORLD / "group"
        self.log = self.folder / "tokens.jsonl"
        self.settings = {"groups": [GROUP], "cwd": self.folder}
        shutil.copytree(users.SOURCE / "tests" / "data" / "deepspeed" / "moe4_ep2_series" / "ckpt", self.folder / "ck")
        done = run_as(VICTIM, "pec-save", self.folder / "ck", self.folder / "st", "-q", **self.settings)
        self.expect_exit(0, done)

    def restore(self):
        return self.hook("pec-restore-hook.sh", "st", "out", PEC_TOKENS=str(self.log), **self.settings)

    def write_log(self, uid=VICTIM):
        self.log.write_text("".join(json.dumps({"iteration": i, "tokens": [[1, 2, 3, 4]]}) + "\n"
                                    for i in range(1, 2000)), encoding="ascii")
        os.chown(self.log, uid, GROUP)

    def test_links_next_to_a_token_log_are_not_followed(self):
        thesis = self.private_file()
        with kernel_setting("protected_symlinks", 0), self.unchanged(thesis):
            self.write_log()
            for name in ("tokens.jsonl.new", "out.report.json", "tokens.jsonl.tmp"):
                self.plant(self.folder / name, thesis)
            done = self.restore()
            self.expect_exit(0, done)
            self.assertEqual(done.stdout, "out\n")
            last = self.log.read_text(encoding="ascii").splitlines()[-1]
            report = json.loads((self.folder / "out.report.json").read_text(encoding="utf-8"))
            self.assertEqual(json.loads(last)["iteration"], report["iteration"])

    def test_a_token_log_of_another_user_is_refused_by_name(self):
        thesis = self.private_file()
        with kernel_setting("protected_symlinks", 0), self.unchanged(thesis):
            self.plant(self.log, thesis)
            self.expect_exit(BUSY, self.restore(), self.log, str(ATTACKER), "not to you")
            self.log.unlink()
            self.write_log(ATTACKER)
            with self.unchanged(self.log):
                self.expect_exit(BUSY, self.restore(), self.log, "not to you")
            self.assertFalse((self.folder / "out").exists())


class Scripts(Hooks):
    def test_no_module_of_the_current_folder_runs(self):
        self.checkpoint()
        for name in ("json.py", "sys.py", "python3"):
            self.plant(self.shared / name)
            (self.shared / name).write_text(f"#!/bin/bash\nopen({str(self.shared / 'ran')!r}, 'w')\n", encoding="ascii")
            (self.shared / name).chmod(0o755)
        done = self.hook("restore-hook.sh", "ck", SLURM_NTASKS="2")
        self.expect_exit(0, done)
        self.assertEqual(done.stdout, "ck\n")
        self.expect_exit(0, self.hook("convert.sbatch", "ck", "out", "zero=1,dp=2", SLURM_JOB_ID="7"))
        self.assertFalse((self.shared / "ran").exists())
        for script in (users.SOURCE / "scripts" / "slurm").iterdir():
            self.assertNotRegex(script.read_text(encoding="utf-8"), r"(?m)^[^#\n]*\bpython", f"{script} starts Python")

    def test_text_of_a_report_is_not_evaluated(self):
        self.checkpoint()
        text = f'"a[$(id >{self.shared}/ran)]"'
        report = str(self.shared / "out.report-7.json")
        done = self.hook("convert.sbatch", "ck", "out", "zero=1,dp=2", SLURM_JOB_ID="7", WRITES_REPORT=text, REPORT=report)
        self.expect_exit(0, done)
        code = f"a[$(id >{self.shared}/ran)]"
        self.hook("convert.sbatch", "ck", "more", "zero=1,dp=2", SLURM_JOB_ID="7", SLURM_RESTART_COUNT=code,
                  SLURM_CPUS_PER_TASK=code, MAX_RESTARTS=code)
        for variables in ({"SLURM_NTASKS": code}, {"RANKS": code},
                          {"SLURM_JOB_NUM_NODES": code, "SLURM_GPUS_ON_NODE": code, "SLURM_NTASKS": code}):
            self.expect_exit(2, self.hook("restore-hook.sh", "ck", **variables), "number of ranks expected")
        self.assertFalse((self.shared / "ran").exists())


if __name__ == "__main__":
    users.main()
