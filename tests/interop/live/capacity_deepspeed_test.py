# SPDX-License-Identifier: Apache-2.0
"""Experts of DeepSpeed's MoE layers make up for lost tokens: two ranks with expert parallelism, compared with a dense computation
that decides by itself which tokens each expert processes.

    capacity_deepspeed_test.py BIN PACKAGE
"""

import unittest
from unittest import mock

import live  # first: it makes the modules of the other tests importable
import ranks
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

EXPERTS, EP, WIDTH, TOKENS = 8, 2, 12, 320
CHECK = unittest.TestCase()
BIN = None
# Added to the logits of the experts. On each of the two ranks some experts have more tokens than their capacity, others fewer.
LIKED = [1.2, 1.0, -2.0, -1.0, 1.1, -2.0, -2.0, -2.0]
# Gates of every kind: number of choices, and arguments of MoE.
GATES = {
    "one choice": (1, {}),
    "one choice, noise in the logits": (1, {"noisy_gate_policy": "RSample"}),
    "one choice, noise in the input": (1, {"noisy_gate_policy": "Jitter"}),
    "two choices": (2, {"top2_2nd_expert_sampling": False}),
    "two choices, the second sampled": (2, {}),
    "three choices": (3, {}),
    "at least 50 tokens": (1, {"min_capacity": 50}),
}
# Debts of the experts: more than an addition, less, one, and of experts without enough tokens.
DEBTS = [[1000, 1000, 0, 0, 0, 0, 0, 0], [6, 5, 0, 0, 0, 0, 0, 0], [3, 1000, 0, 0, 1000, 0, 0, 0], [1, 0, 1000, 1000, 0, 0, 0, 9]]


class Model(nn.Module):
    """MoE layers with residual connections. The first feature of each token is 1."""

    def __init__(self, layers, k, options):
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.layers = nn.ModuleList(MoE(WIDTH, expert, EXPERTS, EP, k, **{"min_capacity": 4} | options) for _ in range(layers))

    def forward(self, hidden):
        loss = 0
        for layer in self.layers:
            more, l_aux, _ = layer(hidden)
            hidden, loss = hidden + more, loss + 0.01 * l_aux
        return hidden.square().mean() + loss


def make_engine(k=1, layers=1, **options):
    """Collective. A trainer with experts that all differ, also between ranks."""
    torch.manual_seed(5)
    model = Model(layers, k, options)
    for layer in model.layers:
        layer.deepspeed_moe.gate.wg.weight.data[:, 0] += torch.tensor(LIKED)
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for weight in expert.parameters():
                weight.data.normal_(std=0.4, generator=torch.Generator().manual_seed(dist.get_rank() * 10 + number))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=config)[0]


def gates(engine):
    return [layer.deepspeed_moe.gate for layer in engine.module.layers]


def replaced(engine):
    return ["forward" in vars(gate) for gate in gates(engine)]


def tokens(seed):
    """Other tokens on each rank."""
    hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
    hidden[:, 0] = 1
    return hidden


def make_extra(lost, **options):
    import shardwright
    restored = {"loss": {"lost_by_expert": lost}}
    return shardwright.ExtraCapacity(restored, **{"devices": EP, "ranks": EP, "rank": dist.get_rank()} | options)


