#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/demo and scripts/test print how long their build takes, the path of its log, and its progress.

A tree of the scripts alone, with a cmake and a ctest that do nothing but wait, stands for the project.

Usage: progress_test.py
"""

import os
import pathlib
import pty
import shutil
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
CMAKE = """#!/usr/bin/env bash
echo "cmake $*" >>calls
if [[ $1 == --preset ]]; then
  echo "-- Configuring done"
  exit "${FAKE_CONFIGURE:-0}"
fi
if [[ $* == *" -- -n" ]]; then
  for step in 1 2 3 4 5; do echo "[$step/5] compile $step"; done
  exit 0
fi
for step in 1 2 3; do
  echo "[$step/5] compile $step"
  sleep 1.5
done
if [[ ${FAKE_BUILD:-0} -ne 0 ]]; then
  echo "FAILED: compile 4"
  echo "a.cc:1: error: no such thing"
fi
exit "${FAKE_BUILD:-0}"
"""


class Progress(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name) / "tree"
        shutil.copytree(SOURCE / "scripts", self.tree / "scripts")
        self.tool("scripts/setup", "#!/bin/sh\n")
        (self.tree / "fake").mkdir()
        self.tool("fake/cmake", CMAKE)
        self.tool("fake/ctest", "#!/bin/sh\necho all tests passed\n")

    def tool(self, name, text):
        path = self.tree / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def run_script(self, name, *words, terminal=False, **more):
        environment = {**os.environ, "PATH": f"{self.tree}/fake:{os.environ['PATH']}", "SHARDWRIGHT_JOBS": "2",
                       "SHARDWRIGHT_PEERS": "none", "TMPDIR": str(self.tree), **more}
        command = [self.tree / "scripts" / name, *words]
        if not terminal:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
            return done.returncode, done.stdout
        mine, theirs = pty.openpty()
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            text = b""
            while True:
                try:
                    more_text = os.read(mine, 4096)
                except OSError:  # the other end is closed
                    break
                if not more_text:
                    break
                text += more_text
            os.close(mine)
        return process.returncode, text.decode()

    def test_lines_where_there_is_no_terminal(self):
        for name, log in (("test", "build/release/logs/build.log"), ("demo", "build/release/logs/demo.log")):
            with self.subTest(name):
                code, text = self.run_script(name, SHARDWRIGHT_PROGRESS_SECONDS="1")
                lines = [line for line in text.splitlines() if line.startswith(f"{name}: ")]
                if name == "test":
                    self.assertEqual(code, 0, text)
                    lines = lines[1:]  # that there is no PyTorch
                self.assertEqual(lines[0], f"{name}: configuring the release preset, log in {log}", text)
                self.assertEqual(lines[1], f"{name}: building, 5 steps: about 1 min with 2 compilers at once, less "
                                           f"where the compiler cache has them; log in {log}")
                self.assertRegex(lines[2], rf"^{name}: built [123] of 5, 0:0\d so far$")
                self.assertRegex(text, rf"(?m)^{name}: built 3 of 5, \d+:\d\d so far$")
                self.assertRegex(text, rf"(?m)^{name}: built in \d+:\d\d$")
                self.assertNotIn("\r", text)
                self.assertIn("[3/5] compile 3", (self.tree / log).read_text(encoding="utf-8"))
        # By default a line comes every 30 seconds: none in five.
        self.assertNotIn("so far", self.run_script("test")[1])

    def test_a_counter_on_a_terminal(self):
        for name in ("test", "demo"):
            with self.subTest(name):
                _, text = self.run_script(name, terminal=True)
                self.assertRegex(text, rf"\r{name}: built [12] of 5, \d+:\d\d\r{name}: built [123] of 5, \d+:\d\d")
                self.assertNotIn("so far", text)
                self.assertRegex(text, rf"\r\x1b\[K{name}: built in \d+:\d\d")

    def test_a_build_that_fails(self):
        code, text = self.run_script("test", FAKE_BUILD="1")
        self.assertEqual(code, 1)
        self.assertIn("FAILED: compile 4\na.cc:1: error: no such thing\n", text)
        self.assertRegex(text, r"test: the build failed after \d+:\d\d, log in build/release/logs/build\.log")
        self.assertNotIn("all tests passed", text)
        code, text = self.run_script("demo", FAKE_CONFIGURE="1")
        self.assertEqual(code, 1)
        self.assertRegex(text, r"demo: the build failed after \d+:\d\d, log in build/release/logs/demo\.log")

    def test_what_is_built(self):
        self.run_script("demo")
        calls = (self.tree / "calls").read_text(encoding="utf-8").splitlines()
        self.assertEqual(calls[0], "cmake --preset release")
        self.assertEqual(calls[2], "cmake --build --preset release --parallel 2 --target ucp-extract ucp-union ucp-load "
                                   "pec-save pec-restore moe-replace")


if __name__ == "__main__":
    unittest.main()
