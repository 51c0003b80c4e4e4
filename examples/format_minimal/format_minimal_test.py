#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ucp-load reads checkpoints in the format of format_minimal.cc, and exits with an error code on damaged ones.

Usage: format_minimal_test.py LOAD
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

sys.dont_write_bytecode = True

import write  # pylint: disable=wrong-import-position

NOT_FOUND, BAD_INPUT, LIMIT, UNSUPPORTED = 3, 4, 8, 9
LOAD = pathlib.Path()
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("SHARDWRIGHT_")}
ENVIRONMENT["LC_ALL"] = "C"


def load(*words):
    return subprocess.run([LOAD, *map(str, words), "--progress", "off"], env=ENVIRONMENT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=1800, check=False)


class Minimal(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="minimal-")
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        self.source = self.work / "source"
        write.write(self.source)

    def succeed(self, *words):
        done = load(*words)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout


class Conversions(Minimal):
    def test_it_is_listed(self):
        report = self.work / "report"
        self.succeed(self.source, "--list", f"--json={report}")
        rows = json.loads(report.read_text())["result"]["parameters"]
        self.assertEqual({row["name"]: tuple(row["shape"]) for row in rows}, write.SHAPES)

    def test_safetensors_has_the_weights(self):
        for only, state in (("weight", "weight"), ("master", "fp32")):
            out = self.work / only
            self.succeed(self.source, out, "--format", "safetensors", "--only", only)
            data = (out / "model.safetensors").read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            header.pop("__metadata__")
            found = {(name, state): data[start + one["data_offsets"][0]:start + one["data_offsets"][1]]
                     for name, one in header.items()}
            self.assertEqual(found, {key: one for key, one in write.values().items() if key[1] == state})

    def test_atoms_have_the_states_of_the_optimizer(self):
        out = self.work / "out"
        self.succeed(self.source, out, "--format", "universal")
        for (name, state), expected in write.values().items():
            if state == "weight":
                continue
            [path] = out.rglob(f"zero/{name}/{state}.pt")
            with zipfile.ZipFile(path) as archive:
                [member] = [one for one in archive.namelist() if one.endswith("/data/0")]
                self.assertEqual(archive.read(member), expected, f"{name} {state}")

    def test_formats_with_an_optimizer_keep_everything(self):
        for name, words in (("dcp", []), ("deepspeed", []), ("deepspeed", ["--target", "zero=3,dp=3"])):
            with self.subTest(format=name, words=words):
                out = self.work / "-".join([name, *words])
                self.succeed(self.source, out, "--format", name, *words)
                self.succeed("--check", self.source, out)

    def test_steps_and_hyper_parameters_are_kept(self):
        out = self.work / "out"
        self.succeed(self.source, out, "--format", "dcp")
        index = json.loads((self.source / "minimal.json").read_text())
        index["optimizer"]["lr"] = 0.002
        (self.source / "minimal.json").write_text(json.dumps(index))
        done = load("--check", self.source, out)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("lr", done.stdout)
        index["step"] = write.STEP + 1
        (self.source / "minimal.json").write_text(json.dumps(index))
        self.assertIn("step", load("--check", self.source, out).stdout)


def edit(*path, to):
    """Returns a function that replaces a value of the index."""
    def apply(index):
        for key in path[:-1]:
            index = index[key]
        if callable(to):
            to(index[path[-1]])
        else:
            index[path[-1]] = to
    return apply