def additions(counts, capacity, debts):
    """The additional tokens of each expert, by docs/pec-planning.md section 9.6."""
    found = [0] * EXPERTS
    for first in range(0, EXPERTS, EXPERTS // EP):
        device = range(first, first + EXPERTS // EP)
        unused = sum(max(0, capacity - counts[e]) for e in device)
        need = {e: min(debts[e], capacity // 10, counts[e] - capacity) for e in device}
        need = {e: number for e, number in need.items() if number > 0}
        for place, (e, number) in enumerate(need.items()):
            found[e] = min(number, unused // len(need) + (place < unused % len(need)))
    return found


class Choices:
    """The choices of a gate for the tokens of this rank: [token][expert] probabilities, and for each expert its tokens, those
    that it keeps longest first. Draws the random numbers that DeepSpeed draws."""

    def __init__(self, gate, hidden, seed):
        torch.manual_seed(seed)
        if gate.noisy_gate_policy == "Jitter":
            hidden = hidden * (0.99 + 0.02 * torch.rand(hidden.shape))
        self.logits = hidden @ gate.wg.weight.detach().t()
        self.scores = self.logits.softmax(1)
        noise = None
        if gate.noisy_gate_policy == "RSample" or (gate.k == 2 and gate.top2_2nd_expert_sampling):
            noise = torch.distributions.Gumbel(torch.tensor(0.0), torch.tensor(1.0)).sample(self.logits.shape)
        self.chosen = [self._choose(gate, token, noise) for token in range(len(hidden))]
        order = torch.rand(self.logits.shape).tolist() if gate.k == 1 else None  # random token selection
        self.queues = [[] for _ in range(EXPERTS)]
        for place in range(gate.k):
            for token, experts in enumerate(self.chosen):
                self.queues[experts[place]].append(token)
        for expert, queue in enumerate(self.queues):
            if gate.k == 1:
                queue.sort(key=lambda token: -order[token][expert])
            if gate.k > 2:
                queue.sort(key=lambda token: -float(self.scores[token, expert]))
        self.counts = [len(queue) for queue in self.queues]

    def _choose(self, gate, token, noise):
        """The experts of a token, best first."""
        if gate.noisy_gate_policy == "RSample":
            return [int((self.logits[token] + noise[token]).argmax())]
        best = self.scores[token].sort(descending=True).indices.tolist()
        if gate.k != 2 or noise is None:
            return best[:gate.k]
        rest = self.logits[token] + noise[token]
        rest[best[0]] = -float("inf")
        return [best[0], int(rest.argmax())]

    def kept(self, capacities):
        """[token][expert]: true where the expert processes the token."""
        found = torch.zeros(self.scores.shape, dtype=torch.bool)
        for expert, queue in enumerate(self.queues):
            found[queue[:capacities[expert]], expert] = True
        return found


def dense(layer, hidden, choices, kept, seed):
    """The output of a layer that processes the kept tokens, and l_aux, computed with all experts on this rank. The gradients of
    experts are added up over ranks by the caller. (output, l_aux, weights of the gate, weights of all experts)"""
    gate = layer.deepspeed_moe.gate
    weight = gate.wg.weight.detach().clone().requires_grad_()
    seen = hidden
    if gate.noisy_gate_policy == "Jitter":
        torch.manual_seed(seed)
        seen = hidden * (0.99 + 0.02 * torch.rand(hidden.shape))
    scores = (seen @ weight.t()).softmax(1)
    used = scores * kept
    if gate.k > 1:
        used = used / used.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    own = [[one.detach().clone() for one in expert.parameters()] for expert in layer.deepspeed_moe.experts.deepspeed_experts]
    both = [None] * EP
    dist.all_gather_object(both, own)
    experts = [[one.requires_grad_() for one in expert] for part in both for expert in part]
    output = sum(used[:, e:e + 1] * (torch.tanh(hidden @ w.t() + b) @ v.t() + c) for e, (w, b, v, c) in enumerate(experts))
    first = nn.functional.one_hot(torch.tensor([experts[:gate.k if gate.k > 2 else 1] for experts in choices.chosen]), EXPERTS).sum(1)
    l_aux = (scores.mean(0) * first.float().mean(0)).sum() * EXPERTS / (gate.k if gate.k > 2 else 1)
    return output, l_aux, weight, experts


def run_layer(layer, hidden, seed):
    """Returns the results of a layer, its gradients, and the state of the random numbers afterwards."""
    layer.zero_grad()
    given = hidden.clone().requires_grad_()
    torch.manual_seed(seed)
    output, l_aux, counts = layer(given)
    after = torch.get_rng_state()
    ((output * hidden.sin()).sum() + l_aux).backward()
    found = {"output": output.detach(), "l_aux": l_aux.detach(), "counts": counts, "random": after, "input": given.grad}
    found |= {name: one.grad.clone() for name, one in layer.named_parameters() if one.grad is not None}
    layer.zero_grad()
    return found


def check_same(got, want):
    CHECK.assertEqual(sorted(got), sorted(want))
    CHECK.assertEqual([name for name in want if not torch.equal(got[name], want[name])], [])


def check_dense(layer, hidden, choices, capacities, seed, found):
    """Compares what run_layer() has found with the dense computation."""
    given = hidden.clone().requires_grad_()
    output, l_aux, weight, experts = dense(layer, given, choices, choices.kept(capacities), seed)
    ((output * hidden.sin()).sum() + l_aux).backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found["output"], output.detach(), **close)
    torch.testing.assert_close(found["l_aux"], l_aux.detach(), **close)
    torch.testing.assert_close(found["input"], given.grad, **close)
    torch.testing.assert_close(found["deepspeed_moe.gate.wg.weight"], weight.grad, **close)
    for number, expert in enumerate(experts):
        for one in expert:
            dist.all_reduce(one.grad)
        if number // (EXPERTS // EP) == dist.get_rank():
            prefix = f"deepspeed_moe.experts.deepspeed_experts.{number % (EXPERTS // EP)}."
            mine = [grad for name, grad in found.items() if name.startswith(prefix)]
            torch.testing.assert_close(mine, [one.grad for one in expert], **close)


def with_and_without_debt(k, options):
    """Collective. Compares passes of one layer in which some experts owe tokens. The number of additional tokens."""
    engine = make_engine(k, **options)
    layer, gate = engine.module.layers[0], gates(engine)[0]
    capacity, made_up = max(k * TOKENS // EXPERTS, gate.min_capacity), 0
    for seed, lost in enumerate(DEBTS):
        hidden = tokens(seed)
        choices = Choices(gate, hidden, seed)
        evaluated, plain = run_layer(layer.eval(), hidden, seed), run_layer(layer.train(), hidden, seed)
        check_dense(layer, hidden, choices, [capacity] * EXPERTS, seed, plain)
        extra = make_extra([lost])
        extra.attach(engine)
        CHECK.assertEqual(replaced(engine), [True])
        above = additions(choices.counts, capacity, extra.debts[0].tolist())
        raised = run_layer(layer, hidden, seed)
        check_dense(layer, hidden, choices, [capacity + more for more in above], seed, raised)
        for name in ("l_aux", "counts", "random"):
            CHECK.assertTrue(torch.equal(raised[name], plain[name]), name)
        CHECK.assertEqual(plain["counts"].tolist(), choices.counts)
        # Rows change exactly where an expert processes an additional token.
        further = choices.kept([capacity + more for more in above]) & ~choices.kept([capacity] * EXPERTS)
        CHECK.assertEqual(further.sum(0).tolist(), above)
        same = torch.isclose(raised["output"], plain["output"], rtol=1e-6, atol=1e-7).all(1)
        CHECK.assertEqual((~same).tolist(), further.any(1).tolist())
        CHECK.assertEqual(extra._used[0].tolist(), above)
        made_up += sum(above)
        check_same(run_layer(layer.eval(), hidden, seed), evaluated)
        layer.train()
        extra.detach()
        CHECK.assertEqual(replaced(engine), [False])
        check_same(run_layer(layer, hidden, seed), plain)
    return made_up


def arbitrary_selection():
    """Collective. Without random token selection DeepSpeed's gate of one choice keeps an arbitrary part of the tokens. An expert with
    an addition gets the part that DeepSpeed keeps at the larger capacity, the others get the same part as before."""
    engine = make_engine(use_rts=False)
    gate, hidden, capacity = gates(engine)[0], tokens(1), TOKENS // EXPERTS

    def kept_at(size):
        with mock.patch.multiple(gate, capacity_factor=0.0, min_capacity=size):
            _, _, _, experts, places, weights, _ = gate(hidden, None, True)
        CHECK.assertEqual(len(set(zip(experts[0].tolist(), places[0].tolist())) - {(-1, 0)}), int((experts >= 0).sum()))
        return [dict(zip(torch.nonzero(experts[0] == e)[:, 0].tolist(), weights[0][experts[0] == e].tolist())) for e in range(EXPERTS)]

    counts = torch.bincount((hidden @ gate.wg.weight.t()).argmax(1), minlength=EXPERTS).tolist()
    extra = make_extra([DEBTS[0]])
    above = additions(counts, capacity, extra.debts[0].tolist())
    want = [kept_at(capacity + above[e])[e] for e in range(EXPERTS)]
    extra.attach(engine)
    _, size, _, experts, places, weights, _ = gate(hidden, None, True)
    CHECK.assertLess(int(places.max()), int(size))
    for e in range(EXPERTS):
        mine = experts[0] == e
        CHECK.assertEqual(dict(zip(torch.nonzero(mine)[:, 0].tolist(), weights[0][mine].tolist())), want[e])
        CHECK.assertEqual(len(set(places[0][mine].tolist())), int(mine.sum()))
        CHECK.assertEqual(int(mine.sum()), min(counts[e], capacity + above[e]))
    extra.detach()
    return sum(above)


def without_effect(k):
    """Collective. Experts that owe tokens have fewer than their capacity: everything is the same bit for bit."""
    engine = make_engine(k, layers=2)
    first, second = engine.module.layers
    plain = [run_layer(layer, tokens(3), 3) for layer in (first, second)]
    extra = make_extra([[0, 0, 9, 0, 0, 8, 0, 0], [0] * EXPERTS])
    extra.attach(engine)
    CHECK.assertEqual(replaced(engine), [True, False], "a layer without debt keeps its gate")
    for layer, want in zip((first, second), plain):
        check_same(run_layer(layer, tokens(3), 3), want)
    CHECK.assertTrue(extra.step())
    CHECK.assertEqual(sum(extra.debts[0].tolist()), 9 if dist.get_rank() == 0 else 8)
    extra.detach()


def until_made_up(k):
    """Collective. Trains until nothing is owed. (steps, passes with an addition on any rank, tokens above the capacity)"""
    engine, lost = make_engine(k, layers=2), [[61] + [0] * 7, [0] * EXPERTS]
    extra = make_extra(lost)
    extra.attach(engine)
    capacity, sizes, made_up, owed = k * TOKENS // EXPERTS, [], 0, int(extra.debts[0][0])
    CHECK.assertEqual(owed, 31 if dist.get_rank() == 0 else 30)

    def look(_, __, output):
        nonlocal made_up
        kept = (output[3][None] == torch.arange(EXPERTS)[:, None, None]).sum((1, 2))
        sizes.append(int(output[1]))
        made_up += int((kept - capacity).clamp(min=0).sum())
        CHECK.assertLessEqual(int(kept.max()), sizes[-1])

    gates(engine)[0].register_forward_hook(look)
    for step in range(100):
        torch.manual_seed(step)
        loss = engine(tokens(step))
        engine.backward(loss)
        engine.step()
        extra.step()
        CHECK.assertEqual(int(extra.debts[0][0]), owed - made_up)
        if replaced(engine) == [False, False]:
            break
    CHECK.assertEqual(made_up, owed)
    every = [None] * EP
    dist.all_gather_object(every, sizes)
    CHECK.assertEqual(every, [sizes] * EP, "buffers have one size on all ranks")
    CHECK.assertEqual(sizes[-1], capacity)
    layer = engine.module.layers[0]
    after = run_layer(layer, tokens(7), 7)
    extra.detach()
    check_same(after, run_layer(layer, tokens(7), 7))
    return len(sizes), sum(size > capacity for size in sizes), made_up


def partial(engine, folder):
    import shardwright
    return shardwright.PartialCheckpoints(engine, folder / "store", k=1, command=str(BIN / "pec-save"))


def train_and_save(folder):
    """Collective. Three steps, each with a snapshot of one expert."""
    engine = make_engine()
    pec = partial(engine, folder)
    pec.load()
    for step in range(3):
        engine.backward(engine(tokens(step)))
        engine.step()
        pec.step()
    return pec.close()


def restore_and_make_up(folder):
    """Collective. Restores experts of different versions, and makes two steps. (lost tokens by expert, debts that are left on all
    ranks)"""
    import shardwright
    engine = make_engine()
    pec = partial(engine, folder)
    loaded = pec.load()
    extra = shardwright.ExtraCapacity(loaded, devices=EP, ranks=EP, rank=dist.get_rank())
    extra.attach(engine)
    lost = loaded.restored["loss"]["lost_by_expert"]
    CHECK.assertEqual(replaced(engine), [True])
    for step in range(2):
        engine.backward(engine(tokens(step)))
        engine.step()
        pec.step()
        extra.step()
    pec.close()
    left = [None] * EP
    dist.all_gather_object(left, extra.debts[0].tolist())
    return lost[0], [sum(both) for both in zip(*left)]


def refused_calls():
    """Collective. Everything that is not supported, with the part of the message that names it. The messages."""
    import shardwright
    engine, told = make_engine(), []
    inner, gate = engine.module.layers[0].deepspeed_moe, gates(engine)[0]

    def refused(kind, words, extra, trainer=engine):
        with CHECK.assertRaisesRegex(kind, words) as caught:
            extra.attach(trainer)
        CHECK.assertNotIn("forward", vars(gate))
        told.append(str(caught.exception))

    class Other(type(gate)):
        def forward(self, *arguments):
            return super().forward(*arguments)

    class PipelineEngine:
        module = engine.module

    class Parallel:
        get_tensor_model_parallel_world_size = staticmethod(lambda: 2)

    lost, unsupported, usage = [[9] + [0] * 7], shardwright.UnsupportedError, shardwright.UsageError
    from deepspeed.utils import groups
    for patch, words in ((mock.patch.object(gate, "drop_tokens", False), "layers.0: drop_tokens=False"),
                         (mock.patch.object(inner, "use_tutel", True), "layers.0: extra capacity with Tutel"),
                         (mock.patch.object(groups, "mpu", Parallel), "tensor parallelism over 2 ranks"),
                         (mock.patch.object(engine, "module", nn.Linear(2, 2)), "no layer of the class"),
                         (mock.patch.object(type(gate), "forward", lambda self, input: None), "have no sparse routes")):
        with patch:
            refused(unsupported, words, make_extra(lost))
            refused(unsupported, words, make_extra([]))  # also before anything was lost
    gate.__class__ = Other
    refused(unsupported, "layers.0: DeepSpeed's TopKGate expected, found Other", make_extra(lost))
    gate.__class__ = Other.__base__
    refused(unsupported, "pipeline engine", make_extra(lost), PipelineEngine())
    refused(usage, "ranks=1, rank=0: .* pass ranks=2, rank=0", make_extra(lost, ranks=1, rank=0))
    refused(usage, "devices=4: layers.0 has ep_size=2; pass devices=2", make_extra(lost, devices=4))
    refused(shardwright.MismatchError, r"the restore has \[2\], the model \[8\]", make_extra([[9, 0]]))
    refused(shardwright.MismatchError, r"the restore has \[8, 8\]", make_extra(lost * 2))
    refused(usage, "other lost tokens", make_extra(lost if dist.get_rank() else [[8] + [0] * 7]))
    if dist.get_rank() == 1:  # one rank only
        gate.drop_tokens = False
    refused(unsupported, "layers.0: drop_tokens=False", make_extra(lost))
    gate.drop_tokens = True
    first = make_extra(lost)
    first.attach(engine)
    with CHECK.assertRaisesRegex(usage, "layers.0: the gate's forward.. was replaced already"):
        make_extra(lost).attach(engine)
    with CHECK.assertRaisesRegex(unsupported, "without sparse_routes"):
        gate(tokens(0))
    first.detach()
    make_extra([[0] * EXPERTS]).attach(engine)
    make_extra([]).attach(engine)
    CHECK.assertEqual(replaced(engine), [False])
    return told


class Restored(live.InFolder):
    def test_tokens_of_a_restore_are_made_up(self):
        ranks.run(EP, train_and_save, self.folder)
        lost, left = ranks.run(EP, restore_and_make_up, self.folder)
        capacity = TOKENS // EXPERTS
        # Two steps of two ranks. The first two and the fifth expert have more tokens than their capacity.
        for expert, (before, after) in enumerate(zip(lost, left)):
            self.assertLessEqual(before - after, 2 * EP * (capacity // 10))
            self.assertEqual(before > after, before > 0 and expert in (0, 1, 4), (lost, left))
        self.assertNotEqual(lost, left)


class DeepSpeed(unittest.TestCase):
    def test_only_additional_tokens_of_owing_experts_are_processed(self):
        for name, (k, options) in GATES.items():
            with self.subTest(name):
                self.assertGreater(ranks.run(EP, with_and_without_debt, k, options), 0)

    def test_arbitrary_selections_are_those_of_deepspeed(self):
        self.assertGreater(ranks.run(EP, arbitrary_selection), 0)

    def test_experts_below_their_capacity_change_nothing(self):
        for k in (1, 2, 3):
            with self.subTest(k=k):
                ranks.run(EP, without_effect, k)

    def test_debts_run_out(self):
        for k in (1, 2):
            with self.subTest(k=k):
                passes, raised, made_up = ranks.run(EP, until_made_up, k)
                self.assertEqual(made_up, 31)
                self.assertGreaterEqual(raised, -(-31 // (4 * k)))
                self.assertGreater(passes, raised)

    def test_refused(self):
        self.assertEqual(len(ranks.run(EP, refused_calls)), 18)


if __name__ == "__main__":
    BIN = live.start().folder
    unittest.main(verbosity=2)
