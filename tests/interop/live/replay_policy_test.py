# SPDX-License-Identifier: Apache-2.0
"""Policy gradient-log in a running trainer: an agent that decides, for each expert and interval, between its state and its
gradients, and a forecast of that.

    replay_policy_test.py BIN PACKAGE

DeepSpeed on two ranks. Every checkpoint of the run is restored under --replay require and compared, bit for bit, with
the trainer's state then; chains are as long as --full-every allows; bytes are those of `pec-save simulate`.
"""

import json
import time
import unittest
import warnings

import live  # first: it makes the modules of the other tests importable
import gradient_log
import ranks
import torch
import torch.distributed as dist
from model import complete, make_engine, train_step
from tensors import logical_tensors
from train import differences

CASE = {"zero": 2, "dtype": "bf16", "experts": 8, "ep": 2, "width": 32, "layers": 2}
LAST = 12
BIN = None


def partial(engine, folder, **options):
    import shardwright
    return shardwright.PartialCheckpoints(engine, folder / "store", command=str(BIN / "pec-save"), **options)


def until_persisted(address, iteration):
    """Rank 0: a snapshot that the next one overtakes is discarded, and forecasts do not include that."""
    from shardwright._agent import Connection
    end = time.monotonic() + 600
    while True:
        with Connection(address) as agent:
            status = agent.status()
        if status["persisted"] == iteration:
            return status["logs"]
        if time.monotonic() > end:
            raise AssertionError(f"iteration {iteration} is not persisted: {status}")
        time.sleep(0.01)


def train(folder, every, k, flags, wait):
    """Collective. What the trainer had at each iteration is kept; the agent's numbers."""
    case = complete(CASE)
    engine = make_engine(case)
    pec = partial(engine, folder, k=k, every=every, lossless=True, flags=["--policy", "gradient-log", *flags])
    logs = []
    for iteration in range(1, LAST + 1):
        train_step(engine, case, iteration)
        live.keep(engine, case, folder, iteration)
        taken = pec.step()
        if wait and taken and dist.get_rank() == 0:
            pec._wait()
            logs.append(until_persisted(pec.agent, iteration))
        dist.barrier()
    return {"stored": pec.close(), "logs": logs}


def resumed(folder, sources):
    """Collective. By iteration, what differs in a restored checkpoint from the trainer at that iteration."""
    import shardwright
    case = complete(CASE)
    engine = make_engine(case | {"seed": 99})
    wrong = {}
    for iteration, source in sources.items():
        shardwright.load(engine, source, threads=1)
        want = torch.load(folder / f"tensors{iteration}.pt", weights_only=True)
        wrong[iteration] = differences(logical_tensors(engine, case), want, case, False)
    return wrong


def agent_dies(folder, every):
    """Collective. The agent is killed between two snapshots; warnings of each step."""
    case = complete(CASE)
    engine = make_engine(case)
    pec = partial(engine, folder, k=1, every=every, lossless=True, flags=["--policy", "gradient-log"])
    said = []
    for iteration in range(1, LAST + 1):
        if iteration == 6 and dist.get_rank() == 0:
            pec._wait()
            until_persisted(pec.agent, 4)
            live.kill(live.agent_pid(pec.agent))
        dist.barrier()
        train_step(engine, case, iteration)
        live.keep(engine, case, folder, iteration)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if pec.step() and dist.get_rank() == 0:
                pec._wait()
                until_persisted(pec.agent, iteration)
        dist.barrier()
        said.append([str(one.message) for one in caught if "gradient log" in str(one.message)])
    return said + [pec.close()]


def without_gradients(folder):
    """Collective. (code, message)"""
    import shardwright
    engine = make_engine(complete(CASE | {"ep": 1}))
    try:
        partial(engine, folder, flags=["--policy", "gradient-log"])
    except shardwright.Error as error:
        return error.code, str(error)
    return 0, "nothing was raised"


