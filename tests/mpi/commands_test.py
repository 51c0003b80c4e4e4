#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commands under mpirun: the same bytes for every number of ranks and threads, and sources that only some see.

Usage: commands_test.py BIN MPIRUN
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

DEMO = pathlib.Path(__file__).resolve().parents[1] / "data" / "demo"
TAG = "global_step5"
BIN = pathlib.Path()
MPIRUN = ""


class Ranks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def run_in(self, ranks, *words, code=0):
        launcher = [MPIRUN, "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run([*launcher, str(BIN / words[0]), *words[1:]], cwd=self.work, text=True,
                              capture_output=True, check=False, stdin=subprocess.DEVNULL, env=environment)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def files(self, folder):
        root = self.work / folder
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def test_every_number_of_ranks_and_threads_writes_the_same_bytes(self):
        for command in (["ucp-load", str(DEMO), "{}", "--target", "zero=3,dp=5"], ["ucp-union", str(DEMO), "{}"],
                        ["ucp-extract", str(DEMO), "{}", "--pack"], ["ucp-extract", str(DEMO), "{}", "--pack=zstd"]):
            wanted = None
            for ranks, threads in ((1, 1), (1, 3), (2, 1), (3, 2)):
                out = f"{command[0]}_{len(command)}{command[-1]}_{ranks}_{threads}"
                self.run_in(ranks, *(word.format(out) for word in command), "--threads", str(threads))
                made = self.files(out)
                wanted = wanted or made
                self.assertEqual(made, wanted, f"{command[0]}: {ranks} ranks, {threads} threads")

    def test_a_rank_with_too_little_memory_ends_all_of_them(self):
        words = [str(BIN / "ucp-load"), str(DEMO), "out", "--target", "zero=3,dp=5", "--memory", "64MiB"]
        launcher = [MPIRUN, "--oversubscribe", "-n", "1", *words, "--threads", "1", ":", "-n", "1", *words, "--threads", "200"]
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run(launcher, cwd=self.work, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL,
                              env=environment, timeout=120)
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertIn("200 threads need", done.stderr)

    def test_files_that_one_rank_sees_reach_the_others(self):
        for rank in (0, 1):
            (self.work / f"node{rank}" / TAG).mkdir(parents=True)
        shutil.copy2(DEMO / "latest", self.work / "node0")
        for number, path in enumerate(sorted((DEMO / TAG).iterdir())):
            shutil.copy2(path, self.work / f"node{number % 2}" / TAG)
        self.run_in(1, "ucp-load", str(DEMO), "wanted", "--target", "zero=1,dp=3")
        self.run_in(2, "ucp-load", "--node-local", "node{rank}", "out", "--target", "zero=1,dp=3")
        self.assertEqual(self.files("out"), self.files("wanted"))
        done = self.run_in(1, "ucp-load", "node0", "half", "--target", "zero=1,dp=3", code=3)
        self.assertIn("optim_states.pt", done.stderr)
        self.assertFalse((self.work / "half").exists())

    def with_siblings(self, folder):
        source = shutil.copytree(DEMO, self.work / folder)
        (source / "trainer_state.json").write_text("{}")
        (source / "model.safetensors").write_bytes(bytes(range(251)) * 10000)
        return source

    def test_equal_layouts_and_siblings_are_the_same_bytes_for_every_number_of_ranks(self):
        source = self.with_siblings("source")
        for flags in ((), ("--verify=readback",), ("--link",), ("--target", "zero=3,dp=5")):
            wanted = None
            for ranks, threads in ((1, 1), (2, 2), (3, 1)):
                out = f"out_{ranks}_{threads}"
                self.run_in(ranks, "ucp-load", str(source), out, *flags, "--threads", str(threads))
                made = self.files(out)
                wanted = wanted or made
                self.assertEqual(made, wanted, f"{flags}: {ranks} ranks, {threads} threads")
                shutil.rmtree(self.work / out)
            if flags != ("--target", "zero=3,dp=5"):
                del wanted["shardwright.json"]
                self.assertEqual(wanted, self.files("source"))

    def test_siblings_that_one_rank_sees_come_along(self):
        source = self.with_siblings("source")
        for rank in (0, 1):
            (self.work / f"node{rank}" / TAG).mkdir(parents=True)
            (self.work / f"node{rank}" / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank * 100000)
            (source / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank * 100000)
            shutil.copy2(source / "trainer_state.json", self.work / f"node{rank}")
        shutil.copy2(source / "latest", self.work / "node0")
        shutil.copy2(source / "model.safetensors", self.work / "node1")
        for number, path in enumerate(sorted((source / TAG).iterdir())):
            shutil.copy2(path, self.work / f"node{number % 2}" / TAG)
        for number, flags in enumerate(([], ["--target", "zero=1,dp=3"], ["--format", "universal"])):
            self.run_in(1, "ucp-load", str(source), f"wanted{number}", *flags, "--verify=readback")
            self.run_in(2, "ucp-load", "--node-local", "node{rank}", f"out{number}", *flags)
            self.assertEqual(self.files(f"out{number}"), self.files(f"wanted{number}"), flags)
        for pack in ("copy", "zstd"):
            self.run_in(2, "ucp-extract", "--node-local", "node{rank}", pack, f"--pack={pack}")
            self.run_in(1, "ucp-load", pack, f"out_{pack}", "--target", "zero=1,dp=3")
            made = self.files(f"out_{pack}")
            self.assertEqual({**made, "shardwright.json": b""}, {**self.files("wanted1"), "shardwright.json": b""})

    def test_the_check_finds_a_difference_on_any_rank(self):
        self.run_in(1, "ucp-load", str(DEMO), "out", "--target", "zero=1,dp=3")
        self.run_in(3, "ucp-load", "--check", str(DEMO), "out")
        self.run_in(1, "ucp-load", str(DEMO), "other", "--target", "dtype=fp32")
        done = self.run_in(2, "ucp-load", "--check", str(DEMO), "other", code=5)
        self.assertIn("bfloat16 and float32", done.stdout)

    def test_what_is_predicted_happens(self):
        for ranks in (1, 2):
            words = ["ucp-load", str(DEMO), f"out{ranks}", "--target", "zero=2,dp=3", f"--json=report{ranks}"]
            self.run_in(ranks, *words, "--dry-run")
            plan = json.loads((self.work / f"report{ranks}").read_text())["result"]["plan"]
            self.assertFalse((self.work / f"out{ranks}").exists())
            self.assertEqual(len(plan["rank_bytes"]), ranks)
            self.assertEqual(sum(plan["rank_bytes"]), plan["payload_bytes"])
            self.run_in(ranks, *words)
            run = json.loads((self.work / f"report{ranks}").read_text())["result"]["run"]
            self.assertEqual(run["payload_bytes_read"], plan["read_bytes"])
            made = self.files(f"out{ranks}")
            del made["shardwright.json"]
            self.assertEqual(sum(map(len, made.values())), plan["output_bytes"])
            self.assertEqual(len(made), plan["output_files"])
            self.assertEqual(run["bytes_written"], plan["output_bytes"])

    def test_replicas_and_what_was_written_can_be_verified(self):
        for mode in ("none", "checksums", "replicas", "readback"):
            self.run_in(2, "ucp-load", str(DEMO), mode, "--target", "zero=3,dp=2", f"--verify={mode}")
            self.assertEqual(self.files(mode), self.files("none"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: commands_test.py BIN MPIRUN")
    MPIRUN = sys.argv.pop()
    BIN = pathlib.Path(sys.argv.pop()).resolve()
    unittest.main()
