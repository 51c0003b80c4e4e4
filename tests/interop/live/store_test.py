# SPDX-License-Identifier: Apache-2.0
"""Stores of partial checkpoints are loaded straight into engines: every tensor bit for bit in the version that the store
has of its module, counters and hyper-parameters, and the store records the iteration at which training resumes.

    store_test.py BIN PACKAGE
"""

import hashlib
import json
import shutil
import unittest

import live  # first: it makes the modules of the other tests importable
import commands
import ranks
import torch
import torch.distributed as dist
from model import complete, make_engine, make_model, train_step
from tensors import logical_tensors
from train import counters, differences

CASE = {"zero": 2, "dtype": "bf16", "experts": 4, "ep": 2}
LAST = 4


def series(folder, case):
    """Collective. Trains, saves a checkpoint after every step, and keeps what the trainer had in memory."""
    case = complete(case)
    engine = make_engine(case)
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        engine.save_checkpoint(folder / f"ckpt{iteration}")
        live.keep(engine, case, folder, iteration)


def load(store, case, folder, options):
    """Collective. The differences from the expected store; with the report of the load."""
    import shardwright
    case = complete(case)
    engine = make_engine(case | {"seed": 99})
    loaded = shardwright.load(engine, store, threads=1, **options)
    if not loaded and loaded.restored["iteration"] is None:
        return {"wrong": [], "restored": loaded.restored, "steps": engine.global_steps}
    wrong = differences(logical_tensors(engine, case), live.kept(folder, loaded.restored), case, False)
    counted, want = counters(engine, case), json.loads((folder / f"counters{int(loaded)}.json").read_text())
    wrong += [f"{key}: {counted[key]} for {want[key]}" for key in want if counted.get(key) != want[key]]
    train_step(engine, case, int(loaded) + 1)
    return {"wrong": wrong, "restored": loaded.restored, "steps": engine.global_steps - 1}


def load_weights(store, folder, options):
    """Collective. Loads weights alone into a model without an engine: names of weights that differ from the expected ones, and
    the reports of the load."""
    import shardwright
    model = make_model(complete(CASE | {"dtype": "fp32", "ep": 1, "seed": 99}))
    loaded = shardwright.load(model, store, threads=1, **options)
    want = live.kept(folder, loaded.restored)
    wrong = [name for name, weight in model.named_parameters() if not torch.equal(weight, want[f"{name}/fp32"])]
    return {"wrong": wrong, "steps": int(loaded), "restored": loaded.restored}


def refuse(loads):
    """Collective. Of each load, which must fail, (code, message) by rank; nothing may be touched."""
    import shardwright
    engine = make_engine(complete(CASE))
    before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    answers = []
    for store, options in loads:
        said = (0, "it was loaded")
        try:
            shardwright.load(engine, store, threads=1, **options)
        except shardwright.Error as error:
            said = (error.code, str(error))
        if any(not torch.equal(weight, before[name]) for name, weight in engine.module.named_parameters()):
            said = (0, "tensors were touched")
        answers.append([None] * dist.get_world_size())
        dist.all_gather_object(answers[-1], said)
    return answers


def tree(folder):
    """The type, mode, time of change, and content of each file and folder, by name."""
    return {str(path.relative_to(folder)): (path.stat().st_mode, path.stat().st_mtime_ns,
                                            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None)
            for path in folder.rglob("*")}