class PolicyReplay(live.InFolder):
    def result(self, *words):
        report = self.folder / "report.json"
        self.ucp.run(*words, f"--json={report}")
        return json.loads(report.read_text())["result"]

    def checkpoints(self):
        return self.result("pec-save", "list", self.folder / "store")["checkpoints"]

    def state_bytes(self):
        """For each checkpoint its state of its own iteration, except tensors that are copied unchanged."""
        sums = []
        for path in sorted((self.folder / "store/manifests").glob("*.json")):
            manifest = json.loads(path.read_text())
            sums.append(sum(held[2] for module in manifest["modules"] for key, held in module.items()
                            if key != "module" and held and held[0] == manifest["iteration"]))
        return sums

    def logged(self):
        """Bytes of gradients in the log, by iteration."""
        sums = {}
        for (_, iteration), records in gradient_log.read(self.folder / "store/logs").items():
            count = sum(piece["bytes"] for record, _ in records for piece in record["pieces"])
            sums[iteration] = sums.get(iteration, 0) + count
        return sums

    def prove(self, iterations, most):
        """Restores each checkpoint; the longest chain of each."""
        self.ucp.run("pec-save", "check", self.folder / "store", "-q")
        sources, longest = {}, []
        for iteration in iterations:
            sources[iteration] = self.folder / f"at{iteration}"
            found = self.result("pec-restore", self.folder / "store", sources[iteration], "--replay", "require", "--read-only",
                                "--at", iteration)
            self.assertEqual(set(found["versions"].values()), {iteration})
            chains = [one["replayed"]["iterations"] for one in found["modules"] if "replayed" in one]
            longest.append(max(chains, default=0))
            self.assertLessEqual(longest[-1], most)
        self.assertEqual(ranks.run(2, resumed, self.folder, sources), {str(iteration): [] for iteration in iterations})
        return longest

    def forecast(self, every, *words):
        (self.folder / "faults.txt").write_text("")
        rows = self.result("pec-save", "simulate", self.folder / "store.tokens.jsonl", self.folder / "store", "--policy", "gradient-log",
                           "--interval", every, "--faults", self.folder / "faults.txt", "--dp", 2, "--ep", 2, *words)["rows"]
        self.assertEqual(len(rows), 1)
        return rows[0]

    def compare(self, found, every, *words):
        """The bytes that the run has written, with the forecast: gradients, and states of all checkpoints."""
        row = self.forecast(every, *words)
        self.assertEqual(sum(self.logged().values()), row["log"]["bytes"])
        self.assertEqual(sum(self.state_bytes()), row["bytes"])
        tensors = torch.load(self.folder / f"tensors{LAST}.pt", weights_only=True)
        elems = sum(tensor.numel() for name, tensor in tensors.items() if "deepspeed_experts" in name and name.endswith("/fp32"))
        last = found["logs"][-1]
        self.assertEqual((last["held_bytes"], last["dropped_bytes"]), (0, 4 * elems * (LAST - every) - row["log"]["bytes"]))
        return row

    def test_chains_are_bounded(self):
        every, full_every = 2, 6
        found = ranks.run(2, train, self.folder, every, 1, ["--full-every", str(full_every)], True)
        self.assertEqual(found["stored"], LAST)
        iterations = list(range(every, LAST + 1, every))
        self.assertEqual([one["iteration"] for one in self.checkpoints()], iterations)
        self.assertEqual(self.prove(iterations, full_every), [0, 2, 4, 6, 6, 6])
        self.compare(found, every, "--k", 1, "--full-every", full_every)

    def test_a_budget_of_an_iteration(self):
        """First one that buys no state, for 12 bytes of gradients of an element are fewer than 14 of its state; then 8 for two
        checkpoints, of 16 experts."""
        every = 3
        found = ranks.run(2, train, self.folder, every, 1, ["--budget", "1B"], True)
        self.assertEqual(found["stored"], LAST)
        row = self.compare(found, every, "--budget", "1B")
        interval = (row["bytes"] - self.state_bytes()[0] + row["log"]["bytes"]) / (LAST // every - 1)
        elems = row["log"]["bytes"] // (4 * (LAST - every))  # of all experts
        budget = int(interval + elems * (14 - 12) / 4 + every) // every
        self.folder = self.folder / "within"
        self.folder.mkdir()
        found = ranks.run(2, train, self.folder, every, 1, ["--budget", f"{budget}B"], True)
        row = self.compare(found, every, "--budget", f"{budget}B")
        self.assertEqual(row["log"]["bytes"], 9 * elems * 4 * 3 // 4)
        self.assertEqual(self.prove(range(every, LAST + 1, every), 500), [0, 3, 6, 9])

    def test_snapshots_that_are_given_up(self):
        """Training does not wait: which snapshots are persisted is not known, and everything holds all the same."""
        found = ranks.run(2, train, self.folder, 1, 1, [], False)
        self.assertEqual(found["stored"], LAST)
        self.prove([one["iteration"] for one in self.checkpoints()], LAST)

    def test_an_agent_that_is_killed(self):
        *said, stored = ranks.run(2, agent_dies, self.folder, 2)
        self.assertEqual(stored, LAST)
        self.assertEqual([len(one) for one in said], [0] * 5 + [1] + [0] * (LAST - 6), said)
        # The gradients of iteration 6 are missing: its checkpoint has every expert.
        stored = {one["iteration"]: one["modules"] for one in self.checkpoints()}
        self.assertEqual(set(stored[6].values()), {6})
        self.assertEqual(len(set(stored[8].values())), 2)
        self.prove(range(2, LAST + 1, 2), 500)

    def test_refused(self):
        code, message = ranks.run(1, without_gradients, self.folder)
        self.assertEqual(code, 2, message)
        self.assertIn("--policy gradient-log requires the gradients of every step; pass lossless=True", message)


if __name__ == "__main__":
    PolicyReplay.ucp = live.start()
    BIN = PolicyReplay.ucp.folder
    unittest.main(verbosity=2)
