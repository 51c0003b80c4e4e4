# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core checkpoints with layers outside of decoder.layers are loaded by Megatron-Core after a conversion.

    megatron_lists_test.py BIN LAUNCHER
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import commands


class Lists(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.scratch = scratch.path

    def megatron(self, do, runs):
        """The results of Megatron-Core for each run, in one process: see megatron_lists.py."""
        python = pathlib.Path(sys.prefix) / "trainers/bin/python"
        if not python.exists():
            self.skipTest("no environment with Megatron-Core")
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        job = {"do": do, "ranks": 2, "runs": [run | {"folder": str(self.folder(run))} for run in runs]}
        done = subprocess.run([python, "-B", pathlib.Path(__file__).with_name("megatron_lists.py"), json.dumps(job)],
                              env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3600, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return json.loads(done.stdout.splitlines()[-1])

    def folder(self, run):
        return self.scratch / run["at"] / "iter_0000001"

    def convert(self, source, to, target):
        made = self.scratch / source["at"]
        (made / "latest_checkpointed_iteration.txt").write_text("1")
        self.ucp.run("ucp-load", made, self.scratch / to, "--format", "megatron", "--target", target)

    def test_multi_token_prediction(self):
        dense = {"model": "mtp", "tp": 2, "form": "torch_dist", "at": "dense"}
        stages = {"model": "mtp", "pp": 2, "form": "torch", "at": "stages"}
        experts = {"model": "mtp_moe", "form": "torch", "at": "experts"}
        _, in_stages, in_experts = self.megatron("make", [dense, stages, experts])
        self.convert(dense, "dense-legacy", "files=torch,tp=1,pp=2")
        self.convert(dense, "dense-whole", "tp=1")
        self.convert(stages, "stages-dist", "files=torch_dist,pp=1")
        self.convert(experts, "experts-dist", "files=torch_dist")
        self.convert(experts | {"at": "experts-dist"}, "experts-back", "files=torch")
        in_two = {"model": "mtp", "pp": 2, "form": "torch_dist"}
        found = self.megatron("judge", [
            in_two | {"at": "dense"}, in_two | {"at": "dense-whole"}, in_two | {"at": "dense-legacy", "form": "torch"},
            in_two | {"at": "stages-dist"}, experts | {"at": "experts-dist", "form": "torch_dist"},
            experts | {"at": "experts-back"}])
        own, *other = found[:3]  # Megatron-Core itself loads its checkpoint into other ranks
        self.assertIsInstance(own, list, own)
        self.assertEqual(other, [own, own])
        self.assertEqual(found[3], in_stages)
        self.assertEqual(found[4:], [in_experts, in_experts])

    def test_an_encoder(self):
        run = {"model": "bert", "form": "torch_dist", "at": "bert"}
        made = self.megatron("make", [run, {"model": "t5", "form": "torch_dist", "at": "t5"},
                                      {"model": "tower", "form": "torch_dist", "at": "tower"}])
        self.convert(run, "bert-made", "optimizer=none")
        self.assertEqual(self.megatron("judge", [run | {"at": "bert-made"}]), made[:1])
        for name in ("t5", "tower"):
            (self.scratch / name / "latest_checkpointed_iteration.txt").write_text("1")
            said = self.ucp.run("ucp-load", self.scratch / name, self.scratch / "none", "--format", "megatron", expect=9)
            self.assertIn("separate checkpoints", said)


if __name__ == "__main__":
    Lists.ucp = commands.from_arguments()
    unittest.main(verbosity=2)
