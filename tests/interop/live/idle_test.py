# SPDX-License-Identifier: Apache-2.0
"""Ranks report to an agent when they idle: it saves then, finds them again after it was killed, and does not wait for
ranks that have reported nothing or are gone.

    idle_test.py BIN PACKAGE
"""

import sys
import time
import unittest
import warnings

import live  # first: it makes the modules of the other tests importable
import ranks
import torch.distributed as dist
from model import complete, make_engine, train_step

CASE = {"zero": 1, "dtype": "bf16", "experts": 4, "ep": 2, "width": 64, "layers": 1}
PATIENCE = 600
BIN = None


def status_of(address):
    from shardwright._agent import Connection
    with Connection(address) as agent:
        return agent.status()


def wait_for(address, holds):
    """Of rank 0: the agent's status when that holds; the last one where it never does."""
    end = time.monotonic() + PATIENCE
    while not holds(status := status_of(address)) and time.monotonic() < end:
        time.sleep(0.02)
    return status


def everywhere(work):
    """Collective. What rank 0 found."""
    found = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def train(folder):
    """Collective. The status of the agent at each stage."""
    import shardwright
    case = complete(CASE)
    engine = make_engine(case)
    pec = shardwright.PartialCheckpoints(engine, folder / "store", command=str(BIN / "pec-save"))
    said, iteration = {}, 0

    def step():
        nonlocal iteration
        iteration += 1
        train_step(engine, case, iteration)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            return pec.step()

    def persisted(status):
        return status["persisted"] == iteration

    step()
    said["nobody marks"] = everywhere(lambda: wait_for(pec.agent, persisted))
    idle = pec.idle()
    time.sleep(16)  # a snapshot is due when half of the time between two is over, as long as the speed is unknown
    dist.barrier()
    step()
    dist.barrier()
    time.sleep(0.5)  # longer than it would take
    said["all compute"] = everywhere(lambda: status_of(pec.agent))
    if dist.get_rank() == 0:
        idle.begin()
    dist.barrier()
    time.sleep(0.5)
    said["one idles"] = everywhere(lambda: status_of(pec.agent))
    if dist.get_rank() == 1:
        with idle, pec.idle():  # nested
            pass
        idle.begin()
    dist.barrier()
    said["both idle"] = everywhere(lambda: wait_for(pec.agent, persisted))
    if dist.get_rank() == 0:
        pec._wait()
        live.kill(live.agent_pid(pec.agent))
    dist.barrier()
    step()  # a new agent, which hears of ranks that idle all the while
    dist.barrier()
    said["a new agent"] = everywhere(lambda: wait_for(pec.agent, lambda status: persisted(status) and
                                                      status["ranks_marking"] == 2))
    idle.end()
    dist.barrier()
    step()
    said["closed"] = pec.close()
    return said | {"last": iteration}


def misuse(folder):
    """Of one rank. (code, message) of each error."""
    import shardwright
    case = complete(CASE | {"ep": 1})
    engine = make_engine(case)
    pec = shardwright.PartialCheckpoints(engine, folder / "store", command=str(BIN / "pec-save"))

    def failure(work):
        try:
            work()
        except shardwright.Error as error:
            return error.code, str(error)
        return 0, ""

    found = {"end": failure(lambda: pec.idle().end()), "no agent": failure(lambda: shardwright.IdleTimes(f"unix:{folder}/nobody")),
             "a port": failure(lambda: shardwright.IdleTimes("localhost:4711")),
             "a rank": failure(lambda: shardwright.IdleTimes(pec.agent, -1))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with shardwright.IdleTimes(f"unix:{folder}/nobody", strict=False) as nobody:
            pass
    found["lenient"] = [str(one.message) for one in caught] + [nobody.check()]
    idle = shardwright.IdleTimes(pec.agent, 7)
    found["here"] = wait_for(pec.agent, lambda status: status["ranks_marking"] == 2)["ranks_marking"]
    start = time.perf_counter()
    for _ in range(10_000):
        with idle:
            pass
    found["microseconds"] = (time.perf_counter() - start) / 10_000 * 1e6
    idle.close()
    found["gone"] = wait_for(pec.agent, lambda status: status["ranks_marking"] == 1)["ranks_marking"]
    pec.close()
    found["check"] = idle.check()
    return found


class Idle(live.InFolder):
    def test_saves_while_ranks_idle(self):
        said = ranks.run(2, train, self.folder)
        first = said["nobody marks"]
        self.assertEqual((first["persisted"], first["ranks_marking"], first["sent"]["idle"]), (1, 0, 0))
        self.assertGreater(first["sent"]["any"], 0)
        for what in ("all compute", "one idles"):
            status = said[what]
            self.assertEqual((status["newest"], status["persisted"], status["ranks_marking"]), (2, 1, 2), what)
            self.assertEqual(status["sent"], first["sent"], what)
        both = said["both idle"]
        self.assertEqual(both["persisted"], 2)
        self.assertGreater(both["sent"]["idle"], 0)
        self.assertEqual([both["sent"][kind] for kind in ("any", "busy", "due")], [first["sent"]["any"], 0, 0])
        new = said["a new agent"]
        self.assertEqual((new["ranks_marking"], new["persisted"]), (2, 3))
        self.assertEqual((said["closed"], said["last"]), (4, 4))

    def test_refused(self):
        found = ranks.run(1, misuse, self.folder)
        for what, code, words in (("end", 2, "end() without begin()"), ("no agent", 3, "cannot connect"),
                                  ("a port", 9, "socket file expected"), ("a rank", 2, "rank=-1")):
            self.assertEqual(found[what][0], code, found[what])
            self.assertIn(words, found[what][1])
        self.assertRegex(found["lenient"][0], "idle times are not reported: .*cannot connect")
        self.assertEqual(found["lenient"][1:], [False])
        self.assertEqual((found["here"], found["gone"], found["check"]), (2, 1, False))
        print(f"{found['microseconds']:.2f} us for a pair of marks", file=sys.stderr)
    


if __name__ == "__main__":
    BIN = live.start().folder
    unittest.main(verbosity=2)
