#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/commit-subjects on repositories with one commit to check: which subjects pass, and which commits are checked."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]


class CommitSubjects(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "scripts").mkdir()
        for name in ("commit-subjects", "common.sh"):
            shutil.copy(SOURCE / "scripts" / name, self.root / "scripts" / name)
        self.git("init", "-q")
        self.commit("Initial import of everything.", "2001-01-01T00:00:00Z")

    def git(self, *words, **more):
        environment = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "a",
                       "GIT_COMMITTER_EMAIL": "a@b.c", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", **more}
        subprocess.run(["git", *words], cwd=self.root, env=environment, check=True)

    def commit(self, subject, when):
        self.git("commit", "-q", "--allow-empty", "-m", subject, GIT_COMMITTER_DATE=when)

    def run_script(self, *words):
        done = subprocess.run([self.root / "scripts" / "commit-subjects", *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def outcome(self, subject):
        self.commit(subject, "2001-01-03T00:00:00Z")
        return self.run_script("HEAD~1")

    def test_good_subjects_pass(self):
        for subject in ("plan: merge adjacent copies", "docs, tests: rewrite the tutorial in plain language",
                        "format/zip: reject entries above 4 GiB", "ci: seed the property tests", "os: embed the build id",
                        "exec: " + "a" * 66, "moe: bring replicas closer", "torch: Use one stream per device"):
            self.assertEqual(self.outcome(subject)[0], 0, subject)

    def test_bad_subjects_are_named_with_the_reason(self):
        for subject, reason in (("exec: " + "a" * 67, "73 characters, at most 72"),
                                ("Merge adjacent copies", 'not of the form "module: imperative"'),
                                ("plan:merge copies", 'not of the form "module: imperative"'),
                                ("Plan: merge copies", 'not of the form "module: imperative"'),
                                ("plan: merge copies.", "ends with a full stop"),
                                ("night: a campaign has not ended well", 'begins with "a", not with a verb'),
                                ("docs: What of pickles is refused", 'begins with "what", not with a verb'),
                                ("docs: added a page", 'begins with "added": use the imperative'),
                                ("docs: rewriting a page", 'begins with "rewriting": use the imperative'),
                                ("docs: adds a page", 'begins with "adds": use the imperative')):
            code, out = self.outcome(subject)
            self.assertEqual((code, out.split(" ", 1)[1]), (1, f"{subject}: {reason}\n"))

    def test_older_commits_are_not_checked(self):
        self.commit("docs: add a page", "2001-01-03T00:00:00Z")
        self.commit("docs: add another page", "2001-01-03T11:00:00Z")
        self.assertEqual(self.run_script(), (0, "commit-subjects: 2 subjects pass\n"))
        self.commit("Broken", "2001-01-03T11:30:00Z")
        self.assertEqual(self.run_script()[0], 1)

    def test_unknown_commits_are_usage_errors(self):
        self.assertEqual(self.run_script("nowhere")[0], 2)


if __name__ == "__main__":
    unittest.main()
