# SPDX-License-Identifier: Apache-2.0
"""Conversions of scripts/slurm/convert.sbatch on four nodes of a real Slurm that are stopped in every way a cluster knows. All of
them end with the bytes of a conversion that nothing has stopped. Takes minutes: for the night.

    faults_test.py BIN [TEST...]
"""

import os
import signal
import sys
import unittest

import cluster
import slurm_test
from slurm_test import SCRIPTS, SOURCE, Stopped, same


class Faults(Stopped):
    nodes = 4

    def convert(self, name, *words, nodes=2, tasks=1, **environment):
        return self.job("-N", str(nodes), f"--ntasks-per-node={tasks}", "-c", "1", "--mem=1G", *words, SCRIPTS / "convert.sbatch",
                        SOURCE, name, "dp=4", environment=self.environment | environment)

    def completes(self, job, name):
        said = self.ends(job, "COMPLETED 0:0")
        self.assertEqual(same(self.reference, self.folder / name), [])
        return said

    def requeued(self, job):
        cluster.until(lambda: self.slurm.state(job).startswith("PENDING"))

    def ranks_on(self, node):
        """Processes of ucp-load on a node, by its own numbers."""
        found = self.slurm.on(node, "pgrep", "-x", "ucp-load").stdout.split()
        self.assertTrue(found, f"no rank on {node}")
        return found

    def test_the_time_limit(self):
        # Slurm signals up to a minute early. The first run would take more than its minute, the second one is fast.
        slow = self.folder / "slow"
        slow.write_text("900000")
        job = self.convert("out", "--time=1", "--signal=USR1@30", SLOW_FILE=str(slow))
        self.begun("out")
        self.requeued(job)
        slow.write_text("0")
        said = self.completes(job, "out")
        self.assertEqual(said.count("goes back into the queue"), 1)

    def test_scancel_and_submitting_again(self):
        first = self.convert("out")
        self.begun("out")
        self.slurm.on(cluster.CONTROLLER, "scancel", first, check=True)
        self.assertTrue(self.slurm.ended(first).startswith("CANCELLED"))
        self.completes(self.convert("out"), "out")

    def test_slurmd_is_killed(self):
        job = self.convert("out", SLOW_US="400000")
        self.begun("out")
        self.slurm.on("n2", "pkill", "-KILL", "-x", "slurmd", check=True)
        cluster.until(lambda: self.slurm.state(job).split()[0] in ("PENDING", "COMPLETED"))
        self.slurm.on("n2", "slurmd", "-N", "n2", "-L", self.slurm.folder / "slurmd.n2.log", check=True)
        self.completes(job, "out")

    def test_a_link_is_cut(self):
        job = self.convert("out", SLOW_US="300000")
        self.begun("out")
        self.slurm.set_link("n2", False)
        self.requeued(job)
        self.slurm.set_link("n2", True)
        self.completes(job, "out")

    def test_a_rank_is_stopped(self):
        for mpi, nodes, tasks in (("pmix", 2, 1), ("pmi2", 1, 2)):
            with self.subTest(mpi):
                job = self.convert(f"out {mpi}", "--export=ALL", nodes=nodes, tasks=tasks, MPI_TYPE=mpi, SLOW_US="300000",
                                   FLAGS="--rank-timeout 5")
                self.begun(f"out {mpi}")
                node = f"n{nodes}"
                for pid in self.ranks_on(node)[-1:]:
                    self.slurm.on(node, "kill", f"-{signal.SIGSTOP.value}", pid, check=True)
                self.requeued(job)
                said = self.completes(job, f"out {mpi}")
                self.assertRegex(said, r"rank 1 on n\d is lost: nothing was heard of it")

    def test_a_chain_of_jobs(self):
        first = self.convert("out")
        second = self.job("-N", "1", f"--dependency=afterok:{first}", self.script(
            f"exec bash '{SCRIPTS}/convert.sbatch' out back dp=2\n"), environment=self.environment)
        self.begun("out")
        self.slurm.power_off("n1")
        self.requeued(first)
        self.slurm.power_on("n1")
        self.completes(first, "out")
        self.ends(second, "COMPLETED 0:0")
        self.slurm.on("n1", "ucp-load", "--check", SOURCE, self.folder / "back", "-q", check=True)

    def test_fewer_nodes_after_a_restart(self):
        first = self.convert("out", nodes=4)
        self.begun("out")
        for name in ("n3", "n4"):
            self.slurm.power_off(name)
        self.requeued(first)
        self.slurm.on(cluster.CONTROLLER, "scancel", first, check=True)
        said = self.completes(self.convert("out", nodes=2), "out")
        for name in ("n3", "n4"):
            self.slurm.power_on(name)
        self.assertIn("is complete", said)

    def test_two_jobs_at_once(self):
        jobs = [self.convert("out"), self.convert("out")]
        states = sorted(self.slurm.ended(job) for job in jobs)
        self.assertEqual(states[0], "COMPLETED 0:0")
        self.assertIn(states[1], ("COMPLETED 0:0", "FAILED 6:0"))
        self.assertEqual(same(self.reference, self.folder / "out"), [])


def load_tests(loader, _tests, _pattern):
    return loader.loadTestsFromTestCase(Faults)


if __name__ == "__main__":
    slurm_test.BIN = os.path.abspath(sys.argv.pop(1))
    os.umask(0o022)
    unittest.main(verbosity=2)
