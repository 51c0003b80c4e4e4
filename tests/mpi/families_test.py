#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The six commands under the launchers of several MPIs: the same bytes as one process writes, and refusals where
library and launcher are of different families.

Usage: families_test.py BIN [--all] [--peers] [LAUNCHER...]

LAUNCHER is the path of an mpirun or mpiexec; --peers stands for those that scripts/peers installs. Without --all every
command runs with one number of ranks, with it with 1 to 4.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
DEMO = DATA / "demo"
EXPERTS = DATA / "deepspeed" / "moe4_ep2_zero1_w2" / "ckpt"
BIN = pathlib.Path()
LAUNCHERS = []
ALL = False

# Arguments of each command; {out} is its output, {in} a folder that all of them find.
COMMANDS = {
    "ucp-extract": [str(DEMO), "{out}", "--pack"],
    "ucp-union": [str(DEMO), "{out}"],
    "ucp-load": [str(DEMO), "{out}", "--target", "zero=3,dp=3"],
    "pec-save": [str(EXPERTS), "{out}", "--k", "2"],
    "pec-restore": ["{in}/store", "{out}"],
    "moe-replace": ["{in}/loads.jsonl", "--nodes", "4", "--gpus", "2", "--slots", "4", "-o", "{out}"],
}


def files(folder):
    """The content of a folder or file, without store.json, which has the random name of a store."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "store.json"}


class Families(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.work = pathlib.Path(cls.folder.name)
        tokens = [[100 + expert * expert * (layer + 7) for expert in range(8)] for layer in range(4)]
        (cls.work / "loads.jsonl").write_text(json.dumps({"iteration": 0, "tokens": tokens}) + "\n")
        subprocess.run([BIN / "pec-save", EXPERTS, cls.work / "store"], check=True, capture_output=True)
        cls.alone = {}
        for name in COMMANDS:
            out = cls.work / f"alone-{name}"
            subprocess.run(cls.words(name, out), check=True, capture_output=True)
            cls.alone[name] = files(out)

    @classmethod
    def words(cls, name, out):
        return [str(BIN / name), *(word.format(**{"out": out, "in": cls.work}) for word in COMMANDS[name])]

    def launch(self, launcher, ranks, words, **more):
        version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True).stdout
        open_mpi = "Open" in version
        room = ["--oversubscribe"] if open_mpi else []
        environment = {name: value for name, value in os.environ.items() if name != "SHARDWRIGHT_MPI"}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more}
        done = subprocess.run([launcher, *room, "-n", str(ranks), *words], cwd=self.work, text=True, capture_output=True,
                              check=False, stdin=subprocess.DEVNULL, env=environment, timeout=1200)
        return done, open_mpi

    def test_all_write_what_one_process_writes(self):
        for launcher in LAUNCHERS:
            for number, name in enumerate(COMMANDS):
                for ranks in range(1, 5) if ALL else (2 + number % 3,):
                    with self.subTest(launcher=launcher, command=name, ranks=ranks):
                        out = self.work / "out"
                        done, _ = self.launch(launcher, ranks, self.words(name, out))
                        self.assertEqual(done.returncode, 0, done.stderr)
                        self.assertEqual(files(out), self.alone[name])
                        shutil.rmtree(out) if out.is_dir() else out.unlink()

    def test_a_library_of_the_other_family_is_refused(self):
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                _, open_mpi = self.launch(launcher, 1, ["true"])
                out = self.work / "refused"
                done, _ = self.launch(launcher, 2, self.words("ucp-load", out),
                                      SHARDWRIGHT_MPI="mpich" if open_mpi else "openmpi")
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("the launcher has started 2 processes or more, but with ", done.stderr)
                self.assertIn(" each runs alone: ", done.stderr)
                self.assertFalse(out.exists())

    def test_a_library_that_is_none_is_refused(self):
        launcher = LAUNCHERS[0]
        for setting, code, text in (("lam", 2, "openmpi, mpich, none or the path of a library expected, found 'lam'"),
                                    ("/none/libmpi.so", 3, "/none/libmpi.so: cannot open"),
                                    ("libz.so.1/", 3, "SHARDWRIGHT_MPI: "), (str(BIN / "ucp-load"), 3, "SHARDWRIGHT_MPI: ")):
            with self.subTest(setting=setting):
                done, _ = self.launch(launcher, 2, self.words("ucp-load", self.work / "none"), SHARDWRIGHT_MPI=setting)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(text, done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("launchers", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--peers", action="store_true")
    asked = parser.parse_args()
    ALL = asked.all
    BIN = asked.bin.resolve()
    LAUNCHERS = asked.launchers
    if asked.peers:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        peers = pathlib.Path(os.environ.get("SHARDWRIGHT_PEERS") or pathlib.Path(cache) / "shardwright" / "peers")
        LAUNCHERS += [str(path) for path in sorted(peers.glob("mpi/*/bin/mpiexec"))]
    if not LAUNCHERS:
        print("skipped: no launcher of another MPI (scripts/peers installs some)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
