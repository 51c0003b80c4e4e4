# SPDX-License-Identifier: Apache-2.0
"""The package is installed by CMake and works with no other package than PyTorch.

    installed_test.py BIN PACKAGE BUILD
"""

import pathlib
import subprocess
import sys
import unittest

import live  # first: it makes the modules of the other tests importable
import commands

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import shardwright, torch
assert shardwright.__file__.startswith(sys.argv[1]), shardwright.__file__
try:
    shardwright.load(torch.nn.Linear(2, 2), "/nowhere")
except shardwright.Error as error:
    print(error.code, error)
print(sorted({"deepspeed", "numpy", "transformers"} & set(sys.modules) - {"numpy"}))
"""


class Installed(unittest.TestCase):
    build = None

    def test_only_torch_is_needed(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        subprocess.run(["cmake", "--install", self.build, "--prefix", scratch.path, "--component", "python"],
                       check=True, stdout=subprocess.DEVNULL)
        libraries = list(scratch.path.rglob("libshardwright_torch.so"))
        self.assertEqual(len(libraries), 1)
        package = libraries[0].parent
        self.assertTrue((package / "py.typed").exists())
        self.assertEqual({path.suffix for path in package.iterdir()}, {".py", ".so", ".typed"})
        said = subprocess.run([sys.executable, "-I", "-c", SCRIPT, package.parent], check=True, text=True,
                              capture_output=True)
        self.assertEqual(said.stdout, "3 /nowhere: no such folder\n[]\n", said.stderr)

    def test_the_library_shares_no_symbols(self):
        library = pathlib.Path(live.PACKAGE) / "shardwright/libshardwright_torch.so"
        symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, text=True, capture_output=True)
        self.assertEqual(symbols.stdout, "")
        needed = subprocess.run(["readelf", "-d", library], check=True, text=True, capture_output=True).stdout
        self.assertIn("[libtorch_cpu.so]", needed)
        for other in ("libmpi", "libc10", "libtorch.so", "libtorch_python", "RUNPATH", "RPATH"):
            self.assertNotIn(other, needed)


if __name__ == "__main__":
    live.start()
    Installed.build = sys.argv.pop(1)
    unittest.main(verbosity=2)
