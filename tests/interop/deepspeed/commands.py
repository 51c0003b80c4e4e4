# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that are tested, and keeps scratch folders."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile


class Commands:
    """The built commands: their folder, and the launcher of MPI jobs or "" where there is none."""

    def __init__(self, folder, launcher):
        self.folder = pathlib.Path(folder).resolve()
        self.launcher = launcher

    def try_run(self, command, *arguments, ranks=1):
        """Runs a command; its exit code, and its output on stdout and stderr together."""
        words = [str(self.folder / command), *map(str, arguments)]
        if ranks > 1:
            words = [self.launcher, "--oversubscribe", "-n", str(ranks), *words, "--threads", "1"]
        environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=1200, check=False)
        return done.returncode, done.stdout

    def run(self, command, *arguments, ranks=1, expect=0):
        """Runs a command and wants its exit code; what it wrote to stdout and stderr together."""
        code, said = self.try_run(command, *arguments, ranks=ranks)
        if code != expect:
            raise AssertionError(f"{command} {' '.join(map(str, arguments))}: exit code {code}, expected {expect}\n{said}")
        return said

    def convert(self, path, source, output, target, *flags):
        """Writes `output` for `target` by way of `path`: direct, atoms (extract, union, load) or mpi."""
        if path == "direct":
            self.run("ucp-load", source, output, "--target", target, *flags)
        elif path == "mpi":
            self.run("ucp-load", source, output, "--target", target, *flags, ranks=2)
        elif path == "atoms":
            parts = output.with_name(output.name + "-parts")
            parts.mkdir()
            self.run("ucp-extract", source, parts / "catalogue", *flags)
            self.run("ucp-union", parts / "catalogue", parts / "atoms", *flags)
            self.run("ucp-load", parts / "atoms", output, "--target", target)
        else:
            raise ValueError(path)


def from_arguments():
    """The commands that the first two arguments of a test name: their folder, and the MPI launcher."""
    folder, launcher = sys.argv.pop(1), sys.argv.pop(1)
    return Commands(folder, launcher)


class Scratch:
    """A folder for a test class; SHARDWRIGHT_TEST_KEEP=1 keeps it for a look."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="sw-interop-"))

    def close(self):
        if os.environ.get("SHARDWRIGHT_TEST_KEEP"):
            print(f"kept {self.path}")
        else:
            shutil.rmtree(self.path)
