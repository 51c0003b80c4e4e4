# SPDX-License-Identifier: Apache-2.0
"""Replicated experts in a trainer on CPU ranks, against a dense model: forward, backward, AdamW, a plan that changes, a rank
that is killed. And the operators alone: derivatives, what they refuse, what other devices get.

    moe_replicas_test.py BIN PACKAGE
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist

import moe_replicas as example

FOLDER = None  # of the commands
STEPS = 6


def plan(folder, name, loads, *flags):
    (folder / "loads.jsonl").write_text(json.dumps({"iteration": 1, "tokens": loads}) + "\n")
    done = subprocess.run([FOLDER / "moe-replace", folder / "loads.jsonl", "--cluster", folder / "cluster.json", "-o", folder / name,
                           "-q", *flags], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)


def loads_of(step):
    """The choices of the dense model's gates at the first layer; other layers have other token counts."""
    chosen, _ = example.gated(example.batch(step)[0], example.random("gate 0", example.HIDDEN, example.EXPERTS))
    first = torch.bincount(chosen.reshape(-1), minlength=example.EXPERTS).tolist()
    return [first, first[::-1]]


def reference(rank, folder, steps):
    model = example.Dense()
    losses = [model.step(step) for step in range(steps)]
    torch.save({"losses": losses, "dense": [one.detach() for one in model.dense],
                "experts": {key: [one.detach() for one in pair] for key, pair in model.experts.items()}}, folder / "reference.pt")


