#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the library, and builds and runs a program of another project on it, tests/install/example.

Usage: install_test.py BUILD MPIRUN
  BUILD  the build folder
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "tests" / "data" / "demo"
HEADERS_MAX = 20
if len(sys.argv) < 3:
    sys.exit("usage: install_test.py BUILD MPIRUN [unittest arguments]")
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
MPIEXEC = sys.argv.pop(1)


def run(*words, code=0):
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([str(word) for word in words], text=True, capture_output=True, check=False,
                          env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != code:
        raise AssertionError(f"{words} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done


def cached(name):
    """The options that the build was configured with."""
    text = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
    return re.search(rf"^{name}:\w+=(.*)$", text, re.M).group(1)


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.work = pathlib.Path(folder.name)
        run("cmake", "--install", BUILD, "--prefix", cls.work / "first", "--component", "library")
        # A copy unpacked at another place finds everything too.
        cls.prefix = (cls.work / "first").rename(cls.work / "prefix")
        cls.library = next(cls.prefix.rglob("libshardwright.so"))

    def configure(self, source, build, code=0):
        return run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={self.prefix}",
                   "-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_CXX_COMPILER={cached('CMAKE_CXX_COMPILER')}", code=code)

    def files(self, folder):
        root = self.work / folder
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*")
                if path.is_file() and path.name != "shardwright.json"}

    def test_a_program_converts_with_it(self):
        self.configure(ROOT / "tests" / "install" / "example", self.work / "build")
        run("cmake", "--build", self.work / "build")
        convert = self.work / "build" / "convert"
        done = run(convert, DEMO, self.work / "out", "zero=3,dp=4")
        version = re.search(r"project\(shardwright VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
        self.assertRegex(done.stdout, rf"^shardwright {re.escape(version)}: zero=2 dp=2 .* -> zero=3 dp=4 .* "
                                      r"[1-9]\d* files, [1-9]\d* tensors equal, 0 different\n$")
        run(BUILD / "bin" / "ucp-load", DEMO, self.work / "same", "--target", "zero=3,dp=4")
        self.assertEqual(self.files("out"), self.files("same"))
        self.assertIn("out", run(convert, DEMO, self.work / "out", "", code=6).stderr)
        self.assertIn("nothing", run(convert, self.work / "nothing", self.work / "x", "", code=3).stderr)
        self.assertIn("zero", run(convert, DEMO, self.work / "x", "zero=9", code=2).stderr)
        self.assertFalse((self.work / "x").exists())
        ranks = run(MPIEXEC, "--oversubscribe", "-n", 2, convert, DEMO, self.work / "of-two", "zero=3,dp=4")
        self.assertEqual(ranks.stdout, done.stdout)
        self.assertEqual(self.files("of-two"), self.files("same"))

    def test_nothing_else_is_there(self):
        headers = {str(path.relative_to(self.prefix / "include")) for path in self.prefix.rglob("*.h")}
        self.assertLessEqual(len(headers), HEADERS_MAX)
        described = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
        table = set(re.findall(r"^\| `<(shardwright/[\w/]+\.h)>`", described, re.M))
        self.assertEqual(headers, table)

        exported = run("nm", "-D", "-C", "--defined-only", self.library).stdout.splitlines()
        names = {line.split(" ", 2)[2].split("(")[0] for line in exported}
        functions = {"Convert", "Compare", "Describe"}
        ranks = {"Ranks", "~Ranks", "OfLauncher", "operator=", "rank", "size"}
        self.assertEqual(names, {f"shardwright::{one}" for one in functions}
                         | {f"shardwright::Ranks::{one}" for one in ranks})
        dynamic = run("readelf", "-d", self.library).stdout
        self.assertRegex(dynamic, r"SONAME.*\[libshardwright\.so\.\d+\.\d+\]")
        self.assertNotRegex(dynamic, r"(RPATH|RUNPATH)")

    def test_commands_bring_what_belongs_to_them(self):
        prefix = self.work / "commands"
        run("cmake", "--install", BUILD, "--prefix", prefix, "--component", "commands")
        commands = {path.parent.name for path in ROOT.glob("apps/*/main.cc")}
        self.assertEqual({path.name for path in (prefix / "bin").iterdir()}, commands)
        for command in commands:
            for name in (f"man/man1/{command}.1", f"bash-completion/completions/{command}",
                         f"zsh/site-functions/_{command}", f"fish/vendor_completions.d/{command}.fish"):
                self.assertTrue((prefix / "share" / name).is_file(), name)
        for source, installed in (("patterns", "share/shardwright/patterns"), ("docs", "share/doc/shardwright/docs"),
                                  ("scripts/slurm", "share/shardwright/slurm")):
            there = {path.relative_to(ROOT / source): path.read_bytes()
                     for path in (ROOT / source).rglob("*") if path.is_file()}
            self.assertEqual({path.relative_to(prefix / installed): path.read_bytes()
                              for path in (prefix / installed).rglob("*") if path.is_file()}, there)
        self.assertEqual(list(prefix.rglob("*.h")), [])
        plugins = {str(path.relative_to(prefix / "lib")) for path in prefix.rglob("*.so*")}
        self.assertLessEqual(plugins, {f"shardwright/shardwright_{name}.so" for name in ("mpi_openmpi", "mpi_mpich", "cuda")})
        run(MPIEXEC, "--oversubscribe", "-n", 2, prefix / "bin" / "ucp-load", DEMO, self.work / "by-commands",
            "--target", "zero=3,dp=4")
        # A shell that finds it by PATH passes it no folder.
        run(MPIEXEC, "--oversubscribe", "-n", 2, "env", f"PATH={prefix / 'bin'}:{os.environ['PATH']}", "ucp-load", DEMO,
            self.work / "by-name", "--target", "zero=3,dp=4")
        run(prefix / "bin" / "ucp-load", "--version")

    def test_another_version_is_refused(self):
        source = self.work / "other"
        source.mkdir()
        for wanted in ("0.1", "0.3", "1.0"):
            (source / "CMakeLists.txt").write_text(
                "cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES NONE)\n"
                f"find_package(shardwright {wanted} CONFIG REQUIRED)\n", encoding="utf-8")
            refused = self.configure(source, self.work / f"build-{wanted}", code=1)
            self.assertIn(f'compatible with requested version "{wanted}"', " ".join(refused.stderr.split()))


if __name__ == "__main__":
    unittest.main()
