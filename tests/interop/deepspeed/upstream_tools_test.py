# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own tools, ds_to_universal and zero_to_fp32, read this project's files, and its commands read theirs.

    upstream_tools_test.py BIN LAUNCHER
"""

import contextlib
import io
import sys
import unittest
from unittest import mock

import commands
import ranks  # first: it prepares what DeepSpeed finds when imported
import torch
import train
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

PLAIN = {"groups": 1, "buffers": False}
ODD = {"frozen": True, "tied": True, "groups": 1}
BF16 = {"dtype": "bf16", "groups": 1}


def quietly(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*arguments)


def upstream_convert(saved, output):
    """ds_to_universal of the checkpoint that `saved` points to, with its own command line."""
    tag = (saved / "latest").read_text()
    words = ["ds_to_universal", "--input_folder", str(saved / tag), "--output_folder", str(output / tag),
             "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    with mock.patch.object(sys, "argv", words):
        quietly(lambda: ds_to_universal.main(ds_to_universal.parse_arguments()))
    return output / tag


class UpstreamTools(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def make(self, name, case, world):
        made = self.folder / name
        train.make_case(made, case, world)
        return made, torch.load(made / "tensors.pt", weights_only=True)

    def rewritten(self, made, target):
        output = made / target
        self.ucp.convert("direct", made / "ckpt", output, target)
        return output

    def test_ds_to_universal_reads_what_we_write(self):
        made, truth = self.make("source", {"zero": 2}, 2)
        for target in ("zero=1,dp=3", "zero=2,dp=4", "zero=3,dp=3"):
            with self.subTest(target=target):
                self.same_atoms(upstream_convert(self.rewritten(made, target), made / f"{target} atoms"), truth)

    def test_ds_to_universal_reads_slices_that_we_write(self):
        made, truth = self.make("source", {"tp": 2}, 2)
        self.same_atoms(upstream_convert(self.rewritten(made, "zero=2,dp=2"), made / "atoms"), truth)

    def test_a_weight_that_is_cut_along_an_inner_dimension(self):
        """DeepSpeed's converter gives its atoms the shape of the view, [3, 24, 24] for [72, 24]."""
        made, truth = self.make("source", PLAIN | {"tp": 2, "viewed": True}, 2)
        upstream = upstream_convert(made / "ckpt", made / "upstream")
        attend = torch.load(upstream / "zero/blocks.0.attend.weight/fp32.pt", weights_only=False)
        self.assertEqual(list(attend["param"].shape), [3, 24, 24])
        output = made / "output"
        self.ucp.convert("direct", upstream, output, "zero=1,tp=1,dp=2")
        self.assertIn(" 0 differences", self.ucp.run("ucp-load", "--check", made / "ckpt", output))
        self.assertEqual(train.resume_case(output, PLAIN, 2, made)["wrong"], [])
        self.same_atoms(upstream_convert(self.rewritten(made, "zero=2,tp=2,dp=1"), made / "atoms"), truth)

    def same_atoms(self, folder, truth):
        compared = 0
        for name, want in truth.items():
            name, kind = name.rsplit("/", 1)
            if kind in ("computed", "buffer", "frozen"):
                continue
            got = torch.load(folder / "zero" / name / f"{kind}.pt", weights_only=False)
            got = got["param"] if isinstance(got, dict) else got
            # Bare tensors are flat; parameters with sub-parameters have the shape of their view.
            got = got.reshape(want.shape) if got.dim() == 1 or ".attend." in name else got
            self.assertTrue(torch.equal(got, want), f"{name} {kind}")
            compared += 1
        self.assertGreater(compared, 50)

    def test_zero_to_fp32_reads_what_we_write(self):
        made, truth = self.make("source", ODD | {"zero": 2}, 2)
        want = {name.rsplit("/", 1)[0]: tensor for name, tensor in truth.items()
                if name.endswith(("/fp32", "/frozen", "/buffer"))}
        frozen_names = {name.removesuffix("/frozen") for name in truth if name.endswith("/frozen")}
        want["score.head.weight"] = want["embed.emb.weight"]
        for target in ("zero=1,dp=3", "zero=2,dp=4", "zero=3,dp=3", "zero=3,dp=2,sub_group=1000"):
            with self.subTest(target=target):
                got = quietly(get_fp32_state_dict_from_zero_checkpoint, self.rewritten(made, target))
                # The files of stage 1 list no frozen parameters; DeepSpeed's own do not either.
                expected = frozen_names if target.startswith("zero=1") else set()
                self.assertEqual(want.keys() - got.keys(), expected)
                self.assertLessEqual(got.keys(), want.keys())
                for name in got:
                    self.assertTrue(torch.equal(got[name], want[name]), name)

    def test_we_read_what_ds_to_universal_writes(self):
        for number, (case, world, target, resumed, ranks_then) in enumerate([
                (ODD, 2, "zero=2,dp=3", ODD | {"zero": 2}, 3),
                (BF16 | {"zero": 2}, 3, "zero=3,dp=2", BF16 | {"zero": 3}, 2),
                (PLAIN | {"zero": 3}, 2, "zero=1,dp=3", PLAIN, 3)]):
            with self.subTest(source=case):
                made, _ = self.make(str(number), case, world)
                upstream = upstream_convert(made / "ckpt", made / "upstream")
                output = made / "output"
                self.ucp.convert("direct", upstream, output, target)
                for one, other in ((made / "ckpt", upstream), (upstream, output), (made / "ckpt", output)):
                    self.assertIn(" 0 differences", self.ucp.run("ucp-load", "--check", one, other))
                self.assertEqual(train.resume_case(output, resumed, ranks_then, made)["wrong"], [])

    def test_groups_that_some_stages_do_not_have(self):
        """DeepSpeed's converter keeps the options of the first stage only, so the groups of the others are not known."""
        uneven = {"dtype": "bf16", "grad_accum": "fp32", "pp": 4, "layers": 4}
        made, _ = self.make("source", uneven, 4)
        upstream = upstream_convert(made / "ckpt", made / "upstream")
        said = self.ucp.run("ucp-load", upstream, made / "output", "--target", "pp=1", expect=9)
        self.assertIn("does not record which groups this stage has", said)


if __name__ == "__main__":
    UpstreamTools.ucp = commands.from_arguments()
    unittest.main()
