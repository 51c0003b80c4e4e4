#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists of layers other than decoder.layers, and checkpoints without the arguments of a run.

Usage: lists_test.py BIN
"""

import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import harness  # pylint: disable=wrong-import-position
import legacy_test  # pylint: disable=wrong-import-position
import ptfile  # pylint: disable=wrong-import-position

BAD, UNSUPPORTED = 4, 9
WIDTH = legacy_test.WIDTH
INNER = {"input_layernorm.weight": (WIDTH,), "pre_mlp_layernorm.weight": (WIDTH,),
         "mlp.linear_fc1.weight": (WIDTH, WIDTH), "mlp.linear_fc2.weight": (WIDTH, WIDTH)}


def mtp(inner):
    """The parameters of two layers of multi-token prediction, in the order of their modules."""
    for depth in range(2):
        layer = f"mtp.layers.{depth}."
        yield layer + "enorm.weight", (WIDTH,)
        yield layer + "hnorm.weight", (WIDTH,)
        yield layer + "eh_proj.weight", (WIDTH, 2 * WIDTH)
        for name, shape in INNER.items():
            yield f"{layer}{inner}.{name}", shape
        yield layer + "final_layernorm.weight", (WIDTH,)


class Lists(unittest.TestCase):
    bin = pathlib.Path()

    def setUp(self):
        scratch = harness.Scratch("lists-")
        self.addCleanup(scratch.__exit__)
        self.work = scratch.path
        self.source, self.made, self.out = (self.work / name for name in ("source", "made", "out"))

    def load(self, source, out, *more):
        return harness.run([self.bin / "ucp-load", source, out, *more, "--progress", "off"])

    def megatron(self, source, out, target, code=0):
        done = self.load(source, out, "--format", "megatron", "--target", target)
        self.assertEqual(done.code, code, done)
        return done.stderr

    def check(self, a, b):
        done = self.load(a, b, "--check")
        self.assertEqual(done.code, 0, done)

    def make(self, more=(), **arguments):
        """A run as torch_dist."""
        legacy_test.Run(more, arguments).save(self.source)
        self.megatron(self.source, self.made, "files=torch_dist")
        return self.made / "iter_0000004"

    def test_multi_token_prediction(self):
        for inner, arguments in (("mtp_model_layer", {"mtp_use_repeated_layer": False}), ("transformer_layer", {})):
            with self.subTest(inner):
                self.setUp()
                index = (self.make(mtp(inner), mtp_num_layers=2, **arguments) / ".metadata").read_bytes()
                for key in ("eh_proj._extra_state/shard_0_1", "transformer_layer.mlp.linear_fc1.weight",
                            "transformer_layer.mlp.linear_fc1.layer_norm_weight",
                            "transformer_layer.mlp.linear_fc2._extra_state/shard_0_1"):
                    self.assertIn(b"mtp.layers.1." + key.encode(), index)
                self.assertNotIn(b"mtp_model_layer", index)
                # Masters have no names in legacy files: in another order they would not round to the weights.
                self.megatron(self.made, self.out, "files=torch")
                self.check(self.made, self.out)
                found = ptfile.load(self.out / "iter_0000004/mp_rank_00/model_optim_rng.pt")["model"]
                names = [name for name in found if name.startswith("mtp.") and not name.endswith("_extra_state")]
                self.assertEqual(names, [name for name, _ in mtp(inner)])
                self.assertIn("mtp.layers.0.eh_proj._extra_state", found)

    def test_stages_of_multi_token_prediction(self):
        run = {"untie_embeddings_and_output_weights": True, "mtp_num_layers": 2, "mtp_use_repeated_layer": False}
        output = [("output_layer.weight", (legacy_test.VOCABULARY, WIDTH))]
        self.make([*mtp("mtp_model_layer"), *output], **run)
        for target in ("files=torch,pp=2", "files=torch,pp=2,optimizer=dp_reshardable", "pp=2,optimizer=dp_reshardable"):
            with self.subTest(target):
                out = self.work / target
                self.megatron(self.made, out, target)
                self.check(self.made, out)
        last = ptfile.load(self.work / "files=torch,pp=2/iter_0000004/mp_rank_00_001/model_optim_rng.pt")["model"]
        self.assertEqual(next(iter(last)), "embedding.word_embeddings.weight")
        self.assertIn("mtp.layers.1.final_layernorm.weight", last)

    def test_tied_embeddings_in_stages_are_refused(self):
        self.make(mtp("mtp_model_layer"), mtp_num_layers=2, mtp_use_repeated_layer=False)
        for target in ("files=torch,pp=2", "pp=2,optimizer=dp_reshardable"):
            self.assertIn("pp=1", self.megatron(self.made, self.out, target, UNSUPPORTED))
        self.megatron(self.made, self.out, "pp=2,optimizer=fully_reshardable")

    def rename(self, folder, name):
        index = folder / ".metadata"
        self.assertEqual(len(name), len("decoder.layers."))
        index.write_bytes(index.read_bytes().replace(b"decoder.layers.", name.encode()))

    def test_other_lists_are_refused(self):
        self.rename(self.make(), "vis.dec.layers.")
        self.assertIn("vis.dec.layers.", self.megatron(self.made, self.out, "tp=1", UNSUPPORTED))
        self.assertEqual(self.load(self.made, self.out, "--format", "safetensors").code, UNSUPPORTED)

    def test_an_encoder_has_no_stages(self):
        self.rename(self.make(), "encoder.layers.")
        self.megatron(self.made, self.out, "optimizer=fully_reshardable")
        self.check(self.made, self.out)
        for target in ("files=torch", "optimizer=dp_reshardable"):
            said = self.megatron(self.made, self.work / "none", target, UNSUPPORTED)
            self.assertIn("encoder.layers.0.", said)

    def strip(self, folder, **more):
        """Takes the arguments of the run out of a checkpoint."""
        common = ptfile.load(folder / "common.pt")
        del common["args"]
        common.update(more)
        ptfile.save(folder / "common.pt", common)

    def test_without_arguments(self):
        folder = self.make(mtp("mtp_model_layer"), mtp_num_layers=2, mtp_use_repeated_layer=False)
        self.strip(folder)
        done = self.load(self.made, self.work / "weights", "--format", "safetensors")
        self.assertEqual(done.code, 0, done)
        self.assertIn("written by a program other than Megatron-LM", done.stderr)
        self.megatron(self.made, self.out, "tp=2,optimizer=fully_reshardable")
        self.check(self.made, self.out)
        self.assertNotIn("args", ptfile.load(self.out / "iter_0000004/common.pt"))
        self.assertIn("arguments", self.megatron(self.made, self.work / "none", "files=torch", UNSUPPORTED))
        # Buckets have no names: without the ranks of the run no file states where parameters are.
        buckets = self.work / "buckets"
        self.megatron(self.made, buckets, "optimizer=dp_reshardable")
        said = self.megatron(buckets, self.work / "none", "tp=1", UNSUPPORTED)
        self.assertIn("fully reshardable", said)

    def test_configurations_are_read(self):
        folder = self.make()
        self.strip(folder)
        (folder / "run_config.yaml").write_text("model:\n  num_attention_heads: 4\n  num_query_groups: 2\n")
        said = self.megatron(self.made, self.out, "tp=1")
        self.assertIn("written by Megatron Bridge", said)
        self.assertIn("run_config.yaml", said)
        said = self.megatron(self.made, self.work / "none", "tp=8", UNSUPPORTED)
        self.assertIn("4 attention heads do not divide", said)
        (folder / "run_config.yaml").unlink()
        nemo = self.work / "nemo"
        (nemo / "context").mkdir(parents=True)
        folder.rename(nemo / "weights")
        self.as_nemo(nemo / "weights")
        (nemo / "context/model.yaml").write_text("config:\n  num_attention_heads: 4\n")
        for number, source in enumerate((nemo, nemo / "weights")):
            said = self.megatron(source, self.work / f"made{number}", "tp=1")
            self.assertIn("written by NeMo", said)
            self.assertIn("context/model.yaml", said)
            made = ptfile.load(self.work / f"made{number}/iter_0000004/common.pt")
            self.assertEqual(made["opt_param_scheduler"], {"num_steps": 48, "lr_decay_style": "cosine"})

    def as_nemo(self, folder):
        """NeMo has other names for progress, and a list of optimizers."""
        common = ptfile.load(folder / "common.pt")
        common["global_step"], common["pytorch-lightning_version"] = common.pop("iteration"), "2.4.0"
        common["optimizer"] = [common["optimizer"]]
        common["lr_schedulers"] = [{"num_steps": 48, "lr_decay_style": "cosine"}]
        ptfile.save(folder / "common.pt", common)

    def test_other_models_without_arguments_are_refused(self):
        folder = self.make()
        self.strip(folder)
        self.rename(folder, "decoder.blocks.")
        said = self.megatron(self.made, self.out, "tp=1", UNSUPPORTED)
        self.assertIn("without the arguments of the run", said)


if __name__ == "__main__":
    Lists.bin = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
