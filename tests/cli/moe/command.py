# SPDX-License-Identifier: Apache-2.0
"""Runs moe-replace in a scratch folder, with loads made from a seed."""

import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

LAYERS, EXPERTS = 6, 16
CLUSTER = ["--nodes", "4", "--gpus", "2", "--slots", "4", "--expert-bytes", "14MB"]
LINKS = ["--gpu-bandwidth", "100GB/s", "--node-bandwidth", "10GB/s"]
TIMES = ["--gpu-flops", "1e14", "--token-bytes", "2048", "--nonmoe-seconds", "0.001"]
STRATEGIES = ("best", "lazarus", "hecate", "eplb", "eplb+", "spread", "compact", "vanilla", "smartmoe",
              "flexmoe", "fastermoe")
NODES = "".join(f"0,add,n{n}\n" for n in range(4))  # four nodes that are there from the start
FORMATS = ("plan", "eplb", "sglang", "vllm", "tensorrt-llm", "vllm-ascend")


class Places:
    """The folder of the programs; set by main."""
    bin = pathlib.Path()
    mpirun = ""
    source = pathlib.Path(__file__).resolve().parents[3]

    @classmethod
    def shared(cls):
        """The folder of real inputs, which may not be there."""
        return pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED") or cls.source.parent / "shared")


def trace(seed=1, records=4, layers=LAYERS, experts=EXPERTS):
    """Skewed loads that drift: [record][layer][expert]."""
    dice = random.Random(seed)
    return [[[int(10000 / (1 + (e * 7 + layer * 3 + step) % experts) ** 1.2) + dice.randrange(50)
              for e in range(experts)] for layer in range(layers)] for step in range(records)]


def jsonl(records):
    return "".join(json.dumps({"iteration": 100 * step, "tokens": tokens}) + "\n"
                   for step, tokens in enumerate(records))


def flat(nested):
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


def shape_of(nested):
    return (len(nested), *shape_of(nested[0])) if isinstance(nested, list) else ()


def npy(values, kind="<i8", code="q", fortran=False, shape=None):
    """A .npy file, from its published form."""
    header = str({"descr": kind, "fortran_order": fortran, "shape": shape or shape_of(values)})
    header += " " * (-(len(header) + 11) % 64) + "\n"
    numbers = flat(values)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + \
        struct.pack(f"<{len(numbers)}{code}", *numbers)


def timeless(value):
    """A result without durations, which differ from run to run."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if not key.startswith("plan_seconds")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        self.write("loads.jsonl", jsonl(trace()))

    def write(self, name, content):
        (self.work / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return name

    def read(self, name):
        return json.loads((self.work / name).read_text())

    def run_in(self, *words, code=0, ranks=1):
        launcher = [Places.mpirun, "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run([*launcher, str(Places.bin / "moe-replace"), *map(str, words)], cwd=self.work,
                              text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL,
                              env=environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def plan(self, *words, **more):
        return self.run_in("loads.jsonl", *CLUSTER, *words, **more)

    def compare(self, *words, **more):
        return self.run_in("compare", "loads.jsonl", *CLUSTER, *words, **more)

    def simulate(self, *words, **more):
        return self.run_in("simulate-failures", "loads.jsonl", "nodes.csv", *CLUSTER, *words, **more)

    def result(self, *words, **more):
        """The report's answer of a run."""
        return json.loads(self.run_in(*words, "--json", **more).stdout)["result"]

    def refused(self, code, part, *words):
        """The run ends with this code and prints the reason; it leaves no plan behind."""
        before = sorted(self.work.iterdir())
        done = self.run_in(*words, code=code)
        self.assertIn(part, done.stderr)
        self.assertEqual(sorted(self.work.iterdir()), before, "a refused run left something")
        return done


def main(module):
    """usage: SCRIPT BIN MPIRUN [unittest arguments]"""
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} BIN MPIRUN")
    Places.bin = pathlib.Path(sys.argv.pop(1)).resolve()
    Places.mpirun = sys.argv.pop(1)
    unittest.main(module=module)
