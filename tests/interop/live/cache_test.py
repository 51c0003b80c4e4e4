# SPDX-License-Identifier: Apache-2.0
"""Trainers are filled from a shared-memory cache, in its layout and in others, bit for bit, and the run continues; a
trainer that was killed comes back; the death of a cache is reported.

    cache_test.py BIN PACKAGE MPIRUN [--all]

With --all into more layouts.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import unittest

import live  # first: it makes the modules of the other tests importable
import hops
import plain_test
import ranks
import torch
import torch.distributed as dist
import train

SECONDS = 1200
# Case and ranks of the checkpoint, target of the load, its processes, and engines that take it: what differs in their
# case, and their ranks. The first of them has the layout of the target, but for tensor parallelism, which is not loaded.
CASES = [
    ({"zero": 1}, 2, "zero=1,dp=2", 2, [({}, 2), ({"zero": 2}, 4), ({"zero": 3}, 2)]),
    ({"zero": 2, "dtype": "bf16", "groups": 3}, 2, "zero=2,dp=4", 0, [({}, 4), ({"zero": 3}, 2)]),
    ({"zero": 3, "groups": 1, "frozen": True}, 2, "zero=3,dp=2", 2, [({}, 2), ({"zero": 2}, 4)]),
    ({"zero": 2, "groups": 1, "frozen": True, "tied": True}, 2, "zero=1,dp=4", 2, [({"zero": 1}, 4), ({"zero": 3}, 2)]),
    ({"zero": 1, "experts": 4, "ep": 2}, 2, "zero=1,dp=4,ep=4", 4, [({"ep": 4}, 4), ({"zero": 2, "ep": 1}, 2)]),
    ({"zero": 1, "tp": 2, "groups": 1}, 2, "zero=1,dp=1,tp=2", 2, [({"tp": 1, "zero": 2}, 2)]),
]


def interrupted(address, case):
    """Collective. Attaches, and is killed before it is done."""
    import shardwright
    from model import complete, make_engine
    engine = make_engine(complete(case))
    if dist.get_rank() == 0:
        # The other ranks reach the load, and wait for this one.
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    shardwright.load(engine, address, threads=1)


def refused(address, wait):
    """Collective. The codes and messages of all ranks."""
    import shardwright
    model = torch.nn.Linear(2, 2)
    said = (0, "it was loaded")
    try:
        shardwright.load(model, address, wait=wait, threads=1)
    except shardwright.Error as error:
        said = (error.code, str(error))
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, said)
    return answers


class FromCache(live.InFolder):
    ucp = mpirun = None

    def setUp(self):
        super().setUp()
        self.address = f"unix:{self.folder}/s"

    @contextlib.contextmanager
    def load(self, source, target, processes=0, *flags):
        """A shared-memory cache; without processes one that no launcher has started."""
        launcher = [self.mpirun, "--oversubscribe", "-n", str(processes)] if processes else []
        serve = subprocess.Popen(
            [*launcher, self.ucp.folder / "ucp-load", "serve", source, self.address, "--target", target, "--threads", "1",
             *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
        try:
            yield serve
            self.ucp.run("ucp-load", "stop", self.address)
            said, _ = serve.communicate(timeout=SECONDS)
            self.assertEqual(serve.returncode, 0, said)
        finally:
            if serve.poll() is None:
                serve.kill()
            serve.communicate()

    def test_engines_of_deepspeed(self):
        for number, (case, world, target, processes, engines) in enumerate(CASES):
            folder = self.folder / f"{len(list(self.folder.iterdir()))}"
            train.make_case(folder, case, world)
            with self.load(folder / "ckpt", target, processes):
                for more, count in engines if live.EVERYTHING else [engines[number % len(engines)]]:
                    with self.subTest(**case, target=target, to=more, ranks=count):
                        # The trainer may be there first: what it waits for is the load.
                        found = train.resume_case(self.address, case | more, count, folder, load_it=live.into_engine)
                        self.assertEqual(found["wrong"], [])
                        print(f"{case} as {target} into {more} on {count}: {found['tensors']} tensors equal, losses off by "
                              f"{found['loss_off']:.2g}")

    def test_fsdp2_and_others(self):
        ranks.run(2, hops.in_fsdp2, "llama", None, self.folder / "fsdp2", (0, plain_test.STEPS))
        layouts = [("fsdp2", 4), ("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("single", 1)]
        for layout, count in layouts if live.EVERYTHING else layouts[:2]:
            states = {name: self.folder / f"{layout}{count}-{name}.pt" for name in ("own", "cache")}
            want = ranks.run(count, plain_test.go_on, layout, "llama", self.folder / "fsdp2", True, states["own"])
            for processes, target in ((2, "dp_shard=2"), (4, "dp_shard=4")):
                with self.subTest(layout, ranks=count, target=target), \
                        self.load(self.folder / "fsdp2", target, processes, "--format", "dcp"):
                    got = ranks.run(count, plain_test.go_on, layout, "llama", self.address, False, states["cache"])
                    one, other = (torch.load(states[name], weights_only=True) for name in ("cache", "own"))
                    self.assertEqual(live.differing(one, other), [])
                    self.assertEqual(got["losses"], want["losses"])
                    self.assertEqual(got["rates"], [hops.RATE] * 2)
                    self.assertEqual((got["said"]["step"], got["said"]["lists"]), (plain_test.STEPS, []))
                    print(f"{target} into {layout} on {count}: {len(one)} tensors and {plain_test.STEPS} losses equal, "
                          f"{got['said']['filled']} bytes filled")

    def test_a_trainer_that_is_killed_comes_back(self):
        case, folder = {"zero": 2}, self.folder / "made"
        train.make_case(folder, case, 2)
        with self.load(folder / "ckpt", "zero=2,dp=2", 2):
            with self.assertRaisesRegex(RuntimeError, "ended with -9"):
                ranks.run(2, interrupted, self.address, case)
            found = train.resume_case(self.address, case, 2, folder, load_it=live.into_engine)
            self.assertEqual(found["wrong"], [])
            self.assertIn("0 ranks attached now", self.ucp.run("ucp-load", "status", self.address))

    def test_nobody_waits_for_ever(self):
        for code, text in ranks.run(2, refused, self.address, 1.0):
            self.assertEqual((code, self.address in text), (3, True), text)
        for code, text in ranks.run(2, refused, "unix:", 1.0):
            self.assertEqual((code, "a path is needed" in text), (2, True), text)
        train.make_case(self.folder / "made", {"zero": 1}, 2)
        with self.load(self.folder / "made/ckpt", "zero=1,dp=2"):
            for code, text in ranks.run(2, refused, self.address, 60.0):
                self.assertEqual((code, "strict: nothing was loaded" in text), (5, True), text)


if __name__ == "__main__":
    FromCache.ucp, FromCache.mpirun = live.start(), sys.argv.pop(1)
    unittest.main(verbosity=2)
