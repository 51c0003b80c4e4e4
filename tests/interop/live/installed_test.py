# SPDX-License-Identifier: Apache-2.0
"""The package is installed by CMake, works with no other package than PyTorch, and finds the installed documentation.

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
print(shardwright.DOCS)
"""


class Installed(unittest.TestCase):
    build = prefix = None

    def install(self, component):
        subprocess.run(["cmake", "--install", self.build, "--prefix", self.prefix, "--component", component],
                       check=True, stdout=subprocess.DEVNULL)

    def use(self, package):
        """The output of a program that uses the installed package."""
        done = subprocess.run([sys.executable, "-B", "-I", "-c", SCRIPT, package.parent], text=True, capture_output=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_only_torch_is_needed(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.prefix = scratch.path.resolve()
        self.install("python")
        libraries = list(self.prefix.rglob("libshardwright_torch.so"))
        self.assertEqual(len(libraries), 1)
        package = libraries[0].parent
        self.assertTrue((package / "py.typed").exists())
        self.assertEqual({path.suffix for path in package.iterdir()}, {".py", ".so", ".typed"})
        self.assertEqual(self.use(package), "3 /nowhere: no such folder\n[]\nNone\n")
        self.install("commands")  # with the documentation
        docs = self.prefix / "share/doc/shardwright/docs"
        self.assertTrue((docs / "live.md").is_file())
        self.assertEqual(self.use(package), f"3 /nowhere: no such folder\n[]\n{docs}\n")

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