PIECE = ("parameters", 0, "states", "weight", "pieces", 0)
EDITS = [  # (change of the index, exit code, text of the message)
    (edit("version", to=2), UNSUPPORTED, "expected version 1, found 2"),
    (edit("step", to=-1), BAD_INPUT, '"step"'),
    (edit("step", to=2**63), BAD_INPUT, '"step"'),
    (edit("optimizer", to=[]), BAD_INPUT, '"optimizer": expected an object, found a list'),
    (edit("optimizer", "lr", to="1"), BAD_INPUT, '"lr": expected a number, found a text'),
    (edit("files", to={}), NOT_FOUND, "no files of a checkpoint"),
    (edit("files", "../rank-0.raw", to={"bytes": 1, "crc32": 0}), NOT_FOUND, "../rank-0.raw"),
    (edit("files", "rank-0.raw", "bytes", to=10), BAD_INPUT, "expected 10 bytes, as in minimal.json, found 938"),
    (edit("files", "rank-0.raw", "crc32", to=2**32), BAD_INPUT, '"crc32"'),
    (edit("parameters", to=[]), BAD_INPUT, "expected parameters, found none"),
    (edit("parameters", 0, to=7), BAD_INPUT, '"name": expected a text, found nothing'),
    (edit("parameters", 1, "name", to="embed.weight"), BAD_INPUT, "embed.weight"),
    (edit("parameters", 0, "shape", to=[11, 7]), BAD_INPUT, "embed.weight"),
    (edit("parameters", 0, "shape", to=[2**33, 2**33]), BAD_INPUT, "embed.weight"),
    (edit("parameters", 0, "shape", to=[1] * 65), LIMIT, '"shape"'),
    (edit("parameters", 0, "states", to={}), BAD_INPUT, '"weight": expected an object, found nothing'),
    (edit("parameters", 0, "states", "color", to={}), UNSUPPORTED, '"embed.weight": color'),
    (edit("parameters", 0, "states", "weight", "dtype", to="float99"), UNSUPPORTED, '"float99"'),
    (edit("parameters", 0, "states", "weight", "dtype", to="int32"), UNSUPPORTED, '"int32"'),
    (edit("parameters", 0, "states", "weight", "dtype", to="float32"), BAD_INPUT, "938 bytes in total, found 1010"),
    (edit("parameters", 0, "states", "weight", "pieces", to=[]), BAD_INPUT, "embed.weight"),
    (edit("parameters", 0, "states", "weight", "pieces", to=list.pop), BAD_INPUT, "embed.weight"),
    (edit(*PIECE, "file", to="/etc/passwd"), BAD_INPUT, '"files" does not list "/etc/passwd"'),
    (edit(*PIECE, "offset", to=930), BAD_INPUT, "938 bytes of rank-0.raw, found one that ends at byte 1002"),
    (edit(*PIECE, "offset", to=2**64 - 1), BAD_INPUT, "overflows"),
    (edit(*PIECE, "offset", to=0.5), BAD_INPUT, '"offset"'),
    (edit(*PIECE, "start", to=[1, 0]), BAD_INPUT, "embed.weight"),
    (edit(*PIECE, "start", to=[0]), BAD_INPUT, "embed.weight"),
    (edit(*PIECE, "start", to=[2**64 - 1, 0]), BAD_INPUT, "embed.weight"),
    (edit(*PIECE, "shape", to=[6, 2**63]), BAD_INPUT, "embed.weight"),
]


class Damage(Minimal):
    def expect(self, code, *texts):
        """Converts the damaged source."""
        out = self.work / "out"
        done = load(self.source, out, "--format", "dcp")
        there = out.exists()
        shutil.rmtree(out, ignore_errors=True)
        self.assertEqual(done.returncode, code, done.stderr)
        for text in texts:
            self.assertIn(text, done.stderr)
        self.assertFalse(there)

    def test_a_wrong_index(self):
        path = self.source / "minimal.json"
        whole = path.read_text()
        for i, (change, code, text) in enumerate(EDITS):
            with self.subTest(edit=i, text=text):
                index = json.loads(whole)
                change(index)
                path.write_text(json.dumps(index))
                self.expect(code, text)

    def test_a_text_that_is_no_index(self):
        path = self.source / "minimal.json"
        whole = path.read_text()
        for text in ("", "{", "[]", "null", "7", "{}", whole[:len(whole) // 2], whole + "}", "\0" + whole):
            with self.subTest(text=text[:10]):
                path.write_text(text)
                self.expect(BAD_INPUT, "minimal.json")
        path.write_text("[" * 100000)
        self.expect(LIMIT, "minimal.json")

    def test_files_of_another_size(self):
        path = self.source / "rank-1.raw"
        whole = path.read_bytes()
        for data in (whole[:-1], whole + b"x"):
            path.write_bytes(data)
            self.expect(BAD_INPUT, f"{path}: expected {len(whole)} bytes", f"found {len(data)}")
        path.write_bytes(b"")
        self.expect(BAD_INPUT, f"{path}: the file is empty")

    def test_a_changed_byte(self):
        path = self.source / "rank-1.raw"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        self.expect(BAD_INPUT, "rank-1.raw")

    def test_missing_files(self):
        (self.source / "rank-1.raw").unlink()
        self.expect(NOT_FOUND, "minimal.json", "rank-1.raw")
        (self.source / "minimal.json").unlink()
        self.expect(NOT_FOUND, str(self.source))

    def test_a_link_that_leads_out_of_the_folder(self):
        for name in ("rank-0.raw", "minimal.json"):
            with self.subTest(name=name):
                shutil.move(self.source / name, self.work / name)
                (self.source / name).symlink_to(self.work / name)
                self.expect(BAD_INPUT, name)
                shutil.move(self.work / name, self.source / name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    LOAD = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
