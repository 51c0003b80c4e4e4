# SPDX-License-Identifier: Apache-2.0
"""Runs the commands on broken inputs, and checks the rules for all of their answers."""

import collections
import os
import pathlib
import resource
import shutil
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

from harness import DEMO, Broken, expect, run, tree  # pylint: disable=wrong-import-position
from traced import run_traced  # pylint: disable=wrong-import-position

REFUSALS = {3, 4, 8, 9}  # not found, corrupt or unsafe, over a limit, unsupported
DEADLINE_SECONDS = 600
MEMORY_BYTES = 3 << 30  # address space, thread stacks and libraries included
TARGET = ("--target", "zero=3,dp=3", "--threads", "2")


def bounded():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Bench:
    def __init__(self, programs, folder, sanitized=False, traced=False):
        self.load = programs / "ucp-load"
        self.union = programs / "ucp-union"
        self.extract = programs / "ucp-extract"
        self.folder = folder
        self.canary = folder / "canary"
        # A sanitizer reserves terabytes of addresses.
        self.limit = None if sanitized else bounded
        self.traced = traced
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.number = 0
        self.wanted = {}
        self.rows = None  # sources of other formats, made when asked for

    def place(self):
        with self.lock:
            self.number += 1
            path = self.folder / f"case-{self.number}"
        path.mkdir()
        return path

    def demo(self):
        """A copy of the sound checkpoint. \\returns its save folder"""
        return shutil.copytree(DEMO, self.place() / "ckpt")

    def attempt(self, argv, output, what):
        """Runs a command on a broken input. Whatever it prints, it ends by itself with a documented
        code, runs nothing, and leaves an output only if it succeeds."""
        if self.traced:
            done = run_traced(argv, output, what, DEADLINE_SECONDS, preexec_fn=self.limit)
        else:
            done = run(argv, deadline=DEADLINE_SECONDS, preexec_fn=self.limit)
        expect(done.code in REFUSALS | {0}, f"{what}: {done}")
        expect(not self.canary.exists(), f"{what}: code from the input was run: {done}")
        if done.code != 0:
            errors = [line for line in done.stderr.splitlines() if " error: " in line]
            expect(len(errors) == 1, f"{what}: one error line expected: {done}")
            left = [name for name in os.listdir(output.parent) if name.startswith(output.name)]
            expect(not left, f"{what}: left behind {left}: {done}")
        return done

    def convert(self, source, what, flags=TARGET):
        output = source.parent / "out"
        return self.attempt([self.load, source, output, *flags], output, what), output

    def refused(self, source, what, words=(), codes=(4,), flags=TARGET, group="refused"):
        """The input must be rejected, with `words` in the message."""
        done, _ = self.convert(source, what, flags)
        expect(done.code in codes, f"{what}: exit code {sorted(codes)} expected: {done}")
        for word in words:
            expect(str(word) in done.stderr, f"{what}: \"{word}\" not in the message: {done}")
        self.count(group)
        shutil.rmtree(source.parent)
        return done

    def refused_or_harmless(self, source, what, words, group, codes=(4,)):
        """Either refused as above, or the output is what the sound checkpoint gives."""
        done, output = self.convert(source, what)
        if done.code == 0:
            expect(self.same(output), f"{what}: accepted, but the output differs: {done}")
            self.count(f"{group}, harmless")
        else:
            expect(done.code in codes, f"{what}: exit code {sorted(codes)} expected: {done}")
            for word in words:
                expect(word in done.stderr, f"{what}: \"{word}\" not in the message: {done}")
            self.count(f"{group}, refused")
        shutil.rmtree(source.parent)

    def same(self, output):
        """All but the manifest, which holds a fingerprint of the source's files."""
        if not self.wanted:
            raise Broken("no sound output to compare with")
        found = tree(output)
        found.pop("shardwright.json")
        return found == self.wanted

    def prepare(self):
        source = self.demo()
        done, output = self.convert(source, "the sound checkpoint")
        expect(done.code == 0, f"the sound checkpoint: {done}")
        self.wanted = tree(output)
        self.wanted.pop("shardwright.json")

    def nothing_escaped(self, source, what):
        """No name of an input became a path."""
        for folder in (self.folder, self.folder.parent, source.parent, source):
            expect(not (folder / "escaped").exists(), f"{what}: a name became a path")
        expect(not os.path.exists("/tmp/escaped"), f"{what}: a name became a path")

    def count(self, group):
        with self.lock:
            self.counts[group] += 1


def tag_folder(source):
    return source / (DEMO / "latest").read_text().strip()


def optim(source, rank=0):
    return tag_folder(source) / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model(source):
    return tag_folder(source) / "mp_rank_00_model_states.pt"
