#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--map and --map-sizes: a trained checkpoint in other names and shapes, and invalid maps.

Usage: maps_test.py BIN
"""

import json
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "safetensors"))

from models import ModelTest, main, unpack  # noqa: E402  pylint: disable=wrong-import-position

QKV = "(heads part dim)"
MAP = {
    "map": "demo",
    "sizes": {"heads": {"config": ["n_head"]}},
    "sides": [{"name": "fused", "order": ["{*rest}"]}, {"name": "apart", "order": ["t.{*rest}"]}],
    "rules": [
        {"stacks": {"part": ["q", "k", "v"]},
         "fused": {"layers.{layer}.query_key_value.weight": QKV + " hidden"},
         "apart": {f"t.{{layer}}.{part}.weight": f"hidden (heads part.{part} dim)" for part in "qkv"}},
        {"stacks": {"part": ["q", "k", "v"]},
         "fused": {"layers.{layer}.query_key_value.bias": QKV},
         "apart": {f"t.{{layer}}.{part}.bias": f"(heads part.{part} dim)" for part in "qkv"}},
        {"fused": "{*rest}", "apart": "t.{*rest}"},
    ],
}


class Maps(ModelTest):
    def setUp(self):
        super().setUp()
        (self.work / "map.json").write_text(json.dumps(MAP))

    def test_all_states_go_there_and_back(self):
        self.run_in("ucp-load", "ckpt", "out", "--map", "map.json", "--map-sizes", "heads=3", "--target", "zero=3,dp=3")
        manifest = json.loads((self.work / "out" / "shardwright.json").read_text())
        self.assertEqual(manifest["source"]["maps"],
                         [{"name": "demo", "from": "fused", "to": "apart", "sizes": {"heads": 3}}])
        listed = self.run_in("ucp-load", "--list", "ckpt", "--map", "map.json:apart", "--map-sizes", "heads=3").stdout
        self.assertRegex(listed, r"t\.1\.k\.weight +\[18, 18\]")
        self.run_in("ucp-load", "--check", "ckpt", "out", "--map", "map.json", "--map-sizes", "heads=3")
        self.run_in("ucp-load", "out", "back", "--map", "map.json:apart:fused", "--map-sizes", "heads=3", "--target",
                    "zero=2,dp=2")
        self.run_in("ucp-load", "--check", "ckpt", "back")
        # The same through atoms, and through two maps that undo each other.
        self.run_in("ucp-union", "ckpt", "atoms", "--map", "map.json", "--map-sizes", "heads=3")
        self.run_in("ucp-load", "--check", "atoms", "out")
        self.run_in("ucp-load", "ckpt", "twice", "--map", "map.json:apart", "--map", "map.json:fused", "--map-sizes",
                    "heads=3")
        self.run_in("ucp-load", "--check", "ckpt", "twice")

    def test_sizes_come_from_the_config_beside(self):
        (self.work / "ckpt" / "config.json").write_text('{"n_head": 3}')
        self.convert("--map", "map.json", source="ckpt", out="told")
        self.convert("--map", "map.json", "--map-sizes", "heads=3", source="ckpt", out="given")
        self.convert("--map", "map.json", "--map-sizes", "heads=9", source="ckpt", out="other")
        told, given, other = (unpack(self.work / out / "model.safetensors")[0] for out in ("told", "given", "other"))
        self.assertTrue(told == given)
        self.assertFalse(told == other)
        self.assertEqual(sum(len(data) for _, _, data in told.values()),
                         sum(len(data) for _, _, data in other.values()))

    def test_what_is_refused(self):
        cases = (
            (["--map", "map.json"], 2, "pass --map-sizes heads=N"),
            (["--map", "map.json", "--map-sizes", "heads=4"], 2, "with heads=4"),
            (["--map", "map.json", "--map-sizes", "heads=x"], 2, "NAME=NUMBER,... expected"),
            (["--map", "map.json", "--map-sizes", "heads"], 2, "NAME=NUMBER,... expected"),
            (["--map", "map.json", "--map-sizes", "bits=4"], 2, 'unknown size "bits"; known sizes: heads'),
            (["--map-sizes", "heads=3"], 2, "--map-sizes requires --map"),
            (["--map", "nobody"], 3, 'map "nobody" does not exist; available maps: experts, gpt2, llama'),
            (["--map", "none.json"], 3, "none.json"),
            (["--map", "map.json:"], 2, "MAP:FROM:TO expected"),
            (["--map", "map.json:x:y:z"], 2, "MAP:FROM:TO expected"),
            (["--map", "map.json:other"], 2, 'no naming scheme "other"; it has fused, apart'),
            (["--map", "map.json:fused"], 2, "already has the names of naming scheme fused of map demo"),
            (["--map", "llama:megatron"], 9, "no rule of patterns/maps/llama.json covers it in naming scheme hf; add one such as"),
            (["--map", "map.json", "--map-sizes", "heads=3", "--link"], 2, "with --map its tensors get other names"),
        )
        for words, code, message in cases:
            with self.subTest(" ".join(words)):
                said = self.run_in("ucp-load", "ckpt", "out", *words, code=code).stderr
                self.assertIn(message, said)
                self.assertFalse((self.work / "out").exists())
        (self.work / "map.json").write_text('{"map": "m"}')
        said = self.run_in("ucp-load", "ckpt", "out", "--map", "map.json", code=4).stderr
        self.assertIn('map.json: key "sides"', said)

    def test_layouts_that_need_an_order_want_it_told(self):
        sides = [{"name": "fused"}, {"name": "apart"}]
        (self.work / "map.json").write_text(json.dumps({**MAP, "sides": sides}))
        words = ("--map", "map.json", "--map-sizes", "heads=3")
        said = self.run_in("ucp-load", "ckpt", "out", *words, "--target", "zero=1,dp=2", code=9).stderr
        self.assertIn('map.json does not specify the parameter order of naming scheme "apart"', said)
        self.convert(*words, source="ckpt", out="files")


if __name__ == "__main__":
    main("maps_test.py BIN")
