# SPDX-License-Identifier: Apache-2.0
"""Files that must not be read: attacks, and objects that this program does not support."""

import io
import os
import pathlib
import pickle
import struct
import sys
import tarfile
import tempfile
import unittest
import zipfile

import numpy
import torch

from same import Probe

BAD_INPUT, LIMIT, UNSUPPORTED = 4, 8, 9


class Call:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class Setter:
    """Pickles with a function that sets its state: a call with a result that is dropped."""

    def __reduce__(self):
        return dict, (), None, None, None, None

    def __reduce_ex__(self, protocol):
        return numpy.float32, (1.0,), {"a": 1}, None, None, numpy.isfinite


def global_call(module, name, argument, protocol=2):
    """A hand-made pickle that calls module.name(argument)."""
    text = argument.encode()
    if protocol < 4:
        return (b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\nX"
                + struct.pack("<I", len(text)) + text + b"\x85R.")
    parts = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    return b"\x80\x04" + parts + b"\x93\x8c" + bytes([len(text)]) + text + b"\x85R."


class Refused(unittest.TestCase):
    probe = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "file.pt"
        self.marker = pathlib.Path(self.folder.name) / "executed"

    def tearDown(self):
        self.folder.cleanup()

    def refuse(self, code, *words):
        found, text = self.probe.run("dump", self.path)
        self.assertEqual(found, code, text)
        for word in words:
            self.assertIn(word, text)
        self.assertFalse(self.marker.exists(), "the pickle was executed")

    def write(self, data):
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_STORED) as out:
            out.writestr("archive/data.pkl", data)
            out.writestr("archive/version", "3\n")

    def test_calls_of_functions(self):
        attacks = [("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "check_output"),
                   ("builtins", "eval"), ("builtins", "exec"), ("__builtin__", "eval"), ("builtins", "__import__"),
                   ("sys", "exit"), ("importlib", "import_module"), ("runpy", "run_path"), ("shutil", "rmtree"),
                   ("socket", "create_connection"), ("pty", "spawn"), ("ctypes", "CDLL"), ("code", "interact"),
                   ("pickle", "loads"), ("_pickle", "loads"), ("types", "CodeType"), ("functools", "reduce"),
                   ("operator", "methodcaller"), ("webbrowser", "open"), ("commands", "getoutput"),
                   ("asyncio", "run"), ("multiprocessing.util", "spawnv_passfds"), ("io", "open"),
                   ("torch.hub", "load"), ("torch", "load"), ("torch.serialization", "os.system"),
                   ("numpy.testing._private.utils", "runstring"), ("torch.serialization", "os"),
                   ("argparse", "Namespace.__init__.__globals__")]
        command = f"touch {self.marker}"
        for module, name in attacks:
            for protocol in (2, 4):
                with self.subTest(module=module, name=name, protocol=protocol):
                    if protocol == 2 and "." in name:
                        continue  # protocol 2 has no dotted names
                    self.write(global_call(module, name, command, protocol))
                    self.refuse(BAD_INPUT, "refused")

    def test_pickled_by_python(self):
        command = f"touch {self.marker}"
        for call in (Call(os.system, command), Call(eval, "1"), Call(getattr, os, "system")):
            for protocol in (2, 3, 4, 5):
                try:
                    data = pickle.dumps({"a": [call]}, protocol)
                except TypeError:
                    continue  # modules cannot be pickled
                with self.subTest(protocol=protocol):
                    self.write(data)
                    self.refuse(BAD_INPUT, "refused")

    def test_attributes_that_lead_to_code(self):
        for name in ("__globals__", "__init__", "os", "sys"):
            self.write(b"\x80\x02c__builtin__\ngetattr\nctorch\nTensor\nX"
                       + struct.pack("<I", len(name)) + name.encode() + b"\x86R.")
            self.refuse(BAD_INPUT, "refused", name)

    def test_call_of_an_instance(self):
        self.write(b"\x80\x02cargparse\nNamespace\n)\x81(K\x01tR.")
        self.refuse(BAD_INPUT, "not a class")

    def test_dropped_call(self):
        self.write(pickle.dumps(Setter(), 4))
        self.refuse(UNSUPPORTED, "dropped")

    def test_unsupported_tensors(self):
        dense = torch.eye(3)
        kinds = {
            "sparse": dense.to_sparse(), "csr": dense.to_sparse_csr(), "meta": torch.empty(3, device="meta"),
            "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
        for name, tensor in kinds.items():
            with self.subTest(name=name):
                torch.save({"t": tensor}, self.path)
                self.refuse(UNSUPPORTED, "byte")

    def test_bare_storage(self):
        torch.save(torch.ones(3).untyped_storage(), self.path)
        self.refuse(UNSUPPORTED, "not part of a tensor")

    def test_graph_with_a_cycle(self):
        loop = []
        loop.append({"back": loop})
        torch.save(loop, self.path)
        self.refuse(UNSUPPORTED, "contains itself")

    def test_deep_nesting(self):
        self.write(b"\x80\x02" + b"]" * 3001 + b"a" * 3000 + b".")
        self.refuse(LIMIT, "deeper")

    def test_other_kinds_of_files(self):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(self.path))
        self.refuse(UNSUPPORTED, "TorchScript")
        with tarfile.open(self.path, "w") as out:
            out.addfile(tarfile.TarInfo("storages"), io.BytesIO())
        self.refuse(UNSUPPORTED, "tar")
        self.path.write_bytes(struct.pack("<Q", 2) + b"{}")
        self.refuse(UNSUPPORTED, "safetensors")
        self.path.write_bytes(pickle.dumps({"a": 1}, 2))
        self.refuse(BAD_INPUT, "not a torch.save file")
        self.path.write_bytes(b"")
        self.refuse(BAD_INPUT, "not a torch.save file")

    def test_module_in_a_legacy_stream(self):
        torch.save(torch.nn.Linear(2, 2), self.path, _use_new_zipfile_serialization=False)
        code, text = self.probe.run("dump", self.path)
        self.assertIn(code, (0, UNSUPPORTED), text)

    def test_every_truncation(self):
        for legacy in (False, True):
            torch.save({"a": torch.ones(5), "b": [1, "x"]}, self.path, _use_new_zipfile_serialization=not legacy)
            whole = self.path.read_bytes()
            for size in range(0, len(whole), 7):
                self.path.write_bytes(whole[:size])
                self.refuse(BAD_INPUT)

    def test_compressed_members(self):
        torch.save({"a": torch.ones(500)}, self.path)
        for squeezed in ("data.pkl", "data/0"):
            other = pathlib.Path(self.folder.name) / "other.zip"
            with zipfile.ZipFile(self.path) as old, zipfile.ZipFile(other, "w") as new:
                for name in old.namelist():
                    method = zipfile.ZIP_DEFLATED if name.endswith(squeezed) else zipfile.ZIP_STORED
                    new.writestr(name, old.read(name), method)
            code, text = self.probe.run("dump", other)
            self.assertEqual(code, UNSUPPORTED, text)
            self.assertIn(squeezed, text)

    def test_flipped_bit_of_data_pkl(self):
        torch.save({"a": torch.ones(5)}, self.path)
        whole = bytearray(self.path.read_bytes())
        whole[whole.index(b"FloatStorage")] ^= 1
        self.path.write_bytes(whole)
        self.refuse(BAD_INPUT, "CRC")


if __name__ == "__main__":
    Refused.probe = Probe(sys.argv.pop(1))
    unittest.main()
