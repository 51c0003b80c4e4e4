#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--map auto: finds the map of the model's family by config.json, proves it by its rules, and prints its name.

Usage: auto_test.py BIN
"""

import json
import pathlib
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "safetensors"))

from models import ModelTest, main, pack, tensor, unpack  # noqa: E402  pylint: disable=wrong-import-position

# 2 key-value heads with 3 query heads each, heads of 4.
SHAPES = {"self_attn.q_proj.weight": (24, 8), "self_attn.k_proj.weight": (8, 8), "self_attn.v_proj.weight": (8, 8),
          "self_attn.o_proj.weight": (8, 24), "mlp.gate_proj.weight": (7, 8), "mlp.up_proj.weight": (7, 8),
          "mlp.down_proj.weight": (8, 7), "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,)}
NORMS = {"self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
BIASES = {f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 24), ("k", 8), ("v", 8))}
CONFIG = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10}


class Auto(ModelTest):
    def make(self, config=None, **more):
        names = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
        for layer in range(2):
            names.update({f"model.layers.{layer}.{name}": shape for name, shape in {**SHAPES, **more}.items()})
        self.tensors = {name: tensor("BF16", *shape, seed=seed) for seed, (name, shape) in enumerate(names.items())}
        hf = self.work / "hf"
        hf.mkdir(exist_ok=True)
        (hf / "model.safetensors").write_bytes(pack(self.tensors, {"format": "pt"}))
        self.say({**CONFIG, **(config or {})})

    def say(self, config):
        (self.work / "hf" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))

    def mapped(self, *words):
        """The maps that the report and the manifest of the output agree on."""
        maps = self.report_of(*words).get("maps", [])
        source = json.loads((self.work / words[2] / "shardwright.json").read_text())["source"]
        self.assertEqual(source.get("maps", []), maps)
        return maps

    def test_a_format_of_other_names_gets_them_and_says_why(self):
        self.make()
        said = self.run_in("ucp-load", "hf", "seen", "--format", "megatron", "--map", "auto", "-n").stderr
        self.assertIn("map llama: hf to megatron_te, with ", said)
        self.assertIn("chosen by model_type=llama of hf/config.json", said)
        self.assertFalse((self.work / "seen").exists())
        used, = self.mapped("ucp-load", "hf", "out", "--format", "megatron", "--map", "auto")
        self.assertEqual((used["name"], used["from"], used["to"]), ("llama", "hf", "megatron_te"))
        self.assertEqual(used["why"], "model_type=llama of hf/config.json")
        self.assertEqual((used["sizes"]["kv_heads"], used["sizes"]["heads"]), (2, 6))
        # Megatron-LM begins a run with weights of no iteration.
        self.assertEqual((self.work / "out/latest_checkpointed_iteration.txt").read_text(), "release")
        self.assertTrue((self.work / "out/release/.metadata").exists())
        # The names are the same, and only the source of the sizes differs.
        (self.work / "hf" / "config.json").unlink()
        self.run_in("ucp-load", "hf", "named", "--format", "megatron", "--map", "llama:megatron_te", "--map-sizes",
                    "kv_heads=2")
        self.run_in("ucp-load", "--check", "out", "named")
        self.say(CONFIG)
        result = self.report_of("ucp-load", "--check", "hf", "named", "--map", "auto")
        self.assertEqual(result["maps"][0]["to"], "megatron_te")
        self.assertIn("add --map auto", self.run_in("ucp-load", "--check", "hf", "named", code=5).stderr)
        # And back, by the config.json that came along.
        used, = self.mapped("ucp-load", "out", "back", "--format", "safetensors", "--map", "auto")
        self.assertEqual((used["from"], used["to"]), ("megatron_te", "hf"))
        self.assertEqual(unpack(self.work / "back" / "model.safetensors")[0], self.tensors)

    def test_flavours_and_sides(self):
        self.make()
        used, = self.mapped("ucp-load", "hf", "titan", "--format", "dcp", "--flavour", "torchtitan", "--map", "auto")
        self.assertEqual((used["name"], used["to"]), ("llama", "torchtitan"))
        used, = self.mapped("ucp-union", "hf", "atoms", "--map", "auto:meta")
        self.assertEqual(used["to"], "meta")
        listed = self.run_in("ucp-extract", "hf", "--list", "--map", "auto:megatron").stdout
        self.assertIn("decoder.layers.1.self_attention.linear_qkv.weight", listed)
        told = self.run_in("ucp-extract", "hf", "--explain", "decoder.layers.0.mlp.linear_fc1.weight", "--map",
                           "auto:megatron").stdout
        self.assertIn("model.layers.0.mlp.up_proj.weight", told)

    def test_a_catalogue_keeps_its_map(self):
        self.make()
        (self.work / "map.json").write_text(json.dumps({
            "map": "mine", "sides": [{"name": "a"}, {"name": "b"}], "rules": [{"a": "model.{*rest}", "b": "it.{*rest}"},
                                                                              {"a": "{*rest}", "b": "other.{*rest}"}]}))
        for number, asked in enumerate((("--map", "auto:megatron"), ("--map", "map.json"))):
            for pack in ((), ("--pack",)):
                with self.subTest(asked, pack=pack):
                    name = f"catalogue{number}{len(pack)}"
                    result = self.report_of("ucp-extract", "hf", name, *asked, *pack)
                    self.assertEqual(len(result["maps"]), 1)
                    out = f"out_{name}"
                    self.run_in("ucp-load", name, out, "--format", "safetensors", "--siblings", "none")
                    self.run_in("ucp-load", "hf", f"direct_{name}", "--format", "safetensors", "--siblings", "none", *asked)
                    self.assertEqual(self.files(out), self.files(f"direct_{name}"))
                    self.run_in("ucp-load", "--check", "hf", name, *asked)
        said = self.run_in("pec-save", "catalogue00", "store", code=9).stderr
        self.assertIn("this catalogue was made with --map", said)
        # Further maps apply to that output.
        self.run_in("ucp-load", "catalogue00", "back", "--format", "safetensors", "--map", "llama:hf",
                    "--map-sizes", "kv_heads=2,heads=6")
        self.assertEqual(unpack(self.work / "back" / "model.safetensors")[0], self.tensors)
        manifest = self.manifest("catalogue00")
        for maps in (7, [{}], [{**manifest["maps"][0], "map": {"map": "x"}}], [{**manifest["maps"][0], "sizes": {"heads": -1}}]):
            (self.work / "catalogue00" / "shardwright.json").write_text(json.dumps({**manifest, "maps": maps}))
            said = self.run_in("ucp-load", "catalogue00", "broken", "--format", "safetensors", code=4).stderr
            self.assertIn("catalogue00: ", said)

    def test_names_that_are_right_stay(self):
        self.make()
        self.assertEqual(self.mapped("ucp-load", "hf", "out", "--format", "safetensors", "--map", "auto"), [])
        said = self.run_in("ucp-load", "hf", "out", "--format", "safetensors", "--map", "auto", "--force").stderr
        self.assertIn("the names already follow the naming scheme hf of map llama", said)
        self.assertEqual(unpack(self.work / "out" / "model.safetensors")[0], self.tensors)

    def test_names_of_another_program_are_refused_for_megatron(self):
        self.make()
        said = self.run_in("ucp-load", "hf", "out", "--format", "megatron", code=2).stderr
        self.assertIn("run ucp-load hf out --format megatron --map auto to write the expected names", said)
        self.assertIn("--map none to keep the present names", said)
        self.assertFalse((self.work / "out").exists())
        self.assertEqual(self.mapped("ucp-load", "hf", "kept", "--format", "megatron", "--map", "none"), [])
        # The line of the message works, and Megatron's own names need no map.
        self.run_in("ucp-load", "hf", "titan", "--format", "megatron", "--map", "auto")
        self.run_in("ucp-load", "titan", "again", "--format", "megatron")
        said = self.run_in("ucp-load", "titan", "weights", "--format", "safetensors", code=2).stderr
        # Several maps have Megatron's names, but the checkpoint records the family.
        self.assertIn("run ucp-load titan weights --format safetensors --map auto to write the expected names", said)
        self.run_in("ucp-load", "titan", "weights", "--format", "safetensors", "--map", "auto")
        self.assertEqual(unpack(self.work / "weights" / "model.safetensors")[0], self.tensors)

    def test_the_message_has_the_whole_command_line(self):
        self.make()
        self.run_in("ucp-load", "hf", "titan", "--format", "dcp", "--flavour", "torchtitan", "--map", "llama:torchtitan")
        words = ("ucp-load", "titan", "weights", "--format", "safetensors", "--target", "dtype=fp32")
        said = self.run_in(*words, code=2).stderr
        found = re.search(r": run (.*?) to write the expected names", said)
        self.assertIsNotNone(found, said)
        line = found.group(1).replace("kv_heads=N", "kv_heads=2")
        self.assertTrue(line.startswith(" ".join(words) + " --map "), line)
        self.run_in(*line.split())
        self.assertEqual(unpack(self.work / "weights" / "model.safetensors")[0].keys(), self.tensors.keys())

    def test_of_two_maps_the_one_that_fits(self):
        self.make({"model_type": "qwen3"}, **NORMS)
        for target, name in ((("dcp", "--flavour", "torchtitan"), "qwen3"), (("megatron",), "llama")):
            used, = self.mapped("ucp-load", "hf", f"out_{name}", "--format", *target, "--map", "auto")
            self.assertEqual(used["name"], name)
            result = self.report_of("ucp-load", "--check", "hf", f"out_{name}", "--map", "auto")
            self.assertEqual(result["maps"][0]["name"], name)

    def refused(self, code, *messages, words=("--format", "megatron", "--map", "auto"), command="ucp-load"):
        with self.subTest(messages[0]):
            said = self.run_in(command, "hf", "out", *words, code=code).stderr
            for message in messages:
                self.assertIn(message, said)
            self.assertFalse((self.work / "out").exists())

    def test_nothing_is_guessed(self):
        self.make()
        self.say({**CONFIG, "model_type": "t5"})
        self.refused(9, 'hf/config.json: no map matches model_type "t5"; available maps: experts, gpt2, llama')
        self.say({**CONFIG, "model_type": "mixtral", "num_local_experts": 2})
        self.refused(9, "map mixtral (model_type=mixtral of hf/config.json): ", "no rule of patterns/maps/mixtral.json")
        self.say({**CONFIG, "num_key_value_heads": 3, "num_attention_heads": 6})
        self.refused(4, "map llama", "kv_heads=3", "[8, 8]")
        self.say("[1]")
        self.refused(4, "hf/config.json: object expected")
        self.say("{")
        self.refused(4, "hf/config.json")
        (self.work / "hf" / "config.json").unlink()
        # The message has a command line that works.
        self.refused(2, "cannot detect the model family", "copy the model's config.json there, or pass --map llama:megatron")
        self.make({"model_type": "qwen2"}, **BIASES)
        self.refused(9, "has no form for naming scheme torchtitan",
                     words=("--format", "dcp", "--flavour", "torchtitan", "--map", "auto"))

    def test_what_the_flags_mean_together(self):
        self.make()
        self.refused(2, "--map auto cannot be combined with another --map", words=("--map", "auto", "--map", "llama:hf"))
        self.refused(2, "--map auto:TO, where TO is one of hf, ", words=("--format", "dcp", "--map", "auto"))
        self.refused(2, "--map auto:TO, where TO is one of hf, ", words=("--map", "auto"), command="ucp-union")
        self.refused(9, "no naming scheme nobody; it has hf, ", words=("--format", "dcp", "--map", "auto:nobody"))
        self.refused(2, 'unknown size "bits"', words=("--format", "megatron", "--map", "auto", "--map-sizes", "bits=4"))


if __name__ == "__main__":
    main("auto_test.py BIN")
