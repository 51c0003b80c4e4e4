#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Legacy files: the optimizer's state has no names, so every element of the weights has to prove where it is.

Usage: legacy_test.py BIN
"""

import pathlib
import random
import shutil
import struct
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import harness  # pylint: disable=wrong-import-position
import ptfile  # pylint: disable=wrong-import-position

BAD, UNSUPPORTED = 4, 9
WIDTH, VOCABULARY, LAYERS = 64, 40, 2
FIRST, SECOND = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(2))
MIDDLE = WIDTH * WIDTH // 2 + 5


def shapes():
    yield "embedding.word_embeddings.weight", (VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        yield f"decoder.layers.{layer}.input_layernorm.weight", (WIDTH,)
        yield f"decoder.layers.{layer}.mlp.linear_fc1.weight", (WIDTH, WIDTH)
        yield f"decoder.layers.{layer}.mlp.linear_fc2.weight", (WIDTH, WIDTH)
    yield "decoder.final_layernorm.weight", (WIDTH,)


def rounded(value):
    """The bits of the bfloat16 that is nearest, of two the even one."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Run:
    """The master weights of a run of one rank by name, and the bits of the weights."""

    def __init__(self, more=(), arguments=()):
        """\\param more  further shapes by name, at the end of the model; further arguments of the run"""
        chance = random.Random(3)
        self.shapes = dict([*shapes(), *more])
        self.arguments = dict(arguments)
        self.masters, self.weights = {}, {}
        for name, shape in self.shapes.items():
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            self.masters[name] = [chance.gauss(0, 0.02) for _ in range(count)]
            self.weights[name] = [rounded(value) for value in self.masters[name]]

    def save(self, folder, order=None):
        """\\param order  names in the order of the optimizer's masters; none: that of the model"""
        masters, states, groups, at = [], {}, [], 0
        for decays in (True, False):
            names = [name for name in order or self.shapes if (len(self.shapes[name]) > 1) == decays]
            masters.append([self.floats(self.masters[name], name) for name in names])
            for i, name in enumerate(names):
                states[at + i] = {key: self.floats([0.5] * len(self.masters[name]), name)
                                  for key in ("exp_avg", "exp_avg_sq")}
                states[at + i]["step"] = ptfile.tensor("FloatStorage", struct.pack("<f", 4), (), 4)
            groups.append({"params": list(range(at, at + len(names))), "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8,
                           "wd_mult": 1.0 if decays else 0.0, "lr_mult": 1.0, "is_decoupled_lr": False,
                           "is_expert_parallel": False, "weight_decay": 0.1 if decays else 0.0})
            at += len(names)
        model = {name: ptfile.tensor("BFloat16Storage", struct.pack(f"<{len(bits)}H", *bits), self.shapes[name], 2)
                 for name, bits in self.weights.items()}
        arguments = {"num_layers": LAYERS, "num_attention_heads": 4, "kv_channels": 16, "vocab_size": VOCABULARY,
                     "make_vocab_size_divisible_by": 1, "params_dtype": ptfile.find("torch", "bfloat16"), **self.arguments}
        rank = folder / "iter_0000004" / "mp_rank_00"
        rank.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("4")
        ptfile.save(rank / "model_optim_rng.pt", {
            "args": arguments, "checkpoint_version": 3.0, "iteration": 4, "model": model,
            "optimizer": {"optimizer": {"state": states, "param_groups": groups}, "fp32_from_fp16_params": masters}})

    def floats(self, values, name):
        return ptfile.tensor("FloatStorage", struct.pack(f"<{len(values)}f", *values), self.shapes[name], 4)


class Legacy(unittest.TestCase):
    bin = pathlib.Path()

    def setUp(self):
        scratch = harness.Scratch("legacy-")
        self.addCleanup(scratch.__exit__)
        self.work, self.run_, self.out = scratch.path, Run(), scratch.path / "out"

    def load(self, *more, **save):
        """\\returns the outcome of a conversion of the run"""
        source = self.work / "ckpt"
        shutil.rmtree(source, ignore_errors=True)
        self.run_.save(source, **save)
        return harness.run([self.bin / "ucp-load", source, self.out, "--format", "megatron", "--target",
                            "files=torch_dist", "--threads", "2", "--progress", "off", *more])

    def refused(self, done, code, *words):
        self.assertEqual(done.code, code, str(done))
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse(self.out.exists())

    def test_weights_prove_the_order(self):
        done = self.load()
        self.assertEqual(done.code, 0, str(done))
        self.assertIn("the positions of 8 parameters were inferred, and their weights confirm them", done.stderr)
        done = harness.run([self.bin / "ucp-load", "--check", self.work / "ckpt", self.out])
        self.assertEqual(done.code, 0, str(done))

    def test_one_element_in_the_middle_disproves_it(self):
        self.run_.weights[SECOND][MIDDLE] = rounded(0.5)
        self.run_.masters[SECOND][MIDDLE] = 0.25
        self.refused(self.load(), BAD, f'"{SECOND}"', f"element {MIDDLE}:", "0.25 ", "0.5 ", "model_optim_rng.pt")

    def test_a_rounding_that_is_not_the_nearest_disproves_it(self):
        self.run_.weights[FIRST][MIDDLE] ^= 1
        self.refused(self.load(), BAD, f'"{FIRST}"', f"element {MIDDLE}:")

    def test_another_order_is_refused(self):
        order = list(self.run_.shapes)
        a, b = order.index(FIRST), order.index(SECOND)
        order[a], order[b] = order[b], order[a]
        self.refused(self.load(order=order), UNSUPPORTED, f'"{FIRST}"', "are not at the inferred position")

    def test_state_that_no_group_has_is_refused(self):
        self.load()
        shutil.rmtree(self.out)
        path = self.work / "ckpt" / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt"
        saved = ptfile.load(path)
        saved["optimizer"]["optimizer"]["param_groups"][0]["params"][0] = 99
        ptfile.save(path, saved)
        done = harness.run([self.bin / "ucp-load", self.work / "ckpt", self.out, "--format", "megatron"])
        self.refused(done, BAD, "model_optim_rng.pt", "state of parameter 0, which no group has")

    def test_values_that_other_programs_do_not_have_are_not_mapped(self):
        for argument, value in (("apply_layernorm_1p", True), ("layernorm_zero_centered_gamma", True),
                                ("rotary_interleaved", True), ("moe_mlp_glu_interleave_size", 32)):
            with self.subTest(argument):
                source, atoms = self.work / argument, self.work / (argument + "-atoms")
                Run(arguments={argument: value}).save(source)
                done = harness.run([self.bin / "ucp-union", source, atoms, "--progress", "off"])
                self.assertEqual(done.code, 0, str(done))
                for one in (source, atoms):
                    done = harness.run([self.bin / "ucp-load", one, self.out, "--format", "safetensors", "--map",
                                        "llama:hf", "--map-sizes", "heads=4,kv_heads=4"])
                    self.refused(done, UNSUPPORTED, f"{argument}: ", "--map none keeps names and values")

    def test_a_dry_run_proves_nothing_and_says_so(self):
        self.run_.weights[SECOND][MIDDLE] ^= 1
        done = self.load("--dry-run")
        self.assertEqual(done.code, 0, str(done))
        self.assertIn("a run that reads the weights verifies them", done.stderr)


if __name__ == "__main__":
    Legacy.bin = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
