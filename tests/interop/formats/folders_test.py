# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in verl and slime folders, with the configuration of a model in them, as real programs save them.

    folders_test.py BIN
"""

import os
import pathlib
import signal
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "deepspeed"))

import commands
import torch
import transformers

MODULES = "torch.distributed.fsdp,torch.distributed.checkpoint.state_dict,transformers.models.llama.modeling_llama"


def on_ranks(ranks, *words):
    run = subprocess.Popen([sys.executable, HERE / "fork_ranks.py", str(ranks), MODULES, HERE / "folders.py", *map(str, words)],
                           stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, said = run.communicate(timeout=3600)
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)  # the ranks with it
        raise
    if run.returncode != 0:
        raise AssertionError(said[-3000:])


class Folders(unittest.TestCase):
    ucp = None

    @classmethod
    def setUpClass(cls):
        scratch = commands.Scratch()
        cls.addClassCleanup(scratch.close)
        cls.folder = scratch.path
        on_ranks(2, "save", cls.folder)

    def test_transformers_loads_an_export_from_its_folder(self):
        made, out = self.folder / "actor", self.folder / "out"
        whole = torch.load(self.folder / "whole.pt")
        self.ucp.run("ucp-load", made, out, "--format", "safetensors")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(info[kind], f"{kind}: {info[kind]}")
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(tensor, whole[name]), name)
        self.assertEqual(transformers.AutoTokenizer.from_pretrained(out)("a b").input_ids, [2])
        self.assertEqual(transformers.GenerationConfig.from_pretrained(out).max_new_tokens, 5)
        # The map of the family is chosen by the same configuration.
        said = self.ucp.run("ucp-load", made, self.folder / "megatron", "--format", "megatron", "--map", "auto")
        self.assertIn("chosen by model_type=llama of", said)

    def test_slime_resumes_on_another_number_of_ranks(self):
        made, out = self.folder / "run", self.folder / "resumed"
        self.ucp.run("ucp-load", made, out, "--format", "dcp", "--target", "dp_shard=3")
        self.assertIn(" 0 differences", self.ucp.run("ucp-load", "--check", made, out))
        on_ranks(3, "load", out, self.folder)


if __name__ == "__main__":
    Folders.ucp = commands.Commands(sys.argv.pop(1), "")
    unittest.main()
