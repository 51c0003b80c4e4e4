#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/clean removes leftovers of processes that are gone, and nothing else.

Usage: clean_test.py
"""

import importlib.machinery
import importlib.util
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
SOURCE = pathlib.Path(__file__).resolve().parents[2]
LONG_AGO = 1_000_000_000
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
# Names that tests and scripts give to temporary folders: Python, harness.Scratch, C++ and Bash.
PYTHON_NAME = re.compile(r'(?:mkdtemp|TemporaryDirectory|TemporaryFile)\(prefix=f?"([^"]*)"')
HARNESS_NAME = re.compile(r'(?<!commands\.)\bScratch\(f?"([^"]*)"')
OTHER_NAME = re.compile(r'"(?:[^"]*/)?([a-z-]+-)XXXXXX"|mktemp -d /dev/shm/([a-z.-]+)XXXXXX')


def load_script():
    loader = importlib.machinery.SourceFileLoader("clean", str(SOURCE / "scripts" / "clean"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("clean", loader))
    sys.modules["clean"] = module
    loader.exec_module(module)
    return module


class Names(unittest.TestCase):
    def test_of_all_temporary_folders_are_known(self):
        clean, count = load_script(), 0
        for path in (path for folder in ("tests", "scripts") for path in (SOURCE / folder).rglob("*")):
            if not path.is_file() or path.name in ("clean", "clean_test.py", "harness.py") or "data" in path.parts:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            names = PYTHON_NAME.findall(text) + [f"sw-{name}" for name in HARNESS_NAME.findall(text)]
            if path.suffix in (".cc", ".h") or text.startswith("#!/usr/bin/env bash"):
                names += [one or other for one, other in OTHER_NAME.findall(text)]
            for name in names:
                if name in ("work-", "reach-", "slurm-", "sw-cuda-bench-"):  # in build/, or in another temporary folder
                    continue
                with self.subTest(path=str(path), name=name):
                    self.assertTrue(clean.SCRATCH_NAME.fullmatch(re.sub(r"\{.*?\}", "name", name) + "a1b2c3d4"))
                    count += 1
        self.assertGreater(count, 40)

    def test_of_other_programs_are_not_known(self):
        clean = load_script()
        for name in ("sw-backup", "shardwright-source", "shardwright-checkpoints", "sw-os-notes", "sw-report-friday", "sw-interop-", "pec-store-a1b2c3d4",
                     "sw-mine-a1b2c3d4"):
            self.assertIsNone(clean.SCRATCH_NAME.fullmatch(name), name)


class Clean(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        top = pathlib.Path(os.path.realpath(folder.name))
        self.tree, self.memory, self.runtime, self.home = (top / name for name in ("tree", "memory", "runtime", "home"))
        for path in (self.memory, self.runtime, self.home):
            path.mkdir()
        (self.tree / "scripts").mkdir(parents=True)
        shutil.copy(SOURCE / "scripts" / "clean", self.tree / "scripts" / "clean")
        package = self.tree / "lib/trainer/torch/shardwright/__init__.py"
        package.parent.mkdir(parents=True)
        package.touch()
        self.agent = f"shardwright-{os.geteuid()}-0123456789abcdef"

    def clean(self, *words, code=0):
        environment = {**os.environ, "HOME": str(self.home)}
        environment.pop("XDG_CACHE_HOME", None)
        done = subprocess.run([sys.executable, "-B", self.tree / "scripts" / "clean", *words, "--in", self.memory, "--in", self.runtime],
                              text=True, capture_output=True, check=False, env=environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout

    def make(self, path, when=LONG_AGO):
        path.mkdir(parents=True)
        file = path / "file"
        file.write_text("content", encoding="utf-8")
        for one in (file, path):
            os.utime(one, (when, when))
        return path

    def start(self, words, **more):
        """Starts a process that waits for its end. Returns it when it runs."""
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)

        def end():
            process.kill()
            process.communicate()

        self.addCleanup(end)
        self.assertEqual(process.stdout.readline(), "ready\n")
        return end

    def test_leftovers_are_removed(self):
        leftovers = [self.make(self.memory / name) for name in ("sw-interop-a1b2c3d4", "sw-os-AbCdEf", "shardwright-test.AbCdEf",
                                                                "sw-crash-some-case-abcdefg1")]
        leftovers += [self.make(folder / self.agent) for folder in (self.memory, self.runtime)]
        others = [self.make(self.memory / name) for name in ("sw-backup", "store", f"shardwright-{os.geteuid() + 1}-0123456789abcdef")]
        link = self.memory / "sw-interop-abcdefg1"
        link.symlink_to(others[0])
        text = self.clean("--dry-run")
        self.assertEqual([text.count(f"would remove {path} (") for path in leftovers], [1] * 6, text)
        self.assertTrue(all(path.exists() for path in leftovers))
        text = self.clean()
        self.assertEqual([text.count(f"removed {path} (") for path in leftovers], [1] * 6, text)
        self.assertFalse(any(path.exists() for path in leftovers))
        self.assertTrue(all((path / "file").exists() for path in (*others, link)))
        self.assertEqual(self.clean(), "removed 0, 0 B; kept 0\n")

    def test_of_a_live_process_are_kept(self):
        uses = {"current folder": ([sys.executable, "-c", WAIT], lambda path: {"cwd": path}),
                "argument": ([sys.executable, "-c", WAIT, "unix:{}/agent.sock"], lambda path: {}),
                "environment": ([sys.executable, "-c", WAIT], lambda path: {"env": {**os.environ, "XDG_RUNTIME_DIR": str(path)}}),
                "open file": ([sys.executable, "-c", "file = open('{}/file'); " + WAIT], lambda path: {}),
                "mapped file": ([sys.executable, "-c", "import mmap, os; file = os.open('{0}/file', 0); "
                                 "memory = mmap.mmap(file, 0, prot=1); os.close(file); os.rename('{0}/file', '{0}/file'); " + WAIT],
                                lambda path: {})}
        for number, (use, (words, more)) in enumerate(uses.items()):
            with self.subTest(use):
                path = self.make(self.memory / f"sw-interop-abcdefg{number}")
                end = self.start([word.format(path) for word in words], **more(path))
                self.assertRegex(self.clean(), rf"kept {path}: process \d+ \(\S+\) uses it\n")
                self.assertTrue((path / "file").exists())
                end()
                self.clean()
                self.assertFalse(path.exists())

    def test_both_folders_of_a_live_agent_are_kept(self):
        folders = [self.make(folder / self.agent) for folder in (self.memory, self.runtime)]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folders[1] / "agent.sock"))
            listener.listen()
            text = self.clean()
            self.assertIn(f"kept {folders[1]}: a process listens at a socket in it\n", text)
            self.assertIn(f"kept {folders[0]}: belongs to {folders[1]}: a process listens", text)
        for path in (folders[1] / "agent.sock", folders[1]):  # older than the tests that run meanwhile
            os.utime(path, (LONG_AGO, LONG_AGO))
        self.clean()
        self.assertFalse(any(path.exists() for path in folders))

    def test_of_a_test_that_may_be_running_are_kept(self):
        script = self.tree / "tests" / "wait_test.py"
        script.parent.mkdir()
        script.write_text(WAIT, encoding="utf-8")
        end = self.start([sys.executable, script])
        new, old = self.make(self.memory / "sw-interop-new12345"), self.make(self.memory / "sw-interop-old12345")
        later = old.stat().st_mtime + 10 ** 9  # in 2033: after any process started
        os.utime(new, (later, later))
        self.assertRegex(self.clean(), rf"kept {new}: process \d+ \(\S+\), which runs Shardwright, may use it")
        self.assertEqual((new.exists(), old.exists()), (True, False))
        end()
        os.utime(new, (LONG_AGO, LONG_AGO))
        self.clean()
        self.assertFalse(new.exists())

    def test_the_build_folder(self):
        build, compiled = self.make(self.tree / "build/release"), self.make(self.tree / "tests/__pycache__")
        program = shutil.copy(shutil.which("cat"), build / "pec-save")
        process = subprocess.Popen([program], stdin=subprocess.PIPE)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertRegex(self.clean(), rf"kept {build.parent}: process {process.pid} \(pec-save\) uses it\n")
        self.assertEqual((build.exists(), compiled.exists()), (True, False))
        process.kill()
        process.communicate()
        self.clean()
        self.assertFalse(build.parent.exists())

    def test_caches_only_on_request(self):
        cache = self.make(self.home / ".cache/shardwright/peers")
        other = self.make(self.home / ".cache/other")
        self.assertNotIn("cache", self.clean())
        self.assertIn(f"would remove {cache.parent} (", self.clean("--caches", "--dry-run"))
        self.assertTrue(cache.exists())
        self.clean("--caches")
        self.assertEqual((cache.exists(), other.exists()), (False, True))

    def test_usage_errors(self):
        self.clean("--cache", code=2)
        self.clean("--in", self.home / "missing", code=2)


if __name__ == "__main__":
    unittest.main()
