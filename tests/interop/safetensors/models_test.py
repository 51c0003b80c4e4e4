# SPDX-License-Identifier: Apache-2.0
"""A Llama that transformers' Trainer and DeepSpeed trained, as files that transformers loads by itself.

    models_test.py BIN LAUNCHER
"""

import json
import pathlib
import shutil
import sys
import unittest

for folder in ("deepspeed", "trainer"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / folder))

import finetune  # first: it makes the modules of the DeepSpeed tests importable
import commands
import safetensors
import safetensors.torch
import torch
import transformers

STEPS = 2
TOKENS = (torch.arange(24) % finetune.VOCABULARY).reshape(2, 12)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def weights_of(checkpoint):
    """The compute weights that DeepSpeed saved, by torch itself."""
    tag = (checkpoint / "latest").read_text().strip()
    states = torch.load(checkpoint / tag / "mp_rank_00_model_states.pt", weights_only=False)
    return states["module"]


class Models(unittest.TestCase):
    ucp = None
    made = {}
    scratch = None

    @classmethod
    def setUpClass(cls):
        cls.scratch = commands.Scratch()
        cls.addClassCleanup(cls.scratch.close)
        for tied in (False, True):
            case = {"zero": 2, "tied": tied, "lora": False, "save": STEPS}
            finetune.run(2, cls.scratch.path / f"tied{tied}", case, STEPS)
            cls.made[tied] = cls.scratch.path / f"tied{tied}" / f"checkpoint-{STEPS}"

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def convert(self, tied, out, *more):
        self.ucp.run("ucp-load", self.made[tied], self.folder / out, "--format", "safetensors", *more)
        return self.folder / out

    def expect_logits(self, tied, out):
        source = finetune.make_model(tied, False)
        source.load_state_dict(weights_of(self.made[tied]))
        model, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(info[kind], f"{kind}: {info[kind]}")
        self.assertTrue(torch.equal(logits(model), logits(source)))

    def test_transformers_loads_what_is_written(self):
        for tied in (False, True):
            with self.subTest(tied=tied):
                out = self.convert(tied, f"one{tied}")
                self.expect_logits(tied, out)
                with safetensors.safe_open(out / "model.safetensors", "pt") as opened:
                    names = set(opened.keys())
                    self.assertEqual(opened.metadata()["format"], "pt")
                self.assertEqual("lm_head.weight" in names, not tied)
                self.assertTrue((out / "config.json").is_file(), "what lies beside the checkpoint comes along")

    def test_transformers_loads_numbered_files(self):
        out = self.convert(False, "many", "--target", "shard-size=8KB")
        files = sorted(path.name for path in out.glob("model-*.safetensors"))
        self.assertGreater(len(files), 2)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        self.assertEqual(sorted(set(index["weight_map"].values())), files)
        self.assertFalse((out / "model.safetensors").exists(), "the Trainer's own file would be loaded instead")
        self.expect_logits(False, out)

    def test_what_transformers_writes_is_read(self):
        for tied in (False, True):
            with self.subTest(tied=tied):
                model = finetune.make_model(tied, False)
                theirs, out = self.folder / f"theirs{tied}", self.folder / f"ours{tied}"
                model.save_pretrained(theirs, max_shard_size="10KB")
                self.ucp.run("ucp-load", theirs, out, "--format", "safetensors")
                again = transformers.LlamaForCausalLM.from_pretrained(out)
                self.assertTrue(torch.equal(logits(again), logits(model)))
                self.ucp.run("ucp-load", "--check", theirs, out)

    def test_the_masters_are_those_of_the_optimizer(self):
        out = self.convert(False, "masters", "--only", "master")
        tag = self.made[False] / (self.made[False] / "latest").read_text().strip()
        found = safetensors.torch.load_file(out / "model.safetensors")
        self.assertTrue(all(tensor.dtype == torch.float32 for tensor in found.values()))
        held = torch.cat([tensor.flatten() for tensor in found.values()]).sort().values
        kept = []
        for shard in sorted(tag.glob("*optim_states.pt")):
            state = torch.load(shard, weights_only=False)["optimizer_state_dict"]
            kept += [group.flatten() for group in state["single_partition_of_fp32_groups"]]
        kept = torch.cat(kept).sort().values
        kept = kept[kept != 0] if len(kept) != len(held) else kept  # padding of the partitions
        held = held[held != 0] if len(kept) != len(held) else held
        self.assertTrue(torch.equal(held, kept))

    def test_one_rank_or_three_write_the_same(self):
        one = self.convert(False, "one")
        self.ucp.run("ucp-load", self.made[False], self.folder / "three", "--format", "safetensors", ranks=3)
        self.assertEqual((one / "model.safetensors").read_bytes(),
                         (self.folder / "three" / "model.safetensors").read_bytes())

    def test_training_goes_on_from_files_that_were_written(self):
        """Weights only, there and back: DeepSpeed loads them, and its masters are the weights."""
        files = self.convert(False, "files")
        back = self.folder / "back"
        self.ucp.run("ucp-load", files, back, "--format", "deepspeed", "--target", "zero=2,dp=2")
        for name, tensor in weights_of(back).items():
            self.assertTrue(torch.equal(tensor, weights_of(self.made[False])[name]), name)
        shutil.copy(self.made[False] / "trainer_state.json", back / "trainer_state.json")
        case = {"zero": 2, "tied": False, "lora": False, "save": 10}
        losses = finetune.run(2, self.folder / "run", case, STEPS + 1, back)
        self.assertEqual(sorted(losses), [STEPS + 1])


if __name__ == "__main__":
    Models.ucp = commands.from_arguments()
    unittest.main()
