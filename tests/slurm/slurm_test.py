# SPDX-License-Identifier: Apache-2.0
"""The scripts of scripts/slurm on a real Slurm: hooks that one rank calls, agents that a requeue ends, conversions that are
stopped, lose a node or are requested twice.

    slurm_test.py BIN [TEST...]
"""

import filecmp
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts/slurm"
SOURCE = ROOT / "tests/data/deepspeed/zero1_w2/ckpt"
BIN = None


def same(left, right):
    """The names of files that differ between two folders."""
    compared = filecmp.dircmp(left, right, ignore=[])
    wrong = compared.left_only + compared.right_only + compared.funny_files
    wrong += filecmp.cmpfiles(left, right, compared.common_files, shallow=False)[1]
    for name in compared.common_dirs:
        wrong += same(left / name, right / name)
    return wrong


class OnSlurm(unittest.TestCase):
    """Tests that share a cluster and a folder that all nodes see. Names have blanks."""

    nodes, tracking, configuration = 2, "linuxproc", ""

    @classmethod
    def setUpClass(cls):
        why = cluster.why_not() or (cluster.why_no_cgroups() if cls.tracking == "cgroup" else None)
        if why:
            raise unittest.SkipTest(why)
        # Not in /tmp or /dev/shm, which each node has for itself.
        cls.work = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir=pathlib.Path.cwd() / "build"))
        cls.addClassCleanup(shutil.rmtree, cls.work, ignore_errors=True)
        os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"  # more ranks than processors
        cls.slurm = cluster.Cluster(cls.work / "cluster", cls.nodes, cls.tracking, cls.configuration)
        cls.addClassCleanup(cls.slurm.close)

    def setUp(self):
        self.folder = self.work / f"{self._testMethodName} files"
        self.folder.mkdir()

    def script(self, text):
        """A job script."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/bash\nset -eu\n{text}")
        path.chmod(0o755)
        return path

    def job(self, *words, **options):
        return self.slurm.submit(self.folder, *words, **options)

    def ends(self, job, state):
        """The job ends so; what it printed."""
        found = self.slurm.ended(job)
        said = (self.folder / f"slurm-{job}.out").read_text()
        self.assertEqual(found, state, said)
        return said


class Hooks(OnSlurm):
    def test_one_rank_calls_the_hooks(self):
        # Rank 0 alone, while the others wait for it, as in a training: without an agent, with one, with status and
        # pec-save tell.
        (self.folder / "step.sh").write_text(f"""#!/bin/bash
if [[ ${{OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}} == 0 ]]; then
  set -euo pipefail
  trap 'touch "$1/done"' EXIT
  mkdir -p -m 700 "/tmp/of agent"
  '{SCRIPTS}/pec-save-hook.sh' "/tmp/of agent/s" '{SOURCE}' "$1/store a"
  '{SCRIPTS}/pec-agent.sh' start "/tmp/of agent/s" '{SOURCE}' "$1/store b"
  '{SCRIPTS}/pec-save-hook.sh' "/tmp/of agent/s" '{SOURCE}' "$1/store b"
  pec-save status "unix:/tmp/of agent/s" -q
  '{SCRIPTS}/pec-agent.sh' stop "/tmp/of agent/s"
  pec-save list "$1/store a" >"$1/list a" && pec-save list "$1/store b" >"$1/list b"
  echo rank 0 is through
  exit
fi
until [[ -e $1/done ]]; do sleep 0.1; done
""")
        for mpi in ("pmix", "pmi2", "mpirun"):
            with self.subTest(mpi):
                out = self.folder / mpi
                out.mkdir()
                start = "mpirun --allow-run-as-root --oversubscribe -n 2" if mpi == "mpirun" else f"srun --mpi={mpi} -n 2"
                job = self.job("-N", "1", "-n", "2", self.script(f"{start} bash '{self.folder}/step.sh' '{out}'\n"))
                self.assertIn("rank 0 is through", self.ends(job, "COMPLETED 0:0"))
                for name in ("list a", "list b"):
                    self.assertRegex((out / name).read_text(), r"1 +4 .* usable")

    def test_jobs_that_need_the_same_conversion_share_it(self):
        source = shutil.copytree(SOURCE, self.folder / "ckpt")
        text = f"""load=$('{SCRIPTS}/restore-hook.sh' '{source}') || exit
