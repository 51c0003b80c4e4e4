#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--node-local with ranks that really see different files: each runs with mounts of its own.

Usage: node_local_test.py BIN MPIRUN
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "crash"))
import ptfile  # noqa: E402  pylint: disable=wrong-import-position

DEMO = HERE.parent / "data" / "demo"
TAG = "global_step5"
RULES = {"family": "demo",
         "rules": [{"match": ".*attention_out\\.weight", "split": "dim", "dim": 1},
                   {"match": ".*", "split": "replicated"}]}
BIN = pathlib.Path()
MPIRUN = ""


def why_not():
    """Why this machine cannot give a process mounts of its own; empty if it can."""
    done = subprocess.run(["unshare", "--mount", "--propagation", "private", "true"], text=True,
                          capture_output=True, check=False)
    return done.stderr.strip() if done.returncode else ""


class Nodes(unittest.TestCase):
    """A folder NAME is a place where each of two ranks sees its own disk, NAME.0 or NAME.1."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def run_in(self, *words, code=0, ranks=2, seen=()):
        """\\param seen  places that ranks see their own disks at; others are on a disk that all ranks see"""
        mounts = [f"{rank}:{place}={place}.{rank}" for place in seen for rank in (0, 1)]
        launcher = [MPIRUN, "--oversubscribe", "-n", str(ranks), str(HERE / "own_mounts.sh"), *mounts, "--"]
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run([*(launcher if ranks > 1 else []), str(BIN / words[0]), *words[1:]],
                              cwd=self.work, text=True, capture_output=True, check=False, timeout=1200,
                              stdin=subprocess.DEVNULL, env=environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def files(self, folder):
        root = self.work / folder
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*")
                if path.is_file() and path.name != "shardwright.json"}

    def spread(self, source, place, rank_of=lambda number: number % 2):
        """Puts the files of a folder on two disks, dealt by their number in the order of their names."""
        for rank in (0, 1):
            (self.work / f"{place}.{rank}").mkdir()
        (self.work / place).mkdir()
        root = pathlib.Path(self.work, source)
        for number, path in enumerate(sorted(path for path in root.rglob("*") if path.is_file())):
            to = self.work / f"{place}.{rank_of(number)}" / path.relative_to(root)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)

    def change(self, path, name):
        """Writes another value into a tensor of a module, checksums and all."""
        state = ptfile.load(path)
        storage = state["module"][name].args[0]
        storage.data = storage.data[:-1] + bytes([storage.data[-1] ^ 1])
        ptfile.save(path, state)

    def sliced(self):
        """A checkpoint of two tensor-parallel ranks: what they both hold must be the same."""
        (self.work / "rules.json").write_text(json.dumps(RULES))
        self.run_in("ucp-load", str(DEMO), "sliced", "--target", "tp=2,dp=1", "--patterns", "rules.json", ranks=1)

    def test_conversions_take_each_file_from_the_rank_that_sees_it(self):
        self.run_in("ucp-load", str(DEMO), "wanted", "--target", "zero=3,dp=3", ranks=1)
        self.spread(DEMO, "ckpt")
        self.run_in("ucp-load", "--node-local", "ckpt", "out", "--target", "zero=3,dp=3", seen=["ckpt"])
        self.assertEqual(self.files("out"), self.files("wanted"))

    def test_a_check_compares_what_different_ranks_see(self):
        self.run_in("ucp-load", str(DEMO), "other", "--target", "zero=1,dp=3", ranks=1)
        self.spread(DEMO, "a")
        self.spread("other", "b", lambda number: (number + 1) % 2)
        check = ["ucp-load", "--check", "--node-local", "a", "b"]
        self.assertIn("0 differences", self.run_in(*check, seen=["a", "b"]).stdout)
        # A small memory limit makes many rounds of it.
        self.run_in(*check, "--memory", "16MiB", seen=["a", "b"])
        for rank in (0, 1):
            for path in (self.work / f"b.{rank}").rglob("mp_rank_00_model_states.pt"):
                self.change(path, "norm_out.weight")
        # The changed weight no longer equals its rounded master, as in files of two saves.
        done = self.run_in(*check, "--allow-mixed", seen=["a", "b"], code=5)
        self.assertIn('"norm_out.weight" weight [18]: element 17: ', done.stdout)

    def test_a_check_reads_checkpoints_that_one_rank_each_sees(self):
        self.run_in("ucp-load", str(DEMO), "other", "--target", "zero=1,dp=3", ranks=1)
        self.spread(DEMO, "a", lambda _: 0)
        self.spread("other", "b", lambda _: 1)
        done = self.run_in("ucp-load", "--check", "--node-local", "a", "b", seen=["a", "b"])
        self.assertIn("0 differences", done.stdout)
        self.assertIn("none of its files is visible to ranks 1", done.stderr)
        self.assertIn("none of its files is visible to ranks 0", done.stderr)

    def test_a_check_verifies_checksums_where_the_files_are(self):
        self.spread(DEMO, "a")
        self.spread(DEMO, "b")
        shard = next(path for rank in (0, 1) for path in (self.work / f"b.{rank}").rglob("*rank_1_*optim_states.pt"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        done = self.run_in("ucp-load", "--check", "--node-local", "a", "b", seen=["a", "b"], code=4)
        self.assertIn("CRC-32", done.stderr)

    def test_replicas_on_different_nodes_are_compared(self):
        self.sliced()
        self.spread("sliced", "ckpt", lambda number: number % 2)
        seen = {str(path.relative_to(self.work)) for path in self.work.rglob("*model_states.pt")}
        self.assertTrue(any("ckpt.0" in path for path in seen) and any("ckpt.1" in path for path in seen), seen)
        load = ["ucp-load", "--node-local", "ckpt", "out", "--verify=replicas", "--patterns", "rules.json",
                "--target", "tp=1,dp=2"]
        self.run_in("ucp-load", "sliced", "wanted", *load[4:], ranks=1)
        self.run_in(*load, seen=["ckpt"])
        self.assertEqual(self.files("out"), self.files("wanted"))
        for path in self.work.glob("ckpt.*/*/mp_rank_01_model_states.pt"):
            self.change(path, "norm_out.weight")
        done = self.run_in(*load, "--force", "--memory", "16MiB", seen=["ckpt"], code=4)
        self.assertIn('tensor "norm_out.weight" weight: replicas differ at element 17', done.stderr)
        self.assertIn("mp_rank_00_model_states.pt and ", done.stderr)

    def test_atoms_that_different_ranks_see_are_united(self):
        self.run_in("ucp-union", str(DEMO), "atoms", ranks=1)
        self.run_in("ucp-load", "atoms", "wanted", "--target", "zero=1,dp=3", ranks=1)
        # All atoms on one node, all else on the other: neither alone shows what it is.
        folder = sorted(path for path in (self.work / "atoms").rglob("*") if path.is_file())
        self.spread("atoms", "ckpt", lambda number: int("zero" in folder[number].parts))
        self.run_in("ucp-load", "--node-local", "ckpt", "out", "--target", "zero=1,dp=3", seen=["ckpt"])
        self.assertEqual(self.files("out"), self.files("wanted"))

    def test_a_catalogue_is_read_where_its_files_are(self):
        self.run_in("ucp-load", str(DEMO), "wanted", "--target", "zero=1,dp=3", ranks=1)
        self.spread(DEMO, "ckpt")
        for pack in ([], ["--pack"], ["--pack=zstd"]):
            catalogue = "catalogue" + "".join(pack)
            self.run_in("ucp-extract", "--node-local", "ckpt", catalogue, *pack, seen=["ckpt"])
            out = f"out{len(catalogue)}"
            self.run_in("ucp-load", "--node-local", catalogue, out, "--target", "zero=1,dp=3", seen=["ckpt"])
            self.assertEqual(self.files(out), self.files("wanted"), catalogue)
        for path in (self.work / "ckpt.1").rglob("*.pt"):
            with open(path, "ab") as file:
                file.write(b"\0")
        done = self.run_in("ucp-load", "--node-local", "catalogue", "none", seen=["ckpt"], code=3)
        self.assertIn("missing or changed since the catalogue was written", done.stderr)

    def test_two_versions_of_a_shard_are_refused(self):
        self.run_in("ucp-load", str(DEMO), "other", "--target", "zero=2,dp=2,dtype=fp32", ranks=1)
        self.spread(DEMO, "ckpt", lambda _: 0)
        old = next((self.work / "other").rglob("*rank_0_*optim_states.pt"))
        name = next((self.work / "ckpt.0").rglob("*rank_0_*optim_states.pt")).name
        (self.work / "ckpt.1" / TAG).mkdir()
        shutil.copy2(old, self.work / "ckpt.1" / TAG / name)
        done = self.run_in("ucp-load", "--node-local", "ckpt", "out", "--target", "zero=1", seen=["ckpt"], code=4)
        self.assertIn(f"two different files with the name {name}", done.stderr)
        self.assertFalse((self.work / "out").exists())

    def test_model_states_of_every_node_may_differ_and_are_told(self):
        self.spread(DEMO, "ckpt", lambda _: 0)
        model = f"{TAG}/mp_rank_00_model_states.pt"
        (self.work / "ckpt.1" / TAG).mkdir()
        shutil.copy2(self.work / "ckpt.0" / model, self.work / "ckpt.1" / model)
        words = ["ucp-load", "--node-local", "ckpt", "out", "--target", "zero=1"]
        self.assertNotIn("two different files", self.run_in(*words, seen=["ckpt"]).stderr)
        self.change(self.work / "ckpt.1" / model, "norm_out.weight")
        done = self.run_in(*words, "--force", seen=["ckpt"])
        self.assertIn("two different files with the name mp_rank_00_model_states.pt on rank 0", done.stderr)

    def test_copies_without_checksums_are_compared_by_their_bytes(self):
        self.run_in("ucp-load", str(DEMO), "wanted", "--format", "safetensors", ranks=1)
        (self.work / "files").mkdir()
        for rank in (0, 1):
            shutil.copytree(self.work / "wanted", self.work / f"files.{rank}")
        for source in ("files", "files/model.safetensors"):
            words = ["ucp-load", "--node-local", source, "out", "--force", "--format", "safetensors"]
            done = self.run_in(*words, seen=["files"])
            self.assertNotIn("two different files", done.stderr)
            self.assertEqual((self.work / "out" / "model.safetensors").read_bytes(),
                             (self.work / "wanted" / "model.safetensors").read_bytes())
        copy = self.work / "files.1" / "model.safetensors"
        copy.write_bytes(copy.read_bytes()[:-1] + bytes([copy.read_bytes()[-1] ^ 1]))
        done = self.run_in(*words, seen=["files"], code=4)
        self.assertIn("two different files with the name model.safetensors on rank 0", done.stderr)
        self.assertIn("and rank 1", done.stderr)

    def test_an_output_that_not_all_ranks_see_is_refused(self):
        for rank in (0, 1):
            (self.work / f"disk.{rank}").mkdir()
        (self.work / "disk").mkdir()
        for words in (["ucp-load", str(DEMO), "disk/out", "--target", "dp=3"],
                      ["ucp-load", "--node-local", str(DEMO), "disk/out", "--target", "dp=3"],
                      ["ucp-extract", str(DEMO), "disk/out", "--pack=zstd"]):
            done = self.run_in(*words, seen=["disk"], code=7)
            self.assertIn("OUTPUT must be on a file system that all ranks share", done.stderr)
            self.assertEqual([path.name for path in self.work.glob("disk*/out")], [])

    def test_pattern_files_need_to_be_seen_by_rank_0_only(self):
        self.sliced()
        (self.work / "rules").mkdir()
        for rank in (0, 1):
            (self.work / f"rules.{rank}").mkdir()
        shutil.move(self.work / "rules.json", self.work / "rules.0")
        self.run_in("ucp-load", "sliced", "out", "--target", "tp=1", "--patterns", "rules/rules.json", seen=["rules"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: node_local_test.py BIN MPIRUN")
    MPIRUN = sys.argv.pop()
    BIN = pathlib.Path(sys.argv.pop()).resolve()
    if reason := why_not():
        print(f"skipped: a process cannot have mounts of its own here: {reason}")
        sys.exit(77)
    unittest.main()
