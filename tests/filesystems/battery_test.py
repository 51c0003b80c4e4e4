#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commands on one file system, compared byte for byte with their results on the local one.

Conversions, replaced outputs, checks, packs, equal layouts, links, kills and resumes, two nodes at once, ranks on two nodes,
a store with saves, a collection and a restore.

Usage: battery_test.py BIN NAME
NAME is one of mounts.SYSTEMS. Exits with 77 where this machine cannot mount it.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position
import mounts  # pylint: disable=wrong-import-position
from harness import DEMO, Log, difference, expect, finish, run, start, succeed, tree  # pylint: disable=wrong-import-position

MODEL = moe_checkpoint.Model()
ITERATIONS = range(3, 7)
RESHARD = ["--target", "zero=3,dp=3", "--threads", "1"]
LARGE = moe_checkpoint.Model(hidden=250)  # files of many units that end within a page
WHOLE_FILES_ONLY = ("s3fs", "rclone", "seaweedfs")  # mounts that keep the writes of one node to a file


def copy(source, target):
    """Copies files without their times and permissions, which an object store may not take."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
        else:
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


@contextlib.contextmanager
def hung(argv, fault):
    """A command that stops at a call and continues afterwards."""
    process = start(argv, fault=f"{fault}:hang")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        expect(os.WIFSTOPPED(status), f"{argv} did not stop: {status}")
        yield
        process.send_signal(signal.SIGCONT)
        done = finish(process)
        expect(done.code == 0, f"the first of two: {done}")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


class Battery:
    """One file system: `node` and `other` are two paths to it, `local` a folder on the local file system."""

    def __init__(self, programs, local, node, other):
        self.programs, self.local = programs, local
        self.mounts = node, other
        self.node, self.other = node / "work", other / "work"
        self.node.mkdir()
        self.log = Log()
        self.series = local / "series"
        moe_checkpoint.series(self.series, MODEL, ITERATIONS)
        (local / "wanted").mkdir()

    def tool(self, name):
        return self.programs / name

    def wanted(self, name, *argv):
        """The tree of an output that a command makes on the local file system."""
        output = self.local / "wanted" / name
        if not output.exists():
            succeed([*argv, output])
        return tree(output)

    def same(self, wanted, output):
        expect(difference(wanted, tree(output)) == "none", f"{output} differs: {difference(wanted, tree(output))}")

    def only(self, *names):
        left = {path.name for path in self.node.iterdir()} - set(names)
        left = {name for name in left if not name.startswith((".fuse_hidden", ".nfs"))}
        expect(not left, f"left over: {sorted(left)}")

    def conversions(self):
        load = [self.tool("ucp-load"), DEMO, *RESHARD]
        union = [self.tool("ucp-union"), DEMO]
        zero = self.wanted("zero", *load)
        atoms = self.wanted("atoms", *union)
        succeed([*load, self.node / "zero"])
        self.same(zero, self.node / "zero")
        succeed([*union, self.node / "atoms"])
        self.same(atoms, self.node / "atoms")
        done = run([*union, self.node / "atoms"])
        expect(done.code == 6, f"an output that exists: {done}")
        succeed([*union, self.node / "atoms", "--force"])
        self.same(atoms, self.node / "atoms")
        succeed([*load, self.node / "zero", "--force", "--verify=readback"])
        self.same(zero, self.node / "zero")
        self.only("zero", "atoms")

    def from_here(self):
        """Reads outputs of this file system again."""
        succeed([self.tool("ucp-load"), "--check", DEMO, self.node / "atoms"])
        extract = [self.tool("ucp-extract"), DEMO]
        succeed([*extract, self.node / "pack", "--pack=zstd"])
        again = [self.tool("ucp-load"), self.node / "pack", *RESHARD, self.node / "again"]
        succeed(again)
        succeed([self.tool("ucp-load"), "--check", DEMO, self.node / "again"])
        copy(DEMO, self.node / "source")
        succeed([self.tool("ucp-load"), self.node / "source", self.node / "equal"])
        done = run([self.tool("ucp-load"), self.node / "source", self.node / "linked", "--link"])
        # 9: no hard links. 3: a link changes the modification time of its file (SeaweedFS).
        expect(done.code in (0, 3, 9), f"--link: {done}")
        if done.code == 3:  # it may be repeated with --resume
            (stage,) = self.node.glob("linked.partial-*")
            shutil.rmtree(stage)
        for name in ("equal", "linked")[:2 if done.code == 0 else 1]:
            copied = tree(self.node / name)
            copied.pop("shardwright.json")
            self.same(tree(DEMO), self.node / "source")
            expect(tree(DEMO).items() <= copied.items(), f"{name}: {difference(tree(DEMO), copied)}")
        self.only("zero", "atoms", "pack", "again", "source", "equal", *(["linked"] if done.code == 0 else []))
        for path in self.node.iterdir():
            shutil.rmtree(path)

    def kills(self):
        load = [self.tool("ucp-load"), DEMO, *RESHARD]
        zero = self.wanted("zero", *load)
        output = self.node / "killed"
        for at in ("write:9", "write:40", "commit.rename:1"):
            done = run([*load, output], fault=f"{at}:kill")
            expect(done.code == 128 + signal.SIGKILL and not output.exists(), f"a kill at {at}: {done}")
            succeed([*load, output, "--resume"])
            self.same(zero, output)
            self.only("killed")
            shutil.rmtree(output)
        succeed([*load, output])
        for at in ("write:40", "commit.sync_parent:1", "commit.release:1"):
            done = run([*load, output, "--force"], fault=f"{at}:kill")
            expect(done.code == 128 + signal.SIGKILL, f"a kill of --force at {at}: {done}")
            self.same(zero, output)
            succeed([*load, output, "--force"])
            self.same(zero, output)
            self.only("killed")
        shutil.rmtree(output)

    def rivals(self):
        """A second run, on another node where there are two, neither ends nor harms the first."""
        load = [self.tool("ucp-load"), DEMO, *RESHARD]
        with hung([*load, self.node / "out"], "write:9"):
            for more in ((), ("--force",), ("--resume",), ("--force", "--take-over")):
                done = run([*load, self.other / "out", *more])
                expect(done.code == 6 and "in use by process" in done.stderr, f"a second run {more}: {done}")
        self.same(self.wanted("zero", *load), self.node / "out")
        self.only("out")
        shutil.rmtree(self.node / "out")

    def ranks(self):
        """Ranks of two nodes write to one file at the same time."""
        moe_checkpoint.write(self.local / "large", LARGE, 3)
        load = [self.tool("ucp-load"), self.local / "large", "--target", "zero=1,dp=1,ep=1", "--threads", "1"]
        wanted = self.wanted("large", *load)
        # On the second node its own mount is at the path of the first one's.
        node, other = self.mounts
        second = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$2" && cd / && shift 2 && exec "$@"', "sh", other, node]
        words = ["mpirun", "--oversubscribe"]
        for rank in range(4):
            words += [*([":"] if rank else []), "-n", 1, *(second if rank % 2 else []), *load, self.node / "large"]
        for _ in range(3):
            succeed(words, deadline=600)
            self.same(wanted, self.node / "large")
            self.same(wanted, self.other / "large")
            shutil.rmtree(self.node / "large")

    def store(self):
        def save(store, iteration):
            return [self.tool("pec-save"), self.series / f"global_step{iteration}", store, "--k", 2]

        def restore(store, output, *more):
            return [self.tool("pec-restore"), store, output, "--target", "zero=1", "--read-only", *more]

        local = self.local / "store"
        for iteration in ITERATIONS:
            succeed(save(local, iteration))
        succeed(restore(local, self.local / "restored"))
        wanted = tree(self.local / "restored")
        store, output = self.node / "store", self.node / "restored"
        first, *others = ITERATIONS
        succeed(save(store, first))
        with hung(save(self.other / "store", others[0]), "write:12"):
            done = run(save(store, others[0]))
            expect(done.code == 6 and "in use by process" in done.stderr, f"a second save: {done}")
        for iteration in others[1:]:
            done = run(save(store, iteration), fault="write:12:kill")
            expect(done.code == 128 + signal.SIGKILL, f"a kill of a save: {done}")
            succeed(save(store, iteration))
        succeed([self.tool("pec-save"), "list", store])
        succeed([self.tool("pec-save"), "check", store])
        succeed([self.tool("pec-save"), "gc", store, "--keep-last", 2])
        succeed([self.tool("pec-save"), "check", store])
        for more in ((), ("--force",)):
            succeed(restore(store, output, *more))
            self.same(wanted, output)
        self.only("store", "restored")
        expect({path.name for path in store.iterdir()} == {path.name for path in local.iterdir()},
               f"left over in a store: {sorted(path.name for path in store.iterdir())}")

    def all(self, ranks):
        for part in (self.conversions, self.from_here, self.kills, self.rivals, *([self.ranks] if ranks else []), self.store):
            part()
            self.log(part.__name__.replace("_", " "))


def main(programs, name):
    world = mounts.enter()
    node, other = mounts.SYSTEMS[name](world)
    local = world / "local"
    local.mkdir()
    Battery(pathlib.Path(programs).resolve(), local, node, other).all(name not in WHOLE_FILES_ONLY)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in mounts.SYSTEMS:
        sys.exit(f"usage: {sys.argv[0]} BIN {'|'.join(mounts.SYSTEMS)}")
    mounts.main(main, sys.argv[1:])