[[ -e $load/shardwright.json ]] && echo "got $load"
"""
        jobs = [self.job("-N", "1", "-n", "4", self.script(text)) for _ in range(3)]
        for job in jobs:
            self.assertIn("got ", self.ends(job, "COMPLETED 0:0"))


class Conversions(OnSlurm):
    def setUp(self):
        super().setUp()
        self.reference = self.folder / "wanted"
        self.slurm.on("n1", "ucp-load", SOURCE, self.reference, "--target", "dp=4", "-q", check=True)

    def test_all_ranks_share_the_work(self):
        # Debian's MPICH does not always come out of MPI_Finalize across nodes: one rank waits for PMI, another for that rank.
        for mpi, nodes in (("pmix", 2), ("pmi2", 1)):
            job = self.job("-N", str(nodes), "--ntasks-per-node=2", "-c", "1", "--mem=1G", SCRIPTS / "convert.sbatch", SOURCE,
                           f"out {mpi}", "dp=4", environment={"MPI_TYPE": mpi})
            self.ends(job, "COMPLETED 0:0")
            self.assertEqual(same(self.reference, self.folder / f"out {mpi}"), [])

    def test_tasks_without_mpi_wait_for_the_one_that_converts(self):
        job = self.job("-N", "2", "-n", "4",
                       self.script(f"srun -n 4 ucp-load '{SOURCE}' '{self.folder}/out' --target dp=4\n"))
        said = self.ends(job, "COMPLETED 0:0")
        self.assertEqual(same(self.reference, self.folder / "out"), [])
        self.assertIn("--mpi=pmix", said)
        # Tasks that start after the output is complete accept it, too.
        job = self.job("-N", "2", "-n", "4",
                       self.script(f"srun -n 4 ucp-load '{SOURCE}' '{self.folder}/out' --target dp=4\n"))
        self.assertEqual(self.ends(job, "COMPLETED 0:0").count("complete already"), 4)
        job = self.job("-N", "2", "-n", "4",
                       self.script(f"srun -n 4 ucp-load '{SOURCE}' '{self.folder}/out' --target dp=8\n"))
        self.assertIn("already exists; pass --force to replace it", self.ends(job, "FAILED 6:0"))


class Stopped(OnSlurm):
    """Conversions that take seconds, since every call on a file does, and are stopped on the way."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        library = cls.work / "slow.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", ROOT / "tests/perf/slow_files.c", "-o", library, "-ldl"], check=True)
        (cls.work / "slow").mkdir()
        command = cls.work / "slow/ucp-load"
        command.write_text(f"""#!/bin/bash
[[ -z ${{SLOW_FILE:-}} ]] || SLOW_US=$(<"$SLOW_FILE")
LD_PRELOAD={library} SLOW_FILES={cls.work} SLOW_FILES_US=${{SLOW_US:-0}} exec {BIN}/ucp-load "$@" ${{FLAGS:-}}
""")
        command.chmod(0o755)
        cls.environment = {"PATH": f"{cls.work}/slow:{os.environ['PATH']}", "SLOW_US": "100000"}

    def setUp(self):
        super().setUp()
        self.reference = self.folder / "wanted"
        self.slurm.on("n1", "ucp-load", SOURCE, self.reference, "--target", "dp=4", "-q", check=True)

    def begun(self, name):
        """Waits until a conversion writes."""
        cluster.until(lambda: list(self.folder.glob(f"{name}.partial-*")))

    def test_one_task_of_an_array_is_stopped_and_goes_on(self):
        job = self.job("-n", "2", "--array=0-1", "--requeue", "--open-mode=append", self.script(
            f"exec bash '{SCRIPTS}/convert.sbatch' '{SOURCE}' \"out $SLURM_ARRAY_TASK_ID\" dp=4\n"), environment=self.environment)
        self.begun("out 1")
        self.slurm.on(cluster.CONTROLLER, "scancel", "--signal=USR1", f"{job}_1", check=True)
        for task, restarts in ((0, "0"), (1, "1")):
            state = self.slurm.ended(f"{job}_{task}")
            said = (self.folder / f"slurm-{job}_{task}.out").read_text()
            self.assertEqual(state, "COMPLETED 0:0", said)
            self.assertEqual(same(self.reference, self.folder / f"out {task}"), [])
            self.assertEqual(said.count("goes back into the queue"), int(restarts), said)
            self.assertIn(f"Restarts={restarts} ", self.slurm.on(cluster.CONTROLLER, "scontrol", "show", "job", f"{job}_{task}").stdout)

    def test_a_node_loses_its_power(self):
        job = self.job("-N", "2", "--ntasks-per-node=1", "-c", "1", "--mem=1G", SCRIPTS / "convert.sbatch", SOURCE, "out",
                       "dp=4", environment=self.environment)
        self.begun("out")
        self.slurm.power_off("n2")
        cluster.until(lambda: self.slurm.state(job).startswith("PENDING"))
        self.slurm.power_on("n2")
        self.ends(job, "COMPLETED 0:0")
        self.assertEqual(same(self.reference, self.folder / "out"), [])