class Scratch(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="sw-replicas-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def cluster(self, nodes, gpus=1, slots=6):
        (self.folder / "cluster.json").write_text(json.dumps(
            {"nodes": [{"name": f"n{node}"} for node in range(nodes)], "gpus": gpus, "slots": slots, "expert_bytes": 4096}))


class Trainer(Scratch):
    wanted = None

    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory(prefix="sw-replicas-") as folder:
            example.launch(1, folder, reference, STEPS)
            cls.wanted = torch.load(pathlib.Path(folder) / "reference.pt", weights_only=True)

    def judge(self, ranks, replicated, **options):
        died = 1 if options.get("kill") else 0
        example.launch(ranks, self.folder, example.train, FOLDER / "moe-replace", STEPS, *options.values(), may_die=died)
        got = torch.load(self.folder / "result.pt", weights_only=True)
        self.assertEqual(got["ranks"], ranks - died)
        self.assertEqual(got["experts"].keys(), self.wanted["experts"].keys())
        self.assertEqual(got["replicated"] > 0, replicated)
        worst = max(abs(one - other) / abs(other) for one, other in zip(got["losses"], self.wanted["losses"], strict=True))
        pairs = list(zip(got["dense"], self.wanted["dense"]))
        for key, pair in self.wanted["experts"].items():
            pairs += zip(got["experts"][key], pair)
        off = max(float((one - other).abs().max()) for one, other in pairs)
        print(f"{self.id().split('.')[-1]}: {STEPS} losses {got['losses'][0]:.6f} to {got['losses'][-1]:.6f}, off by {worst:.1e}; "
              f"{len(pairs)} tensors off by {off:.1e}; {got['replicated']} experts replicated, {got['moved']} moved")
        self.assertLess(worst, 1e-12)
        self.assertLess(off, 1e-11)
        return got

    def test_changing_plans(self):
        self.cluster(4)
        plan(self.folder, "plan0.json", loads_of(0), "--strategy", "lazarus", "--faults", "1")
        plan(self.folder, "plan1.json", loads_of(4), "--strategy", "lazarus", "--faults", "1", "--old", self.folder / "plan0.json")
        moves = json.loads((self.folder / "plan1.json").read_text())["migration"]["transfer_count"]
        self.assertGreater(moves, 0)
        got = self.judge(4, True, rule="capacity", change_at=3)
        self.assertEqual(got["moved"], moves)

    def killed(self, where):
        self.cluster(4)
        plan(self.folder, "plan0.json", loads_of(0), "--strategy", "lazarus", "--faults", "1")
        got = self.judge(4, True, rule="proportional", change_at=None, kill=(2, 3, where))
        self.assertGreater(got["moved"], 0)

    def test_killed_between_dispatch_and_combine(self):
        self.killed("forward")

    def test_killed_when_some_have_stepped(self):
        self.killed("committed")

    def copied(self, **options):
        self.cluster(2, 2, 4)
        plan(self.folder, "plan0.json", loads_of(0), "--strategy", "hecate", "--overlap", "4", "--spare", "2")
        self.judge(4, False, rule="topology", **options)

    def test_owners_and_copies(self):
        self.copied()

    def test_owners_and_freed_copies(self):
        self.copied(change_at=None, kill=None, rematerialise=True)


MANY, WIDE = 6, 200  # layers of Copies, and the inner size of their experts


class Copies:
    """Six layers of owners and copies on one rank. Collective. forward() prefetches one layer ahead."""

    def __init__(self, plan, rematerialise):
        import shardwright
        shapes = (example.HIDDEN, WIDE), (WIDE, example.HIDDEN)
        self.experts = [{expert: [torch.nn.Parameter(example.random(f"{layer} {expert} {shape}", *shape) / 8) for shape in shapes]
                         for expert, ranks in enumerate(plan.state(layer)) if dist.get_rank() in ranks} for layer in range(MANY)]
        self.gates = [torch.nn.Parameter(example.random(f"gate {layer}", example.HIDDEN, example.EXPERTS)) for layer in range(MANY)]
        self.layers = [shardwright.ReplicatedExperts(plan, layer, self.experts[layer], rule="topology", rematerialise=rematerialise)
                       for layer in range(MANY)]

    def forward(self, number, checkpointed=False):
        tokens = example.batch(number)[0].tensor_split(dist.get_world_size())[dist.get_rank()]
        ahead = None if checkpointed else self.layers[0].prefetch()

        def one(tokens, layer, gate, fetched=None):
            tokens, held = layer.materialise(tokens, fetched)
            chosen, weights = example.gated(tokens, gate)
            sent = layer.dispatch(tokens, chosen)
            rows = torch.cat([example.computed(rows, held[expert]) for expert, rows in sent.by_expert()])
            return tokens + layer.combine(rows, sent, weights)

        for number, (layer, gate) in enumerate(zip(self.layers, self.gates)):
            if checkpointed:
                tokens = torch.utils.checkpoint.checkpoint(one, tokens, layer, gate, use_reentrant=False)
            else:
                fetched, ahead = ahead, self.layers[number + 1].prefetch() if number + 1 < MANY else None
                tokens = one(tokens, layer, gate, fetched)
        return (tokens ** 2).sum()

    def parameters(self):
        return self.gates + [one for experts in self.experts for tensors in experts.values() for one in tensors]

    def gradients(self):
        """Returns copies of all gradients, and removes them."""
        found = [one.grad.clone() for one in self.parameters()]
        for one in self.parameters():
            one.grad = None
        return found


def measured(model):
    """Makes both passes. Returns the bytes that PyTorch's allocator has given out between the passes, and at most."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        loss = model.forward(0)
        with torch.autograd.profiler.record_function("between passes"):
            pass
        loss.backward()
    events = sorted(profile.kineto_results.events(), key=lambda one: one.start_ns())
    now, between, most = 0, None, 0
    for event in events:
        if event.name() == "between passes":
            between = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return between, most


def rematerialised(rank, folder):
    """Collective. Trains with and without rematerialise. Writes sizes, and names of the cases in which gradients differ."""
    import shardwright
    plan = shardwright.ExpertPlan.read(folder / "plan0.json")
    models = [Copies(plan, False), Copies(plan, True)]
    different, sizes, errors = [], [], []

    def compare(case, work):
        results = []
        for model in models:
            work(model)
            results.append(model.gradients())
        if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)) or not any(one.any() for one in results[0]):
            different.append(case)

    def failing(work):
        try:
            work()
        except (shardwright.Error, KeyError) as error:
            errors.append([type(error).__name__, str(error)])
        else:
            errors.append(None)

    def twice(model):
        loss = model.forward(1)
        loss.backward(retain_graph=True)
        loss.backward()

    def without_backward(model):
        model.forward(2)
        with torch.no_grad():
            model.forward(3)
        model.forward(4).backward()

    def in_flight(model):
        losses = [model.forward(5), model.forward(6)]
        losses[0].backward()
        losses[1].backward()

    compare("once", lambda model: sizes.append(measured(model)))
    compare("twice", twice)
    compare("without backward", without_backward)
    compare("two batches in flight", in_flight)
    compare("checkpointed", lambda model: model.forward(7, checkpointed=True).backward())

    model, tokens = models[1], example.batch(8)[0].tensor_split(dist.get_world_size())[rank]
    layer = model.layers[0]
    chosen, weights = example.gated(tokens, model.gates[0])
    failing(lambda: layer.dispatch(tokens, chosen))
    fetched = layer.prefetch()
    passed, held = layer.materialise(tokens, fetched)
    failing(lambda: layer.materialise(tokens, fetched))
    sent = layer.dispatch(passed, chosen)
    out = layer.combine(torch.cat([example.computed(rows, held[expert]) for expert, rows in sent.by_expert()]), sent, weights)
    failing(lambda: held[next(iter(model.experts[0]))])
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1)
    failing(lambda: out.sum().backward())
    failing(lambda: shardwright.ReplicatedExperts(plan, 0, model.experts[0], rematerialise=rank == 0))
    failing(lambda: shardwright.ReplicatedExperts(shardwright.ExpertPlan(**{**plan.__dict__, "owners": None}), 0, model.experts[0],
                                                  rematerialise=True))
    copies = sum(rank in ranks and rank != plan.owner(number)[expert]
                 for number in range(MANY) for expert, ranks in enumerate(plan.holders(number)))
    expert_bytes = sum(one.nbytes for one in next(iter(model.experts[0].values())))
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"different": different, "sizes": sizes, "errors": errors, "copies": copies * expert_bytes})
    if rank == 0:
        (folder / "rematerialised.json").write_text(json.dumps(told))


class Rematerialised(Scratch):
    @classmethod
    def setUpClass(cls):
        import torch._dynamo  # imported by checkpoint(): here once, before the forks

    def test_equal_gradients_in_less_memory(self):
        self.cluster(2, 2, 4)
        plan(self.folder, "plan0.json", loads_of(0) * (MANY // 2), "--strategy", "hecate", "--overlap", "4", "--spare", "2")
        example.launch(4, self.folder, rematerialised)
        for rank, got in enumerate(json.loads((self.folder / "rematerialised.json").read_text())):
            (between, most), (less, at_most) = got["sizes"]
            print(f"rank {rank}: copies of {got['copies']} bytes; {between} bytes between the passes, {less} with rematerialise; "
                  f"at most {most} and {at_most}")
            self.assertEqual(got["different"], [])
            self.assertGreater(got["copies"], 0)
            # The profiler also counts small tensors that other threads allocate for messages.
            self.assertAlmostEqual((between - less) / got["copies"], 1, delta=0.1)
            self.assertGreater((most - at_most) / got["copies"], 0.6)
            for words, kind, error in zip(
                    ("call materialise() before each dispatch()", "call prefetch() for each materialise()", "",
                     "call backward() before the optimizer step", "rematerialise False", "there are no copies to free"),
                    ("UsageError", "UsageError", "KeyError", "UsageError", "MismatchError", "UsageError"), got["errors"], strict=True):
                self.assertEqual(error[0], kind, error)
                self.assertIn(words, error[1])


def refusals(rank, folder):
    """Collective. An error on one rank is reported on all; the messages of each."""
    import shardwright
    plan = shardwright.ExpertPlan.read(folder / "plan0.json")
    held = {expert: example.expert_of(0, expert) for expert, ranks in enumerate(plan.state(0)) if rank in ranks}
    layer = shardwright.ReplicatedExperts(plan, 0, held)
    tokens, chosen = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    first = rank == 0

    def told(work):
        try:
            work()
        except shardwright.Error as error:
            mine = [error.code, error.rank, str(error)]
        else:
            mine = None
        all_of_them = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        return all_of_them

    wrong = chosen.clone()
    wrong[1, 1] = example.EXPERTS
    nobody = [[] if expert == 0 else ranks for expert, ranks in enumerate(plan.holders(0))]
    missing = dict(list(held.items())[1:])
    narrow = {expert: [one[:, :-1].contiguous() if first else one for one in tensors] for expert, tensors in held.items()}
    strided = {expert: [one.t() if first else one for one in tensors] for expert, tensors in held.items()}
    other = shardwright.ExpertPlan(**{**plan.__dict__, "digest": "f" * 64}) if first else plan
    sparse = shardwright.SparseCollectives([torch.zeros(2)])

    def swapped():
        """Asynchronously there and back, from and to owners."""
        mine = {0: [torch.full((2,), 1.0 + rank)], 1: [torch.full((2,), 10.0 + rank)]}
        works = [sparse.all_gather(mine, [0, 1], [[0, 1], [0, 1]], async_op=True)]
        works[0].wait()
        assert [float(mine[expert][0][0]) for expert in (0, 1)] == [1, 11]
        sparse.reduce_scatter(mine, [1, 1], [[0, 1], [0, 1]], async_op=True).wait()
        assert rank == 0 or [float(mine[expert][0][1]) for expert in (0, 1)] == [2, 22]

    swapped()
    answers = {
        "held": told(lambda: sparse.all_gather({}, [0], [[0, 1]])),
        "owner": told(lambda: sparse.reduce_scatter({0: [torch.zeros(2)]}, [2], [[0, 1]])),
        "another form": told(lambda: sparse.all_gather({0: [torch.zeros(3)]}, [0], [[0, 1]])),
        "expert": told(lambda: layer.dispatch(tokens, wrong if first else chosen)),
        "no replica": told(lambda: layer.dispatch(tokens, chosen, holders=nobody)),
        "shape": told(lambda: layer.dispatch(torch.zeros(2, 4) if first else tokens, chosen)),
        "dtype": told(lambda: layer.dispatch(tokens.to(torch.int32) if first else tokens, chosen)),
        "width": told(lambda: layer.dispatch(torch.zeros(3, 5) if first else tokens, chosen)),
        "gate": told(lambda: layer.dispatch(tokens, chosen.double() if first else chosen)),
        "missing": told(lambda: shardwright.ReplicatedExperts(plan, 0, missing if first else held)),
        "form": told(lambda: shardwright.ReplicatedExperts(plan, 0, narrow)),
        "strides": told(lambda: shardwright.ReplicatedExperts(plan, 0, strided)),
        "digest": told(lambda: shardwright.ReplicatedExperts(other, 0, held)),
        "file": told(lambda: shardwright.ExpertPlan.read(folder / ("plan0.json" if first else "plan1.json"))),
        "ranks": told(lambda: shardwright.ExpertPlan.read(folder / "plan3.json")),
        "uneven": told(lambda: shardwright.ExpertPlan.read(folder / "uneven.json")),
        "rule": told(lambda: shardwright.ReplicatedExperts(plan, 0, held, rule="fair")),
        "layer": told(lambda: shardwright.ReplicatedExperts(plan, 7, held)),
        "state": told(lambda: shardwright.migrate(plan, shardwright.ExpertPlan.read(folder / "plan1.json"), {})),
        "other old": told(lambda: shardwright.migrate(shardwright.ExpertPlan.read(folder / "plan2.json"),
                                                      shardwright.ExpertPlan.read(folder / "plan1.json"), {})),
        "fine": told(lambda: layer.dispatch(tokens, torch.full_like(chosen, -1) if first else chosen))}
    if first:
        (folder / "answers.json").write_text(json.dumps(answers))


class Refusals(Scratch):
    def test_all_ranks_hear_of_them(self):
        self.cluster(3, slots=5)
        plan(self.folder, "plan3.json", loads_of(0))
        self.cluster(2, slots=5)
        plan(self.folder, "plan0.json", loads_of(0))
        plan(self.folder, "plan1.json", [[1] * 7 + [90]] * 2, "--old", self.folder / "plan0.json")
        plan(self.folder, "plan2.json", [[90] + [1] * 7] * 2, "--strategy", "vanilla")
        plan(self.folder, "uneven.json", [[1] * 8, [1] * 4])
        example.launch(2, self.folder, refusals)
        answers = json.loads((self.folder / "answers.json").read_text())
        for what, code, words in (
                ("expert", 4, ["token 1 choice 1", "expert 8 does not exist, there are 8"]),
                ("no replica", 10, ["expert 0: 12 tokens but no replica"]),
                ("shape", 2, ["[3][hidden] expected", "[2, 4]"]), ("dtype", 2, ["torch.int32"]),
                ("width", 5, ["float32[...][5], float32[...][4]"]), ("gate", 2, ["torch.float64"]),
                ("missing", 2, ["rank 0 holds experts", "parameters of"]), ("form", 5, ["float64[12, 19]", "float64[12, 20]"]),
                ("strides", 9, ["strides"]), ("digest", 5, ["ffffffffffffffff"]), ("file", 5, ["another plan"]),
                ("ranks", 5, ["3 live gpus, but the process group has 2 ranks"]),
                ("uneven", 9, ["the layers have different numbers of experts", "--layers"]), ("rule", 2, ['found "fair"']), ("layer", 2, ["no layer 7"]),
                ("held", 2, ["tensors of experts [] given", "it holds [0]"]), ("owner", 2, ["owner 2, ranks [0, 1]"]),
                ("another form", 5, ["float32[3], expected float32[2]"]), ("state", 2, ["tensors of layer 0 expert", "are missing"]), ("other old", 5, ["made for another old plan"])):
            for answer in answers[what]:
                self.assertIsNotNone(answer, what)
                self.assertEqual(answer[0], code, answer)
                for word in words:
                    self.assertIn(word, answer[2], what)
        self.assertEqual(answers["fine"], [None, None])


class Operators(unittest.TestCase):
    """Last: they use autograd here, and nothing is forked any more."""

    @classmethod
    def setUpClass(cls):
        from shardwright import _library
        cls.ops, cls.compute = _library.operators(), staticmethod(_library.compute)
        cls.place = torch.tensor([[0, 3], [2, -1], [1, 4], [-1, -1]])
        generator = torch.Generator().manual_seed(3)
        make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        cls.tokens, cls.rows, cls.weights = make(4, 5), make(5, 5), make(4, 2)

    def cases(self):
        return ((self.ops.pack_tokens, (self.tokens, self.place, self.weights, 5)), (self.ops.pack_tokens, (self.tokens, self.place, None, 5)),
                (self.ops.unpack_tokens, (self.rows, self.place, self.weights)), (self.ops.unpack_tokens, (self.rows, self.place, None)),
                (self.ops.token_dots, (self.rows, self.tokens, self.place)))

    def test_derivatives(self):
        for operator, arguments in self.cases():
            with self.subTest(operator):
                self.assertTrue(torch.autograd.gradcheck(operator, arguments))
                self.assertTrue(torch.autograd.gradgradcheck(operator, arguments))

    def test_registration(self):
        chosen = torch.tensor([[0, 1], [1, -1]])
        counts = self.ops.count_experts(chosen, 2).reshape(2, 1)
        more = ((self.ops.sum_parts, (self.rows.detach(),)), (self.ops.count_experts, (chosen, 2)),
                (self.ops.dispatch_plan, (chosen, counts, torch.ones_like(counts), torch.zeros(1, dtype=torch.int64), "capacity", 0)))
        for operator, arguments in self.cases() + more:
            with self.subTest(operator):
                found = torch.library.opcheck(operator, arguments)
                self.assertEqual(set(found.values()), {"SUCCESS"})

    def test_what_gpus_get(self):
        """PyTorch's operators in place of this project's, here on the CPU: the same bits, but for additions in other
        orders."""
        from shardwright import _operators as other
        for name in ("pack_tokens", "unpack_tokens", "token_dots", "sum_parts"):
            self.assertTrue(torch._C._dispatch_has_kernel_for_dispatch_key(f"shardwright::{name}", "CUDA"))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            tokens, rows = self.tokens.detach().to(dtype), self.rows.detach().to(dtype)
            weights = self.weights.detach().to(other.sum_type(dtype))
            for given in (weights, None):
                self.assertTrue(torch.equal(self.ops.pack_tokens(tokens, self.place, given, 5),
                                            other.pack_composite(tokens, self.place, given, 5)))
                self.assertTrue(torch.equal(self.ops.unpack_tokens(rows, self.place, given),
                                            other.unpack_composite(rows, self.place, given)))
            self.assertTrue(torch.equal(self.ops.sum_parts(rows), other.sum_composite(rows)))
            torch.testing.assert_close(self.ops.token_dots(rows, tokens, self.place), other.dots_composite(rows, tokens, self.place))

    def test_many_threads(self):
        """Large enough to be split between threads."""
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randn(3000, 256, generator=generator)
        place = torch.randperm(6000, generator=generator).reshape(3000, 2)
        rows = self.ops.pack_tokens(tokens, place, None, 6000)
        self.assertTrue(torch.equal(rows[place], tokens.unsqueeze(1).expand(-1, 2, -1)))
        half = torch.full((3000, 2), 0.5)
        self.assertTrue(torch.equal(self.ops.unpack_tokens(rows, place, half), tokens))

    def test_refused(self):
        import shardwright
        chosen = torch.tensor([[0, 1]])
        ones = torch.ones(2, 1, dtype=torch.int64)
        node = torch.zeros(1, dtype=torch.int64)
        tokens, rows, weights, place = self.tokens.detach(), self.rows.detach(), self.weights.detach(), self.place
        for words, code, operator, *arguments in (
                ("row 4 does not exist, there are 4", 2, "pack_tokens", tokens, place, None, 4),
                ("5 of 6 rows are used", 2, "pack_tokens", tokens, place, None, 6),
                ("row 3 is used twice", 2, "pack_tokens", tokens, torch.where(place == 4, 3, place), None, 5),
                ("has 4 tokens, but tokens has 3", 2, "pack_tokens", tokens[:3], place, None, 5),
                ("tokens: 2 dimensions expected", 2, "pack_tokens", tokens[0], place, None, 5),
                ("tokens: only contiguous tensors are supported", 9, "pack_tokens", tokens.t()[:4].t().t(), place[:], None, 5),
                ("tokens: float64, float32", 9, "pack_tokens", tokens.to(torch.int64), place, None, 5),
                ("weights: float64 expected", 2, "unpack_tokens", rows, place, weights.float()),
                ("weights: the shape of place, [4, 2]", 2, "unpack_tokens", rows, place, weights[:3]),
                ("place: int64 expected", 2, "unpack_tokens", rows, place.int(), weights),
                ("type of rows expected", 2, "token_dots", rows, tokens.float(), place),
                ("parts: at least one part expected", 2, "sum_parts", rows[:0]),
                ("expert 5 does not exist, there are 2", 4, "count_experts", torch.tensor([[0, 5]]), 2),
                ("expert -2 does not exist", 4, "count_experts", torch.tensor([[0, -2]]), 2),
                ('found "fair"', 2, "dispatch_plan", chosen, ones, ones, node, "fair", 0),
                ("rank: a rank below 1 expected, found 1", 2, "dispatch_plan", chosen, ones, ones, node, "capacity", 1),
                ("expert 1: 1 tokens but no replica", 10, "dispatch_plan", chosen, ones, ones * torch.tensor([[1], [0]]), node, "topology", 0),
                ("sends 2 tokens, found 1", 5, "dispatch_plan", chosen, ones * 2, ones, node, "capacity", 0),
                ("numbers from 0 on", 2, "dispatch_plan", chosen, -ones, ones, node, "capacity", 0)):
            with self.subTest(words):
                with self.assertRaises(shardwright.Error) as raised:
                    self.compute(operator, *arguments)
                self.assertIn(words, str(raised.exception))
                self.assertEqual(raised.exception.code, code)

    def test_calibration(self):
        """A hot expert of rank 0 gets company where that pays."""
        from shardwright._library import call
        asked = {"owner": [0, 1], "planned": [[0], [1]], "tokens": [100, 0], "node": [0, 1], "overlap": 1, "spare": [1, 1],
                 "cost": {"seconds_per_token": 1, "bytes_per_token": 0, "bytes_per_s": 1, "expert_bytes": 49}}
        self.assertEqual(call("calibrate", asked), {"holders": [[0, 1], [1]], "changed": True})
        asked["cost"]["expert_bytes"] = 51
        self.assertEqual(call("calibrate", asked), {"holders": [[0], [1]], "changed": False})


def main():
    global FOLDER
    FOLDER, package = pathlib.Path(sys.argv.pop(1)).resolve(), sys.argv.pop(1)
    if not package:
        print("skipped: the build has no operators for PyTorch (configure it with -DSW_TORCH_PYTHON=...)")
        sys.exit(1 if os.environ.get("CI") else 77)
    sys.path.insert(0, package)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import shardwright  # before the forks
    suite = unittest.TestSuite()
    for case in (Trainer, Rematerialised, Refusals, Operators):
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    if len(sys.argv) > 1:
        suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:], sys.modules[__name__])
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())


if __name__ == "__main__":
    main()