class Stores(unittest.TestCase):
    ucp = None

    @classmethod
    def setUpClass(cls):
        scratch = commands.Scratch()
        cls.addClassCleanup(scratch.close)
        cls.folder = scratch.path
        ranks.run(2, series, cls.folder, CASE)
        for iteration in range(1, LAST + 1):
            cls.ucp.run("pec-save", cls.folder / f"ckpt{iteration}", cls.folder / "store", "--k", 1)

    def store(self, name):
        """A copy that only this test changes."""
        shutil.copytree(self.folder / "store", self.folder / name)
        return self.folder / name

    def check(self, world, store, case, **options):
        found = ranks.run(world, load, store, CASE | case, self.folder, options)
        self.assertEqual(found["wrong"], [])
        return found

    def test_other_layouts(self):
        for number, (case, world) in enumerate([({}, 2), ({"zero": 1, "ep": 1, "dtype": "fp32"}, 2), ({"ep": 4}, 4)]):
            with self.subTest(**case, ranks=world):
                found = self.check(world, self.store(f"layout{number}"), case)
                self.assertEqual((found["restored"]["iteration"], found["steps"]), (LAST, LAST))
                versions = set(found["restored"]["versions"].values())
                self.assertGreater(len(versions), 1, "all experts are of one version: nothing was told apart")

    def test_the_store_is_told(self):
        store = self.store("told")
        found = self.check(2, store, {}, at=LAST - 1)
        self.assertEqual((found["restored"]["iteration"], found["restored"]["abandoned"]), (LAST - 1, [LAST]))
        self.assertEqual(self.check(2, store, {}, read_only=True)["restored"]["iteration"], LAST - 1)
        # Training has continued from there: the next save continues it.
        self.ucp.run("pec-save", self.folder / f"ckpt{LAST}", store, "--k", 1)
        self.assertEqual(self.check(2, store, {})["restored"]["iteration"], LAST)

    def test_read_only(self):
        store = self.store("looked-at")
        before = sorted(str(path) for path in store.rglob("*"))
        self.check(2, store, {}, at=1, read_only=True)
        self.assertEqual(sorted(str(path) for path in store.rglob("*")), before)
        self.assertEqual(self.check(2, store, {})["restored"]["iteration"], LAST)

    def test_weights_alone_record_nothing(self):
        store = self.store("weights")
        before = tree(store)
        for options, iteration in (({"at": LAST - 1}, LAST - 1), ({}, LAST)):
            found = ranks.run(1, load_weights, store, self.folder, options)
            self.assertEqual((found["wrong"], found["steps"], found["restored"]["iteration"]), ([], iteration, iteration))
            self.assertGreater(len(set(found["restored"]["versions"].values())), 1, "all experts are of one version")
            self.assertEqual(tree(store), before)
        found = self.check(2, store, {})
        self.assertEqual((found["restored"]["iteration"], found["restored"]["abandoned"]), (LAST, []))

    def test_the_beginning_of_a_run(self):
        store = self.folder / "new"
        found = ranks.run(2, load, store, CASE, self.folder, {"begin": True})
        self.assertEqual((found["restored"]["iteration"], found["steps"]), (None, 0))
        self.ucp.run("pec-save", self.folder / "ckpt1", store)
        self.assertEqual(self.check(2, store, {}, begin=True)["restored"]["iteration"], 1)

    def test_refused(self):
        gone = self.folder / "gone"
        expected = [
                (3, ["no such folder"], gone, {}),
                (2, ["require a store", "is not a store"], self.folder / "ckpt1", {"at": 3}),
                (9, ["TCP ports", "pec-restore"], self.folder / "store", {"agents": ["localhost:4711"]}),
                (3, ["cannot connect", "lost"], self.folder / "store", {"agents": [f"unix:{gone}"]}),
                (9, ["maps= is not supported for a store"], self.folder / "store", {"maps": ["auto"]}),
                (3, ["up to"], self.store("before-all"), {"at": 0})]
        answers = ranks.run(2, refuse, [(source, options) for *_, source, options in expected])
        for (code, words, source, options), found in zip(expected, answers):
            with self.subTest(source=source.name, **options):
                self.assertEqual({answer[0] for answer in found}, {code}, found)
                for word in words:
                    self.assertIn(word, found[0][1])


if __name__ == "__main__":
    Stores.ucp = live.start()
    unittest.main(verbosity=2)