class Epilog(OnSlurm):
    """Slurm runs the epilog after each job."""

    nodes, configuration = 1, f"Epilog={SCRIPTS}/epilog.sh\n"

    def test_it_ends_the_agents_of_its_job_only(self):
        source = shutil.copytree(SOURCE, self.folder / "ckpt")
        start = f"'{SCRIPTS}/pec-agent.sh' start /tmp/$SLURM_JOB_ID '{source}' '{self.folder}/store '$SLURM_JOB_ID\n"
        other = self.job("-n", "1", "--mem=1G", self.script(start + f"until [[ -e '{self.folder}/end' ]]; do sleep 0.1; done\n"))
        cluster.until(lambda: self.slurm.on("n1", "pec-save", "status", f"unix:/tmp/{other}", "-q").returncode == 0)
        job = self.job("-n", "1", "--mem=1G", self.script(start + "pec-save tell unix:/tmp/$SLURM_JOB_ID snapshot\n"))
        self.ends(job, "COMPLETED 0:0")
        self.assertNotEqual(self.slurm.on("n1", "pec-save", "status", f"unix:/tmp/{job}", "-q").returncode, 0)
        self.slurm.on("n1", "pec-save", "check", f"{self.folder}/store {job}", "-q", check=True)
        self.slurm.on("n1", "pec-save", "status", f"unix:/tmp/{other}", "-q", check=True)
        (self.folder / "end").touch()
        self.ends(other, "COMPLETED 0:0")
        self.assertNotEqual(self.slurm.on("n1", "pec-save", "status", f"unix:/tmp/{other}", "-q").returncode, 0)


class Tracked(OnSlurm):
    """Slurm ends every process of a step with it, as on most clusters."""

    nodes, tracking = 1, "cgroup"

    def test_an_agent_in_the_step_of_a_task_is_refused(self):
        job = self.job("-n", "1", self.script(
            f"srun -n 1 '{SCRIPTS}/pec-agent.sh' start /tmp/s '{SOURCE}' '{self.folder}/store'\n"))
        said = self.ends(job, "FAILED 9:0")
        self.assertIn("srun --overlap --ntasks-per-node=1 pec-agent.sh run /tmp/s", said)

    def test_an_agent_in_a_step_of_its_own_saves_what_it_has_acknowledged(self):
        source = shutil.copytree(SOURCE, self.folder / "ckpt")
        store = self.folder / "store"
        # The folder is scanned once the job is stopped: nothing but the end of the agent saves.
        job = self.job("-n", "2", self.script(f"""
srun --overlap -n 1 '{SCRIPTS}/pec-agent.sh' run /tmp/s '{source}' '{store}' --bandwidth 1 &
until pec-save status unix:/tmp/s -q; do sleep 0.1; done
srun --overlap -n 1 bash -c "'{SCRIPTS}/pec-save-hook.sh' /tmp/s '{source}' '{store}' && touch '{self.folder}/acknowledged'; sleep 1000"
"""))
        cluster.until((self.folder / "acknowledged").exists)
        self.slurm.on(cluster.CONTROLLER, "scancel", job, check=True)
        self.assertTrue(self.slurm.ended(job).startswith("CANCELLED"))
        checked = self.slurm.on("n1", "pec-save", "list", store, "--json")
        self.assertEqual(checked.returncode, 0, checked.stderr + (self.folder / f"slurm-{job}.out").read_text())
        self.assertEqual(len(json.loads(checked.stdout)["result"]["checkpoints"]), 1, checked.stdout)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv.pop(1))
    os.umask(0o022)
    unittest.main(verbosity=2)
