# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of several nodes on this machine. Each node, and the machine of the controller, is a set of namespaces
(network, host name, mounts, processes) with an address, a /tmp and a /dev/shm of its own; a bridge joins them.

Needs root and Debian's packages slurm-wlm, slurm-wlm-basic-plugins, munge, iproute2 (scripts/setup installs them).
"""

import os
import pathlib
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NET = "10.77.0."
CONTROLLER = "ctl"
SECONDS = 600  # that anything may take on a busy machine before it counts as hanging

# The first process of a node: it keeps the namespaces and reaps orphans. A source tree in /tmp stays visible.
KEEP = """
mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2/hosts" /etc/hosts || exit
[[ $1 == ctl ]] || mount -t tmpfs -o mode=1777 tmpfs /tmp || exit
[[ -d $3 ]] || { mkdir -p "$3" && mount --bind . "$3"; } || exit
hostname "$1" && ip link set lo up && echo ready
while :; do sleep 1000 & wait $!; done
"""

CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({net}254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
ReturnToService=2
NodeName=n[1-{nodes}] CPUs=32 RealMemory=65536 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Why no cluster can be made here, or None."""
    if os.geteuid() != 0:
        return "only root makes the namespaces of nodes"
    for program in ("slurmctld", "slurmd", "munged", "ip", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (scripts/setup installs it)"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-c",
                           "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"], capture_output=True, text=True)
    return f"no namespaces with a network of their own: {made.stderr.strip()}" if made.returncode else None


def why_no_cgroups():
    """Why Slurm cannot track processes by control groups here, or None."""
    return None if os.path.isdir("/sys/fs/cgroup/freezer") else "no control groups of version 1 (freezer)"


def until(what, seconds=SECONDS):
    """Waits until what() is true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"nothing after {seconds} s")
        time.sleep(0.1)


class Cluster:
    """Nodes n1, n2, ... and the controller's machine, ctl. Files below `folder` are the same on all."""

    def __init__(self, folder, nodes, tracking="linuxproc", more=""):
        """\\param more  further lines of slurm.conf"""
        self.folder, self.nodes = pathlib.Path(folder), [f"n{i + 1}" for i in range(nodes)]
        self.first, self.outer, self.munge = {}, {}, None
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + f"{NET}254 {CONTROLLER}\n" + "".join(
            f"{NET}{i + 1} {name}\n" for i, name in enumerate(self.nodes)))
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(net=NET, tracking=tracking, folder=self.folder, nodes=nodes) + more)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.start_munge()
        self.make_space(CONTROLLER, 254)
        self.on(CONTROLLER, "slurmctld", check=True)
        for name in self.nodes:
            self.power_on(name)
        until(lambda: self.on(CONTROLLER, "sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(nodes))

    def start_munge(self):
        if subprocess.run(["munge", "-n"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            return
        if not os.path.exists("/etc/munge/munge.key"):
            subprocess.run(["mungekey", "-c", "-k", "/etc/munge/munge.key"], check=True)
            shutil.chown("/etc/munge/munge.key", "munge", "munge")
        os.makedirs("/run/munge", exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        self.munge = subprocess.Popen(["runuser", "-u", "munge", "--", "munged", "--foreground"], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: subprocess.run(["munge", "-n"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0)

    def make_space(self, name, number):
        outer = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", KEEP, name, name,
             str(self.folder), str(ROOT)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        if outer.stdout.readline() != b"ready\n":
            raise AssertionError(f"{name}: no namespaces")
        children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()
        self.outer[name], self.first[name] = outer, int(children.split()[0])
        ip = ["ip"] if name == CONTROLLER else self.entering(CONTROLLER, "n") + ["ip"]
        if name == CONTROLLER:
            for words in (("link", "add", "br0", "type", "bridge"), ("link", "set", "br0", "up"),
                          ("addr", "add", f"{NET}{number}/24", "dev", "br0")):
                self.on(name, "ip", *words, check=True)
            return
        subprocess.run([*ip, "link", "del", f"to-{name}"], capture_output=True)  # of a node that has lost its power just now
        subprocess.run([*ip, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns",
                        str(self.first[name])], check=True)
        subprocess.run([*ip, "link", "set", f"to-{name}", "master", "br0", "up"], check=True)
        self.on(name, "ip", "addr", "add", f"{NET}{number}/24", "dev", "eth0", check=True)
        self.on(name, "ip", "link", "set", "eth0", "up", check=True)

    def entering(self, name, kinds="munp"):
        return ["nsenter", "-t", str(self.first[name]), *(f"-{kind}" for kind in kinds), f"--wd={os.getcwd()}", "--"]

    def on(self, name, *words, check=False, environment=None, cwd=None, seconds=SECONDS):
        """The output of a command on a node."""
        words = [str(word) for word in words]
        if cwd is not None:
            words = ["env", "-C", str(cwd), *words]
        done = subprocess.run(self.entering(name) + words, env=self.environment | (environment or {}), text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def submit(self, cwd, *words, environment=None):
        """The number of a job that sbatch takes; its output is in cwd/slurm-NUMBER.out."""
        return self.on(CONTROLLER, "sbatch", "--parsable", *words, check=True, environment=environment,
                       cwd=cwd).stdout.strip()

    def state(self, job):
        """State and exit code, as "COMPLETED 0:0"."""
        said = self.on(CONTROLLER, "scontrol", "show", "job", job).stdout.split()
        found = dict(word.split("=", 1) for word in said if word.startswith(("JobState=", "ExitCode=")))
        return f"{found.get('JobState')} {found.get('ExitCode')}"

    def ended(self, job, seconds=SECONDS):
        """Waits for the end of a job; its state."""
        until(lambda: self.state(job).split()[0] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SIGNALING"), seconds)
        return self.state(job)

    def power_on(self, name):
        self.make_space(name, int(name[1:]))
        spool = self.folder / f"spool.{name}"
        shutil.rmtree(spool, ignore_errors=True)  # PMIx starts no step with a folder left by a power loss
        spool.mkdir()
        self.on(name, "slurmd", "-N", name, "-L", self.folder / f"slurmd.{name}.log", check=True)

    def power_off(self, name):
        """Every process of the node ends at once."""
        os.kill(self.first.pop(name), signal.SIGKILL)
        outer = self.outer.pop(name)
        outer.wait()
        outer.stdout.close()

    def set_link(self, name, up):
        """Cuts a node's cable, or plugs it in."""
        subprocess.run(self.entering(CONTROLLER, "n") + ["ip", "link", "set", f"to-{name}", "up" if up else "down"], check=True)

    def close(self):
        for name in list(self.first):
            self.power_off(name)
        if self.munge is not None:
            self.munge.terminate()
            self.munge.wait()
