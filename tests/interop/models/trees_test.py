# SPDX-License-Identifier: Apache-2.0
"""Every kind of difference between two trees is found, and a failing description becomes smaller."""

import io
import unittest

import torch

import draw
import shrink
import trees

TREE = {"model": {"w": torch.arange(6.0).reshape(2, 3), "extra": {"calls": 3}, "bytes": io.BytesIO(b"a"), "none": None},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "steps": 3}


class Trees(unittest.TestCase):
    def expect(self, line, change):
        other = trees.copied(TREE)
        change(other)
        self.assertEqual(trees.differences(other, TREE), [line])

    def test_equal_trees(self):
        self.assertEqual(trees.differences(trees.copied(TREE), TREE), [])

    def test_values(self):
        self.expect("/model/w: values off by up to 1", lambda tree: tree["model"]["w"][1, 1].add_(1))
        self.expect("/model/w: float64 [2, 3], expected float32 [2, 3]",
                    lambda tree: tree["model"].update(w=tree["model"]["w"].double()))
        self.expect("/model/w: float32 [3, 2], expected float32 [2, 3]", lambda tree: tree["model"].update(w=tree["model"]["w"].t()))
        self.expect("/model/bytes: other bytes", lambda tree: tree["model"].update(bytes=io.BytesIO(b"b")))
        self.expect("/model/extra/calls: 4, expected 3", lambda tree: tree["model"]["extra"].update(calls=4))
        self.expect("/model/none: 0, expected None", lambda tree: tree["model"].update(none=0))
        self.expect("/groups/0/betas/1: 0.9, expected 0.95", lambda tree: tree["groups"][0].update(betas=(0.9, 0.9)))

    def test_keys(self):
        self.expect("/model/none: missing", lambda tree: tree["model"].pop("none"))
        self.expect("/model/more: extra (1)", lambda tree: tree["model"].update(more=1))
        self.expect("/groups: 2 entries, expected 1", lambda tree: tree["groups"].append({}))

    def test_a_nan_equals_itself(self):
        nan = {"w": torch.tensor(float("nan"))}
        self.assertEqual(trees.differences(trees.copied(nan), nan), [])


class Fault(Exception):
    kind = "fault"


class Shrink(unittest.TestCase):
    def test_what_the_fault_needs_is_left(self):
        def judge(case):
            return Fault() if any(part["kind"] == "norm" for part in case["parts"]) and case["optimizer"]["groups"] > 1 else None

        for seed in range(200):
            case = draw.draw(seed, "deepspeed")
            if judge(case) is None:
                continue
            case["optimizer"]["groups"] = 2
            smaller, wrong = shrink.smallest(case, judge(case), judge)
            self.assertEqual(wrong.kind, "fault")
            self.assertEqual([part["kind"] for part in smaller["parts"] if "share" not in part].count("norm"), 1)
            self.assertLessEqual(len(smaller["parts"]), 2)
            self.assertEqual(len(smaller["targets"]), 1)
            return
        self.fail("no description has the fault")

    def test_descriptions_depend_on_nothing_but_the_seed(self):
        self.assertEqual(draw.draw(5), draw.draw(5))
        self.assertNotEqual(draw.draw(5), draw.draw(7))


if __name__ == "__main__":
    unittest.main()
