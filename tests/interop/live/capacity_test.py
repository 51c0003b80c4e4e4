# SPDX-License-Identifier: Apache-2.0
"""Experts make up for lost tokens: the operator on the worked examples, and a top-k gate that drops tokens above a capacity.

    capacity_test.py BIN PACKAGE
"""

import unittest

import live  # first: it makes the modules of the other tests importable
import torch

EXPERTS, DEVICES, CHOICES = 8, 4, 2


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


def loss(*layers):
    return {"loss": {"lost_by_expert": [list(layer) for layer in layers]}}


class Gate(torch.nn.Module):
    """Top-k of a softmax; an expert takes the first tokens up to its capacity, the others are dropped."""

    def __init__(self, width, extra):
        super().__init__()
        self.score, self.extra = torch.nn.Linear(width, EXPERTS, bias=False), extra
        self.before = self.after = self.routed = None

    def forward(self, hidden):
        weights, chosen = self.score(hidden).softmax(-1).topk(CHOICES, -1)
        routed = torch.nn.functional.one_hot(chosen, EXPERTS).sum(1)  # [token][expert]
        self.routed = routed.sum(0)
        capacity = torch.full((EXPERTS,), CHOICES * len(hidden) // EXPERTS)
        self.before = capacity
        self.after = self.extra.capacity(0, self.routed, capacity)
        kept = (routed.cumsum(0) <= self.after) & (routed > 0)
        mine = kept.gather(1, chosen)
        return (weights * mine).sum(-1), kept


class Capacity(unittest.TestCase):
    def test_the_worked_examples(self):
        make_up = torch.ops.shardwright.extra_capacity
        for tokens, debt, expected in [((200, 70, 150), (500, 0, 0), (10, 0, 0)), ((200, 70, 150), (3, 0, 0), (3, 0, 0)),
                                       ((104, 70, 100), (500, 0, 0), (4, 0, 0)), ((200, 100, 100), (500, 0, 0), (0, 0, 0)),
                                       ((200, 200, 95), (9, 9, 0), (3, 2, 0))]:
            self.assertEqual(make_up(numbers(*tokens), numbers(100, 100, 100), numbers(*debt), 1).tolist(), list(expected))
        # Capacity that experts of another device leave unused does not help.
        self.assertEqual(make_up(numbers(200, 200, 0, 200), numbers(*[100] * 4), numbers(50, 0, 0, 50), 2).tolist(), [0, 0, 0, 10])
        empty = make_up(numbers(), numbers(), numbers(), 1)
        self.assertEqual((tuple(empty.shape), empty.dtype), ((0,), torch.int64))

    def test_as_long_as_section_9_6_says(self):
        import shardwright
        extra = shardwright.ExtraCapacity(loss([2000, 0]), devices=1)
        steps, capacity = 0, numbers(512, 512)
        while True:
            self.assertEqual(extra.capacity(0, numbers(1000, 0), capacity).tolist()[1], 512)
            steps += 1
            if not extra.step():
                break
        self.assertEqual((steps, extra.debts[0].tolist()), (40, [0, 0]))
        self.assertIs(extra.capacity(0, numbers(1000, 0), capacity), capacity)

    def test_nothing_owed_is_nothing_changed(self):
        import shardwright
        capacity, tokens = numbers(5, 5), numbers(9, 0)
        for restored in (None, {"loss": None}, {"iteration": None}, loss([0, 0])):
            extra = shardwright.ExtraCapacity(restored, devices=2)
            self.assertIs(extra.capacity(0, tokens, capacity), capacity)
            self.assertIs(extra.capacity(3, tokens, capacity), capacity)
            self.assertFalse(extra.step())

    def test_ranks_share_a_debt(self):
        import shardwright
        shares = [shardwright.ExtraCapacity(loss([10, 3], [0, 1]), 1, 4, rank).debts for rank in range(4)]
        self.assertEqual(sum(share[0] for share in shares).tolist(), [10, 3])
        self.assertEqual(sum(share[1] for share in shares).tolist(), [0, 1])
        self.assertEqual([share[0].tolist() for share in shares], [[3, 1], [3, 1], [2, 1], [2, 0]])

    def test_a_gate_that_drops(self):
        """Kept tokens are counted by themselves: debts fall by the tokens kept above the capacity, and no device has
        more than its experts may have in all."""
        import shardwright
        torch.manual_seed(1)
        lost = [300, 0, 0, 40, 0, 7, 0, 0]
        extra = shardwright.ExtraCapacity(loss(lost), devices=DEVICES)
        gate = Gate(16, extra)
        gate.score.weight.data[0].mul_(6)  # some experts are chosen more often than others
        owing, steps, saw = torch.tensor(lost), 0, 0
        for _ in range(400):
            gate.zero_grad()
            out, kept = gate(torch.randn(256, 16))
            again = extra.capacity(0, gate.routed, gate.before)
            self.assertTrue(torch.equal(again, gate.after), "the same until step()")
            extra._used[0].copy_(extra._used[0] // 2)  # that was once too often
            out.sum().backward()
            self.assertTrue(gate.score.weight.grad.isfinite().all())
            found = kept.sum(0)
            made_up = (found - gate.before).clamp(min=0)
            self.assertTrue((made_up <= torch.minimum(owing, gate.before // 10)).all())
            self.assertTrue((found.reshape(DEVICES, -1).sum(1) <= gate.before.reshape(DEVICES, -1).sum(1)).all())
            saw += int(made_up.sum())
            owing = owing - made_up
            left = extra.step()
            self.assertEqual(extra.debts[0].tolist(), owing.tolist())
            steps += 1
            if not left:
                break
        self.assertEqual(owing.tolist(), [0] * EXPERTS, f"not made up in {steps} steps")
        self.assertEqual(saw, sum(lost))
        capacity = gate.before.clone()
        self.assertIs(extra.capacity(0, gate.routed, capacity), capacity)

    def test_refused(self):
        import shardwright
        from shardwright._library import compute

        def refused(words, *arguments):
            with self.assertRaisesRegex(shardwright.Error, words) as caught:
                compute("extra_capacity", *arguments)
            self.assertEqual(caught.exception.code, 2)

        two = numbers(1, 2)
        refused("found shapes \\[2\\], \\[1\\], \\[2\\]", two, numbers(1), two, 1)
        refused("devices: a divisor of the number of experts, 2, expected, found 3", two, two, two, 3)
        refused("devices: .* found 0", two, two, two, 0)
        refused("numbers from 0 on", two, two, numbers(1, -1), 1)
        refused("int64 expected", two.double(), two, two, 1)
        with self.assertRaisesRegex(shardwright.Error, "devices=3: a divisor of the 2 experts of layer 0"):
            shardwright.ExtraCapacity(loss([1, 2]), devices=3)
        with self.assertRaisesRegex(shardwright.Error, "rank=2: a number from 0 to 1 expected"):
            shardwright.ExtraCapacity(loss([1, 2]), 1, 2, 2)

    def test_shapes_without_data(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            given = mode.from_tensor(numbers(1, 2, 3))
            self.assertEqual(tuple(torch.ops.shardwright.extra_capacity(given, given, given, 1).shape), (3,))


if __name__ == "__main__":
    live.start()
    import shardwright._library
    shardwright._library.operators()
    unittest.main(verbosity=2)
