# SPDX-License-Identifier: Apache-2.0
"""PartialCheckpoints out of running DeepSpeed engines: the resulting store has bit for bit the tensors that the trainer
had in memory, each expert in the version that the store records; faults of agents and of callers.

    partial_test.py BIN PACKAGE
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time
import unittest
import warnings
from unittest import mock

import live  # first: it makes the modules of the other tests importable
import ranks
import torch
import torch.distributed as dist
from model import complete, make_engine, train_step
from tensors import logical_tensors
from train import differences

# Experts with tensors that are larger than the data that comes with the header of a file.
CASE = {"zero": 2, "dtype": "bf16", "experts": 4, "ep": 2, "width": 64, "layers": 2}
LAST = 5
BIN = None


def partial(engine, folder, **options):
    import shardwright
    return shardwright.PartialCheckpoints(engine, folder / "store", **{"command": str(BIN / "pec-save"), "k": 1} | options)


def train(folder, case, every):
    """Collective. Snapshots; what the trainer had at each is kept. What step() returned, and how many bytes were copied."""
    case = complete(case)
    engine = make_engine(case)
    pec = partial(engine, folder, every=every)
    taken, handed = [], []
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        taken.append(pec.step(client_state={"note": f"of {iteration}"}))
        live.keep(engine, case, folder, iteration)
        handed.append(pec.handed_bytes)
    return {"taken": taken, "handed": handed, "stored": pec.close(), "left": os.path.exists(pec._folder)}


def with_drift(engine):
    """The engine with a buffer that is larger than the data that comes with the header of a file."""
    engine.module.register_buffer("drift", torch.zeros(3000))
    return engine


def overlapped(folder, case, waits, fails):
    """Collective. Tensors are copied during the next step, so late that it waits for them, or would have to. Results of
    step() and close(), and warnings."""
    from shardwright import _files
    case = complete(case)
    engine = with_drift(make_engine(case))
    pec, fill, said = partial(engine, folder, overlap=True), _files.SparseFile.fill, []

    def late(self, parts):
        time.sleep(0.2)
        beside = threading.current_thread() is not threading.main_thread()
        if beside and dist.get_rank() == 1 and pec._last == fails:
            raise OSError("no memory left")
        fill(self, parts)

    _files.SparseFile.fill = late
    if not waits:
        pec._hook.remove()
    for iteration in range(1, LAST + 1):
        engine.module.drift.add_(1)  # as a forward pass does
        train_step(engine, case, iteration)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = pec.step(client_state={"note": f"of {iteration}"})
        said.append((taken, [str(one.message) for one in caught if "snapshot" in str(one.message)]))
        live.keep(engine, case, folder, iteration)
    engine.module.drift.add_(1)
    return said + [pec.close(), sorted(os.listdir(pec._folder)) if os.path.exists(pec._folder) else []]


def resume(folder, case, note, drift=False):
    """Collective. The differences from the expected store; one step more."""
    import shardwright
    case = complete(case)
    engine = make_engine(case | {"seed": 99})
    if drift:
        with_drift(engine)
    loaded = shardwright.load(engine, folder / "store", threads=1, read_only=True)
    wrong = differences(logical_tensors(engine, case), live.kept(folder, loaded.restored), case, False)
    wrong += [] if loaded.client_state == {"note": note} else [f"client state: {loaded.client_state}"]
    train_step(engine, case, int(loaded) + 1)
    return {"wrong": wrong, "iteration": int(loaded), "versions": loaded.restored["versions"]}


def agent_dies(folder, case):
    """Collective. The agent is killed while tensors are copied, and once between snapshots: results of step(),
    warnings."""
    from shardwright import _files
    case = complete(case)
    engine = make_engine(case)
    pec, fill, dies = partial(engine, folder), _files.SparseFile.fill, []

    def fill_and_kill(self, parts):
        fill(self, parts)
        if dies:
            live.kill(dies.pop())

    _files.SparseFile.fill = fill_and_kill
    said = []
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        if dist.get_rank() == 0 and iteration == 3:
            dies.append(live.agent_pid(pec.agent))
        if dist.get_rank() == 0 and iteration == 5:
            pec._wait()
            live.kill(live.agent_pid(pec.agent))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = pec.step(client_state={"note": f"of {iteration}"})
        said.append((taken, [str(one.message) for one in caught if "snapshot" in str(one.message)]))
        live.keep(engine, case, folder, iteration)
    return said + [pec.close()]


def failure(work):
    """Collective. (code, message) that each rank raises."""
    import shardwright
    said = (0, "nothing was raised")
    try:
        work()
    except shardwright.Error as error:
        said = (error.code, str(error))
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def last_one_fails(folder):
    """Collective. The third snapshot fails: results of step() for each, the error of close(), and the first state of
    the store."""
    from shardwright import _files
    case = complete(CASE | {"width": 16})
    engine, fill, said = make_engine(case), _files.SparseFile.fill, []
    pec = partial(engine, folder)
    made = sorted(os.listdir(folder / "store"))

    def no_memory(self, parts):
        raise OSError("no memory left")

    for iteration in range(1, 4):
        train_step(engine, case, iteration)
        _files.SparseFile.fill = no_memory if iteration == 3 and dist.get_rank() == 1 else fill
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            taken = pec.step()
        said.append((bool(taken), taken.iteration, taken.where, taken.stored))
        if dist.get_rank() == 0:
            pec._wait()
            with pec._connect(pec.agent) as agent:
                agent.send("flush")
                agent.answer()
    return said, failure(pec.close), made


def one_rank_steps(folder):
    """Collective. Rank 0 alone calls step(): what it raises."""
    case, group = complete(CASE | {"width": 16}), dist.new_group([0, 1])  # a wait that ends in an error breaks the group
    engine = make_engine(case)
    pec = partial(engine, folder, group=group)
    train_step(engine, case, 1)
    said = None
    if dist.get_rank() == 0:
        pec._deadline = 1
        try:
            pec.step()
        except RuntimeError as error:
            said = getattr(error, "code", None), str(error)
        pec._own.stop()
        (folder / "said").touch()
    while not (folder / "said").exists():
        time.sleep(0.01)
    pec._release()
    return said


def below_home(options):
    """Collective. Continues a run by a snapshot, with a store below the home folder: the iteration of the snapshot, and the
    newest one of the store."""
    import shardwright
    case = complete(CASE | {"width": 16})
    engine = make_engine(case)
    pec = shardwright.PartialCheckpoints(engine, "~/store", k=1, **options)
    pec.load(threads=1)
    train_step(engine, case, engine.global_steps + 1)
    taken = pec.step()
    return bool(taken), taken.iteration, pec.close()


def killed(folder):
    """Collective. A trainer that runs longer than its agent lingers and is killed with a snapshot that is only in the agent's
    memory. The address of the agent, and its last status, are in the file status.json."""
    case = complete(CASE | {"width": 16})
    engine = make_engine(case)
    pec = partial(engine, folder, flags=["--linger", "2", "--bandwidth", "100"])  # saving takes longer than the trainer runs
    for iteration in range(1, 3):
        train_step(engine, case, iteration)
        pec.step()
    if dist.get_rank() == 0:
        pec._wait()
        time.sleep(6)
        with pec._connect(pec.agent) as agent:
            (folder / "status.json").write_text(json.dumps([pec.agent, agent.status()]))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def next_one(folder):
    """Collective. Continues the run: the iteration that was loaded, and the newest one of the store."""
    engine = make_engine(complete(CASE | {"width": 16}))
    pec = partial(engine, folder)
    return int(pec.load(threads=1)), pec.close()


def misuse(folder, agent, other):
    """Collective. The errors: (name, codes and messages by rank)."""
    case, rank = complete(CASE | {"width": 16}), dist.get_rank()
    engine = make_engine(case)
    found = {"ranks ask for different k": failure(lambda: partial(engine, folder, k=1 + rank)),
             "ranks ask for different steps": failure(lambda: partial(engine, folder, every=1 + rank)),
             "nothing": failure(lambda: partial(engine, folder, every=0)),
             "more experts than a layer has": failure(lambda: partial(engine, folder, k=5)),
             "a store in no folder": failure(lambda: partial(engine, folder / "typo")),
             "a store that is a folder of something else": failure(lambda: partial(engine, folder / "a-run")),
             "no program": failure(lambda: partial(engine, folder, command="pec-save-of-nobody")),
             "wrong flags": failure(lambda: partial(engine, folder, flags=["--policy", "by-name"])),
             "no agent": failure(lambda: partial(engine, folder, agent=f"unix:{folder}/nobody")),
             "an agent at a port": failure(lambda: partial(engine, folder, agent="localhost:4711")),
             "another store": failure(lambda: partial(engine, folder / "other", agent=agent)),
             "another k": failure(lambda: partial(engine, folder, agent=agent, k=2)),
             "a folder in use": failure(lambda: partial(engine, folder, agent=other))}
    pec = partial(engine, folder, agent=agent)
    train_step(engine, case, 1)
    found["tokens of another model"] = failure(lambda: pec.step([[1, 2, 3]]))
    train_step(engine, case, 2)
    found["taken all the same"] = [pec.step(), pec.close()]
    changed = complete(CASE | {"width": 24})
    wider = make_engine(changed)
    pec = partial(wider, folder, agent=agent, every=3)
    for iteration in range(1, 3):
        train_step(wider, changed, iteration)
        pec.step()
    train_step(wider, changed, 3)
    found["a shape that changed"] = failure(pec.step)
    plain = make_engine(complete({"zero": 2}))
    found["no experts"] = failure(lambda: partial(plain, folder))
    third = make_engine(complete({"zero": 3}))
    found["stage 3"] = failure(lambda: partial(third, folder))
    return found


class Partial(live.InFolder):
    def test_bit_for_bit(self):
        for number, (case, world, every, other, others) in enumerate([
                ({}, 2, 1, {"ep": 1, "zero": 1}, 2),
                ({"zero": 1, "dtype": "fp32", "width": 48}, 4, 1, {"ep": 4}, 4),
                ({"zero": 1, "grad_accum": "fp32", "ep": 1}, 2, 2, None, 2)]):
            with self.subTest(**case, ranks=world, every=every):
                folder = self.folder / str(number)
                folder.mkdir()
                found = ranks.run(world, train, folder, CASE | case, every)
                due = [iteration % every == 0 for iteration in range(1, LAST + 1)]
                self.assertEqual(found["taken"], [True if one else None for one in due])
                last = max(iteration for iteration, one in enumerate(due, 1) if one)
                self.assertEqual((found["stored"], found["left"]), (last, False))
                first, *_, newest = [handed for handed, one in zip(found["handed"], due) if one]
                self.assertLess(newest, 0.8 * first, "a later snapshot copies one expert of four")
                self.ucp.run("pec-save", "check", folder / "store")
                for layout, into in [(case, world), *([(case | other, others)] if other else [])]:
                    back = ranks.run(into, resume, folder, CASE | layout, f"of {last}")
                    self.assertEqual((back["wrong"], back["iteration"]), ([], last))
                    self.assertGreater(len(set(back["versions"].values())), 1, "all experts are of one version")

    def overlap(self, case, waits=True, fails=0):
        """One run; the differences of a restore from it, and the messages."""
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        *said, stored, left = ranks.run(2, overlapped, folder, CASE | case, waits, fails)
        self.assertEqual((stored, left), (LAST, []))
        self.ucp.run("pec-save", "check", folder / "store")
        back = ranks.run(2, resume, folder, CASE | case, f"of {LAST}", True)
        self.assertEqual(back["iteration"], LAST)
        return back["wrong"], said

    def test_overlap(self):
        for case in ({}, {"zero": 1, "dtype": "fp32"}):
            with self.subTest(**case):
                self.assertEqual(self.overlap(case), ([], [[True, []]] * LAST))
        with self.subTest("nothing waits"):
            self.assertNotEqual(self.overlap({}, waits=False)[0], [], "the test would not see it")
        with self.subTest("a rank that fails"):
            wrong, said = self.overlap({}, fails=3)
            self.assertEqual((wrong, [taken for taken, _ in said]), ([], [True] * LAST))
            self.assertEqual([len(warned) for _, warned in said], [0, 0, 0, 1, 0])
            self.assertIn("rank 1: no memory left", said[3][1][0])

    def agent(self, name, *flags):
        """An agent of the test's own; its address."""
        (self.folder / name).mkdir()
        address = f"unix:{self.folder / name}.sock"
        process = subprocess.Popen([self.ucp.folder / "pec-save", "agent", self.folder / name, self.folder / "store", "--listen",
                                    address, "-q", *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        while not pathlib.Path(address.removeprefix("unix:")).exists():
            self.assertIsNone(process.poll(), "the agent has ended")
        return address

    def test_refused(self):
        agent, other = self.agent("a", "--tokens", self.folder / "tokens.jsonl"), self.agent("b")
        (self.folder / "b/latest").write_text("global_step1")
        (self.folder / "a-run/store").mkdir(parents=True)
        (self.folder / "a-run/store/latest").write_text("global_step1")
        found = ranks.run(2, misuse, self.folder, agent, other)
        self.assertEqual(found.pop("taken all the same"), [True, 2])
        for what, code, *words in [
                ("ranks ask for different k", 2, "k: rank 0 passes 1, rank 1 passes 2"),
                ("ranks ask for different steps", 2, "every: rank 0 passes 1, rank 1 passes 2"),
                ("nothing", 2, "every=0"), ("more experts than a layer has", 2, "k=5", "4 experts"),
                ("a store in no folder", 3, "typo"),
                ("a store that is a folder of something else", 6, "a-run/store", 'not a store: it contains "latest"'),
                ("no program", 3, "the program does not exist"), ("wrong flags", 2, "by-name"),
                ("no agent", 3, "cannot connect"), ("an agent at a port", 9, "socket file expected"),
                ("another store", 5, "saves into", "other"), ("another k", 5, "saves 1 experts", "k=2"),
                ("a folder in use", 2, "contains other checkpoints"), ("tokens of another model", 2, "(3,)", "(4, 4)"),
                ("a shape that changed", 5, "another model", "fingerprint"), ("no experts", 9, "no DeepSpeed MoE layers"),
                ("stage 3", 9, "stage 3")]:
            with self.subTest(what):
                answers = found.pop(what)
                self.assertEqual([answer[0] for answer in answers], [code, code], answers)
                for word in words:
                    self.assertIn(word, answers[0][1])
        self.assertEqual(found, {})
        self.assertEqual([path.name for path in self.folder.glob("shardwright-*")], [], "folders of agents that did not start")

    def test_a_last_snapshot_that_is_missing(self):
        said, closed, made = ranks.run(2, last_one_fails, self.folder)
        self.assertEqual(said, [[True, 1, "memory", None], [True, 2, "memory", 1], [False, 3, "nowhere", 2]])
        self.assertEqual([code for code, _ in closed], [7, 7], closed)
        self.assertIn("the last snapshot, of iteration 3, is not in the store, which ends with iteration 2", closed[0][1])
        self.assertEqual(made, ["begun.json"])
        self.assertEqual([path.name for path in self.folder.glob("shardwright-*")], [], "the agent has ended")

    def test_a_rank_alone(self):
        code, message = ranks.run(2, one_rank_steps, self.folder)
        self.assertEqual(code, 2, message)
        self.assertIn("PartialCheckpoints.step: rank 0 has waited 1 s, and rank 1 has not called it: all ranks", message)

    def test_paths_below_the_home_folder(self):
        (self.folder / "bin").symlink_to(BIN)
        with mock.patch.dict(os.environ, HOME=str(self.folder)):
            found = ranks.run(2, below_home, {"command": "~/bin/pec-save", "tokens": "~/tokens.jsonl"})
            self.assertEqual(found, [True, 1, 1])
            agent = self.agent("a", "--tokens", self.folder / "more.jsonl")
            self.assertEqual(agent, f"unix:{self.folder}/a.sock")
            found = ranks.run(2, below_home, {"agent": "unix:~/a.sock", "checkpoints": "~/a", "tokens": "~/more.jsonl"})
            self.assertEqual(found, [True, 2, 2])
        for name, iteration in (("tokens.jsonl", 1), ("more.jsonl", 2)):
            lines = (self.folder / name).read_text(encoding="utf-8").splitlines()
            self.assertEqual([json.loads(line)["iteration"] for line in lines], [iteration])
        self.ucp.run("pec-save", "check", self.folder / "store")

    def test_an_agent_ends_after_a_trainer_that_was_killed(self):
        with self.assertRaisesRegex(RuntimeError, "ended with -9"):
            ranks.run(2, killed, self.folder)
        address, status = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
        self.addCleanup(shutil.rmtree, status["checkpoints"], ignore_errors=True)
        self.assertEqual((status["newest"], status["persisted"] == 2), (2, False), "the snapshot was to be in memory alone")
        runtime, end = pathlib.Path(address.removeprefix("unix:")).parent, time.monotonic() + 600
        while (runtime / "agent.sock").exists():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status["pid"], signal.SIGKILL)
                self.fail("the agent has not ended")
            time.sleep(0.1)
        self.assertIn("no trainer has run for 2 s", (runtime / "agent.log").read_text(encoding="utf-8"))
        self.assertIn("iteration 2", self.ucp.run("pec-restore", self.folder / "store", self.folder / "out", "--dry-run"))
        # The next trainer finds the folders of this one, and removes them at its end.
        self.assertTrue(os.path.isdir(status["checkpoints"]))
        self.assertEqual(ranks.run(2, next_one, self.folder), [2, 2])
        self.assertEqual([path for path in (runtime, pathlib.Path(status["checkpoints"])) if path.exists()], [])

    def test_an_agent_that_is_killed(self):
        *said, stored = ranks.run(2, agent_dies, self.folder, CASE)
        self.assertEqual([taken for taken, _ in said], [True, True, False, True, True])
        self.assertEqual([len(warned) for _, warned in said], [0, 0, 1, 0, 0], said)
        self.assertIn("no snapshot of iteration 3", said[2][1][0])
        self.assertEqual(stored, LAST)
        back = ranks.run(2, resume, self.folder, CASE, f"of {LAST}")
        self.assertEqual((back["wrong"], back["iteration"]), ([], LAST))


if __name__ == "__main__":
    Partial.ucp = live.start()
    BIN = Partial.ucp.folder
    unittest.main(verbosity=2)
