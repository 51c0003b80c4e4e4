# SPDX-License-Identifier: Apache-2.0
"""Gradients out of running trainers: an old version of an expert and the gradients that were logged since are, bit for bit,
the expert as the trainer had it. Twice over: torch itself makes the steps here (gradient_log.py), and restores make them.

    lossless_test.py BIN PACKAGE [--all]

DeepSpeed on two and four ranks, stages 1 and 2, float32 and bfloat16, one expert of 8 in a snapshot; an agent that is killed;
trainers that are killed at random moments; FSDP2; errors. With --all there are more cases and kills.
"""

import json
import os
import pathlib
import random
import subprocess
import time
import unittest
import warnings

import live  # first: it makes the modules of the other tests importable
import gradient_log
import model as model_of_tests
import ranks
import torch
import torch.distributed as dist
from model import complete, make_engine, train_step
from tensors import logical_tensors
from train import differences

CASE = {"zero": 2, "dtype": "bf16", "experts": 8, "ep": 2, "width": 32, "layers": 2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAST = 6
BIN = None


def partial(engine, folder, **options):
    import shardwright
    return shardwright.PartialCheckpoints(engine, folder / "store", **{"command": str(BIN / "pec-save"), "k": 1,
                                                                       "lossless": True} | options)


def last_recovery(folder):
    return max([0, *(int(path.stem) for path in (folder / "store/recoveries").glob("*.json"))])


def train(folder, case, every, options):
    """Collective. What the trainer had at each iteration is kept."""
    case = complete(case)
    engine = make_engine(case)
    pec = partial(engine, folder, every=every, **options)
    active, sizes = [], []
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        pec.step(client_state={"note": f"of {iteration}"})
        live.keep(engine, case, folder, iteration)
        active.append(pec.gradients.active)
        sizes.append(pec.gradients.handed_bytes)
    found = {"active": active, "stored": pec.close(), "losses": [train_step(engine, case, LAST + step) for step in (1, 2)]}
    sums = [None] * dist.get_world_size()
    dist.all_gather_object(sums, sizes)
    return found | {"bytes": [sum(ranks) for ranks in zip(*sums)]}


def versions_of(restored):
    """Of experts in the store, before gradients were replayed."""
    return {one["module"]: one.get("replayed", {"from": one["version"]})["from"] for one in restored["modules"] if one["expert"]}


def resume(folder, case):
    """Collective. Restores the store: versions, and the differences from the trainer's state at that iteration."""
    import shardwright
    case = complete(case)
    engine = make_engine(case | {"seed": 99})
    loaded = shardwright.load(engine, folder / "store", threads=1, read_only=True)
    want = torch.load(folder / f"tensors{int(loaded)}.pt", weights_only=True)
    return {"iteration": int(loaded), "versions": versions_of(loaded.restored), "loss": loaded.restored["loss"],
            "wrong": differences(logical_tensors(engine, case), want, case, False)}


def resumed_from(folder, case, source, last):
    """Collective. What differs from the trainer at an iteration in a checkpoint; the next losses."""
    import shardwright
    case = complete(case)
    engine = make_engine(case | {"seed": 99})
    shardwright.load(engine, source, threads=1)
    wrong = differences(logical_tensors(engine, case), torch.load(folder / f"tensors{last}.pt", weights_only=True), case, False)
    return {"wrong": wrong, "losses": [train_step(engine, case, last + step) for step in (1, 2)]}


def uninterrupted(folder, case, last):
    """Collective. The same training without snapshots; its losses."""
    case = complete(case)
    engine = make_engine(case)
    folder.mkdir(exist_ok=True)
    losses = []
    for iteration in range(1, last + 3):
        losses.append(train_step(engine, case, iteration))
        live.keep(engine, case, folder, iteration)
    return losses


def agent_dies(folder, case):
    """Collective. The agent is killed between snapshots; True if gradients continue, and warnings."""
    case = complete(case)
    engine = make_engine(case)
    pec = partial(engine, folder, k=4)
    said = []
    for iteration in range(1, LAST + 1):
        if dist.get_rank() == 0 and iteration == 3:
            pec._wait()
            live.kill(live.agent_pid(pec.agent))
        dist.barrier()
        train_step(engine, case, iteration)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = pec.step()
        said.append((taken, pec.gradients.active, [str(one.message) for one in caught if "gradient log" in str(one.message)]))
        live.keep(engine, case, folder, iteration)
    return said + [pec.close()]


def refused(folder):
    """Collective. (code, message) of each setup that cannot be logged."""
    import shardwright
    found = {}

    def failure(what, work):
        try:
            work()
            found[what] = (0, "nothing was raised")
        except shardwright.Error as error:
            found[what] = (error.code, str(error))

    for what in ("sgd", "nadam", "amsgrad"):
        engine = make_engine(complete(CASE | {"optimizer": what, "ep": 1}))
        failure(what, lambda: shardwright.GradientLog(engine, f"unix:{folder}/nobody"))
    model = torch.nn.Linear(4, 4)
    for what, options in [("foreach", {"foreach": True}), ("fused", {"fused": True}), ("a rate that is a tensor", {"lr": torch.tensor(1e-3)})]:
        failure(what, lambda: shardwright.GradientLog((model, torch.optim.AdamW(model.parameters(), **options)), "unix:/nobody"))
    half = torch.nn.Linear(4, 4).bfloat16()
    failure("bfloat16", lambda: shardwright.GradientLog((half, torch.optim.AdamW(half.parameters())), "unix:/nobody"))
    return found


def with_all_experts(block, x):
    """A block of model.py with experts that all see every token, so that no token has to move."""
    shape = (*x.shape[:-1], -1, block.head_width)
    query, key, value = (part.reshape(shape) for part in block.attend(block.norm(x)).chunk(3, -1))
    x = x + block.attended(model_of_tests.attention(query, key, value).flatten(2))
    x = x + block.narrow(torch.nn.functional.gelu(block.widen(x)))
    experts = block.moe.deepspeed_moe.experts.deepspeed_experts
    return x + sum((1 + number) * expert(x) for number, expert in enumerate(experts)) / len(experts)


def in_fsdp2(folder, case, agent, steps):
    """Collective. FSDP2 continues from the store of a DeepSpeed run; gradients of its shards."""
    import shardwright
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    case = complete(case)
    model_of_tests.Block.forward = with_all_experts
    model = model_of_tests.make_model(case | {"seed": 99})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = shardwright.GradientLog((model, optimizer), agent)
    loaded = shardwright.load((model, optimizer), folder / "store", threads=1, strict=False, agents=[agent])
    start = int(loaded)
    log.begin(start)
    states = {start: live.state_of(model, optimizer)}
    for iteration in range(start + 1, start + 1 + steps):
        tokens = torch.randint(0, case["vocab"], (4, 8), generator=torch.Generator().manual_seed(iteration)).chunk(2)[dist.get_rank() % 2]
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not log.step(iteration):
            raise AssertionError(f"no gradients of iteration {iteration}")
    states[iteration] = live.state_of(model, optimizer)
    log.close()
    if dist.get_rank() == 0:
        for at, state in states.items():
            torch.save(state, folder / f"tensors_fsdp2_{at}.pt")
    return {"start": start, "end": iteration, "recovery": last_recovery(folder)}


def killed(folder, case, last, pause):
    """Collective. Continues from the store; keeps its state after the load, and after every iteration."""
    case = complete(case)
    engine = make_engine(case)
    pec = partial(engine, folder, k=2)
    loaded = pec.load(threads=1)
    start = engine.global_steps
    live.keep(engine, case, folder, f"_loaded{start}")
    if dist.get_rank() == 0:
        era = {"start": start, "recovery": last_recovery(folder), "restored": loaded.restored, "agent": pec.agent}
        (folder / "era.part").write_text(json.dumps(era))
        (folder / "era.part").rename(folder / f"era{time.monotonic_ns()}.json")
    dist.barrier()
    for iteration in range(start + 1, last + 1):
        train_step(engine, case, iteration)
        live.keep(engine, case, folder, iteration)  # first: a snapshot may be the last thing that is seen of it
        dist.barrier()
        pec.step()
        if dist.get_rank() == 0:
            with open(folder / "progress", "a", encoding="utf-8") as log:
                log.write(f"{iteration}\n")
        time.sleep(pause)
    return pec.close()


def never_ends(folder, case):
    """Collective. Trains with an agent that replays in its memory, keeps what it has, and then waits to be killed."""
    case = complete(case)
    engine = make_engine(case)
    pec = partial(engine, folder, flags=["--replay"])
    pec.load(threads=1)
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        live.keep(engine, case, folder, iteration)
        pec.step()
    if dist.get_rank() == 0:
        (folder / "agent.part").write_text(pec.agent)
        (folder / "agent.part").rename(folder / "agent")
    time.sleep(600)


def from_memory(folder, case):
    """Collective. Continues from the memory of the agent: the restored state, the differences from the trainer's, the
    next losses."""
    case = complete(case)
    engine = make_engine(case | {"seed": 99})
    pec = partial(engine, folder, flags=["--replay"])
    loaded = pec.load(threads=1)
    want = torch.load(folder / f"tensors{LAST}.pt", weights_only=True)
    found = {"restored": loaded.restored, "wrong": differences(logical_tensors(engine, case), want, case, False),
             "losses": [train_step(engine, case, LAST + step) for step in (1, 2)]}
    pec.close()
    return found


class Lossless(live.InFolder):
    def tensors(self, folder, name):
        return torch.load(folder / f"tensors{name}.pt", weights_only=True)

    def prove(self, folder, case, iteration, versions, recovery, start=None):
        """Every expert at an iteration out of its version, or out of the state loaded at `start`; the longest chain."""
        self.ucp.run("pec-save", "check", folder / "store", "-q")
        log, want, longest = gradient_log.read(folder / "store/logs"), self.tensors(folder, iteration), 0
        for module, version in versions.items():
            loaded = start is not None and version <= start
            first = start if loaded else version
            state = self.tensors(folder, f"_loaded{start}" if loaded else version)
            got = gradient_log.replayed(log, module, state, first, iteration, recovery, DTYPES[(CASE | case)["dtype"]])
            self.assertGreaterEqual(len(got), 4 * 3, module)
            for name, tensor in got.items():
                self.assertTrue(gradient_log.same_bits(tensor, want[name]), f"{name} at {iteration}, from {first}")
            longest = max(longest, iteration - first)
        return longest

    def restored(self, folder, case, world, last, losses, *target):
        """pec-restore out of versions and the log: every tensor, and the next losses."""
        self.ucp.run("pec-restore", folder / "store", folder / "out", "--replay", "require", "--read-only", *target,
                     f"--json={folder}/restored.json")
        result = json.loads((folder / "restored.json").read_text())["result"]
        self.assertEqual(set(result["versions"].values()), {last})
        if result["loss"] is not None:
            self.assertEqual(sum(result["loss"]["lost"]), 0)
        back = ranks.run(world, resumed_from, folder, case, folder / "out", last)
        self.assertEqual(back["wrong"], [])
        if losses is not None:
            self.assertEqual(back["losses"], losses)

    def test_bit_for_bit(self):
        for number, (case, world, every, options) in enumerate([
                ({}, 2, 1, {}),
                ({"zero": 1, "dtype": "fp32"}, 4, 1, {}),
                ({"zero": 1, "dtype": "bf16", "grad_accum": "fp32", "ep": 1}, 2, 2, {}),
                ({"zero": 2, "dtype": "fp32", "ep": 1}, 2, 1, {"log_memory": 1}),
                ({"optimizer": "sgd"}, 2, 1, {}),
                ({"optimizer": "amsgrad", "zero": 1}, 2, 3, {})][:6 if live.EVERYTHING else 2]):
            with self.subTest(**case, ranks=world, every=every):
                folder = self.folder / str(number)
                folder.mkdir()
                found = ranks.run(world, train, folder, CASE | case, every, options)
                self.assertEqual((found["active"][every - 1:], found["stored"]), ([True] * (LAST - every + 1), LAST // every * every))
                back = ranks.run(world, resume, folder, CASE | case)
                self.assertEqual((len(back["versions"]), back["wrong"], sum(back["loss"]["lost"])), (16, [], 0))
                self.assertGreater(len(set(back["versions"].values())), 1, "all experts are of one version")
                self.assertEqual(self.prove(folder, case, back["iteration"], back["versions"], 0), back["iteration"] - every)
                # All elements of all experts, 4 bytes each, in every iteration after the first snapshot.
                elems = sum(tensor.numel() for name, tensor in self.tensors(folder, LAST).items()
                            if "deepspeed_experts" in name and name.endswith("/fp32"))
                self.assertEqual(found["bytes"], [4 * elems * max(0, done - every) for done in range(1, LAST + 1)])
                self.restored(folder, CASE | case, world, LAST, found["losses"])

    def test_compressed(self):
        """Restored only: no Python here reads zstd."""
        if not live.EVERYTHING:
            self.skipTest("with --all")
        ranks.run(2, train, self.folder, CASE, 1, {"log_zstd": 3})
        self.ucp.run("pec-save", "check", self.folder / "store", "-q")
        back = ranks.run(2, resume, self.folder, CASE)
        self.assertEqual((back["iteration"], back["wrong"], min(back["versions"].values())), (LAST, [], 1))
        stored = [piece for path in (self.folder / "store/logs").glob("*.swg") for record, _ in gradient_log.records_of(path, None)[0]
                  for piece in record["pieces"]]
        self.assertTrue(any(piece["zstd"] for piece in stored))

    def test_skipped_steps(self):
        """A loss scale that overflows twice: DeepSpeed leaves these steps out."""
        case = {"dtype": "fp16", "config": {"fp16": {"initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1}}}
        found = ranks.run(2, train, self.folder, CASE | case, 1, {})
        self.assertEqual((found["active"], found["stored"]), ([True] * LAST, LAST))
        back = ranks.run(2, resume, self.folder, CASE | case)
        self.prove(self.folder, case, LAST, back["versions"], 0)
        log = gradient_log.read(self.folder / "store/logs")
        made = {iteration: {step["skipped"] for record, _ in records for step in record["steps"]}
                for (_, iteration), records in log.items()}
        self.assertEqual(sorted(made), list(range(2, LAST + 1)))
        self.assertEqual(set().union(*made.values()), {False, True}, made)
        self.assertEqual(back["wrong"], [])

    def test_an_agent_that_is_killed(self):
        *said, stored = ranks.run(2, agent_dies, self.folder, CASE)
        self.assertEqual([(taken, active) for taken, active, _ in said], [(True, True)] * LAST, said)
        self.assertEqual([len(warned) for *_, warned in said], [0, 0, 1, 0, 0, 0], said)
        self.assertIn("ends before iteration 3", said[2][2][0])
        back = ranks.run(2, resume, self.folder, CASE)
        self.assertEqual((stored, back["iteration"], back["wrong"]), (LAST, LAST, []))
        # Four of eight experts in each snapshot: all of them are newer than the gap again.
        self.assertGreaterEqual(min(back["versions"].values()), 3)
        self.prove(self.folder, CASE, LAST, back["versions"], 0)

    def test_out_of_memory_alone(self):
        """The trainer is killed, and the log is gone: all experts are of the last iteration in the agent's memory."""
        from shardwright._agent import Connection
        for number, case in enumerate([CASE, CASE | {"zero": 1, "dtype": "fp32", "ep": 1}][:2 if live.EVERYTHING else 1]):
            folder = self.folder / str(number)
            folder.mkdir()
            pid = ranks.begin(2, never_ends, folder, case, seconds=900)
            try:
                end, status = time.monotonic() + 2400, {}
                while (status.get("newest"), status.get("replays", {}).get("older")) != (LAST, 0):
                    self.assertLess(time.monotonic(), end, status)
                    self.assertFalse(ranks.has_ended(pid), "the trainer has ended")
                    time.sleep(0.05)
                    if (folder / "agent").exists():
                        with Connection((folder / "agent").read_text()) as agent:
                            status = agent.status()
            finally:
                ranks.kill_group(pid)
                os.waitpid(pid, 0)
            self.assertEqual(status["replays"]["refused"], [])
            (folder / "store/logs").rename(folder / "logs")
            found = ranks.run(2, from_memory, folder, case)
            restored = found["restored"]
            experts = [one for one in restored["modules"] if one["expert"]]
            self.assertEqual((restored["iteration"], {one["version"] for one in experts}, found["wrong"]), (LAST, {LAST}, []))
            self.assertEqual((restored["replay"]["modules"], restored["replay"]["in_memory"]), (0, len(experts) - 2))
            self.assertEqual({one["source"] for one in experts}, {"memory"})
            self.assertEqual(min(one["replayed_in_memory"]["from"] for one in experts if "replayed_in_memory" in one), 1)
            self.assertEqual(sum(restored["loss"]["lost"]), 0)
            self.assertEqual(found["losses"], ranks.run(2, uninterrupted, folder / "whole", case, LAST)[-2:])

    def test_refused(self):
        found = ranks.run(1, refused, self.folder)
        for what, code, *words in [("sgd", 0), ("nadam", 9, "NAdam"), ("amsgrad", 0), ("foreach", 9, "foreach"),
                                   ("fused", 9, "fused"), ("a rate that is a tensor", 9, "Tensor"), ("bfloat16", 9, "bfloat16")]:
            with self.subTest(what):
                self.assertEqual(found[what][0], code, found[what])
                for word in words:
                    self.assertIn(word, found[what][1])

    def test_fsdp2(self):
        case = CASE | {"dtype": "fp32", "ep": 1, "buffers": False}
        ranks.run(2, train, self.folder, case, 1, {})
        checkpoints, address = self.folder / "ckpt", f"unix:{self.folder}/agent.sock"
        checkpoints.mkdir()
        agent = subprocess.Popen([BIN / "pec-save", "agent", checkpoints, self.folder / "store", "--listen", address, "-q"])
        try:
            while not pathlib.Path(address.removeprefix("unix:")).exists():
                self.assertIsNone(agent.poll(), "the agent has ended")
                time.sleep(0.02)
            found = ranks.run(4 if live.EVERYTHING else 2, in_fsdp2, self.folder, case, address, 3)
            self.ucp.run("pec-save", "tell", address, "stop")
        finally:
            agent.kill()
            agent.wait()
        self.assertEqual((found["start"], found["end"], found["recovery"]), (LAST, LAST + 3, 1))
        self.ucp.run("pec-save", "check", self.folder / "store", "-q")
        log = gradient_log.read(self.folder / "store/logs")
        state, want = (self.tensors(self.folder, f"_fsdp2_{found[at]}") for at in ("start", "end"))
        modules = {module for module, iteration in log if iteration > LAST}
        self.assertEqual(len(modules), 16)
        for module in modules:
            for name, tensor in gradient_log.replayed(log, module, state, LAST, LAST + 3, 1, torch.float32).items():
                if not name.endswith("/step"):
                    self.assertTrue(gradient_log.same_bits(tensor, want[name]), name)
                    self.assertFalse(gradient_log.same_bits(tensor, state[name]), f"{name} has not moved")
        segment = self.folder / "store/logs/0-1.swg"
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        self.assertIn("0-1.swg", self.ucp.run("pec-save", "check", self.folder / "store", expect=5))

    def test_killed(self):
        # Between two kills it makes at most 4 steps and those of half a second, 0.1 s or more each.
        wanted = 20 if live.EVERYTHING else 2
        chance, kills, last, proved = random.Random(wanted), 0, 9 * wanted + 4, []
        while True:
            ended = self.killed_run(last, (chance.randrange(2, 5), chance.uniform(0, 0.5)) if kills < wanted else None)
            self.judge(proved)
            if ended:
                break
            kills += 1
        self.assertEqual(kills, wanted)
        self.assertEqual(self.judged_at, last)
        losses = ranks.run(2, uninterrupted, self.folder / "whole", CASE, last)
        self.restored(self.folder, CASE, 2, last, losses[-2:])
        for state in [*self.folder.glob("tensors_loaded*.pt"), self.folder / f"tensors{last}.pt"]:
            iteration = int(state.stem.removeprefix("tensors").removeprefix("_loaded"))
            if iteration > 0:
                self.assertEqual(live.differing(torch.load(state, weights_only=True),
                                                self.tensors(self.folder / "whole", iteration)), [], state)
        for era in self.folder.glob("era*.json"):
            restored = json.loads(era.read_text())["restored"]
            if restored["iteration"] is not None:
                self.assertEqual(sum(restored["loss"]["lost"]), 0)
        print(f"killed {kills} times; (iteration, longest chain) proved: {proved}", flush=True)

    def killed_run(self, last, kill_after):
        """True if it has come to its end."""
        pid = ranks.begin(2, killed, self.folder, CASE, last, 0.1, seconds=1200)
        return ranks.ends_or_is_killed(pid, self.progress, kill_after)

    def progress(self):
        path = self.folder / "progress"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def judge(self, proved):
        """After a kill: what the store would restore now is what the trainer had, by the log of this era alone."""
        eras = sorted(self.folder.glob("era*.json"))
        if not eras:
            return
        era = json.loads(eras[-1].read_text())
        if live_agent(era["agent"]):  # its memory into the store, as a restore begins
            self.ucp.run("pec-save", "tell", era["agent"], "flush")
        if not (self.folder / "store/store.json").exists():
            return
        back = ranks.run(2, resume, self.folder, CASE)
        self.judged_at = back["iteration"]
        self.assertEqual(back["wrong"], [])
        if back["iteration"] > era["start"]:
            start = era["start"] if era["restored"]["iteration"] is not None else None
            longest = self.prove(self.folder, CASE, back["iteration"], back["versions"], era["recovery"], start)
            proved.append((back["iteration"], longest))


def live_agent(address):
    from shardwright._errors import Error
    try:
        live.agent_pid(address)
        return True
    except Error:
        return False


if __name__ == "__main__":
    Lossless.ucp = live.start()
    BIN = Lossless.ucp.folder
    unittest.main(verbosity=2)
