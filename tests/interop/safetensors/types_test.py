# SPDX-License-Identifier: Apache-2.0
"""Every element type: files of the safetensors package to the commands and back, and conversions against PyTorch's.

    types_test.py BIN LAUNCHER
"""

import json
import pathlib
import struct
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import commands
import safetensors
import safetensors.torch
import torch

TYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
         "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
         "float8_e8m0fnu", "float4_e2m1fn_x2"]
SHAPES = {"scalar": (), "empty": (3, 0), "odd": (7,), "matrix": (3, 8)}


def random_bytes(count, seed):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make(dtype, shape, seed):
    """A tensor of any bits, of one element at least; bool has no bits but the last."""
    count = 1
    for extent in shape:
        count *= extent
    data = random_bytes(count * dtype.itemsize, seed)
    if dtype == torch.bool:
        return (data & 1).bool().reshape(shape)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor):
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def header(path):
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length]), length


class Types(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def source(self, tensors, metadata=None):
        folder = self.folder / "source"
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata)
        return folder

    def test_every_type_goes_through(self):
        tensors = {}
        for seed, name in enumerate(TYPES):
            dtype = getattr(torch, name)
            for kind, shape in SHAPES.items():
                if name.startswith("float4") and not shape:
                    continue  # two values in a byte: there is no scalar
                tensors[f"{name}.{kind}"] = make(dtype, shape, seed)
        source = self.source(tensors, {"format": "pt", "note": "kept"})
        self.ucp.run("ucp-load", source, self.folder / "out", "--format", "safetensors")
        written = self.folder / "out" / "model.safetensors"
        found = safetensors.torch.load_file(written)
        self.assertEqual(sorted(found), sorted(tensors))
        for name, tensor in tensors.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertEqual(bits(found[name]), bits(tensor), name)
        with safetensors.safe_open(written, "pt") as opened:
            self.assertEqual(opened.metadata()["note"], "kept")
        # The order of the package, and every tensor on a multiple of its element.
        theirs, _ = header(source / "model.safetensors")
        ours, length = header(written)
        self.assertEqual((8 + length) % 8, 0)
        self.assertEqual([name for name in theirs if name != "__metadata__"],
                         [name for name in ours if name != "__metadata__"])
        for name, entry in ours.items():
            if name != "__metadata__":
                self.assertEqual((8 + length + entry["data_offsets"][0]) % tensors[name].dtype.itemsize, 0, name)
        self.ucp.run("ucp-load", "--check", source, self.folder / "out")

    def test_six_bit_types_pass_their_reader(self):
        source = self.folder / "source"
        source.mkdir()
        data = bytes(range(18))
        text = json.dumps({"a": {"dtype": "F6_E3M2", "shape": [3, 4], "data_offsets": [0, 9]},
                           "b": {"dtype": "F6_E2M3", "shape": [12], "data_offsets": [9, 18]}}).encode()
        (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        self.ucp.run("ucp-load", source, self.folder / "out", "--format", "safetensors")
        with safetensors.safe_open(self.folder / "out" / "model.safetensors", "pt") as opened:
            self.assertEqual(sorted(opened.keys()), ["a", "b"])
            self.assertEqual(opened.get_slice("a").get_shape(), [3, 4])
            self.assertEqual(opened.get_slice("b").get_dtype(), "F6_E2M3")
        self.assertEqual((self.folder / "out" / "model.safetensors").read_bytes()[-18:], data)

    def test_conversions_are_those_of_torch(self):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
        wide = torch.randint(-2**31, 2**31 - 1, (200_000,), dtype=torch.int32,
                             generator=torch.Generator().manual_seed(1)).view(torch.float32)
        near = torch.cat([every.float() * (1 + delta) for delta in (0, 2**-9, -2**-9, 2**-20, -2**-20)])
        values = torch.cat([every.float(), wide, near])
        source = self.source({"w": values}, {"format": "pt"})
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
            with self.subTest(dtype=name):
                out = self.folder / name
                self.ucp.run("ucp-load", source, out, "--format", "safetensors", "--target", f"dtype={name}")
                found = safetensors.torch.load_file(out / "model.safetensors")["w"]
                wanted = values.to(getattr(torch, name))
                self.assertEqual(found.dtype, wanted.dtype)
                number = ~wanted.float().isnan()
                self.assertTrue(torch.equal(found.float().isnan(), ~number), "NaN elsewhere")
                # Bits, so that zeros have their sign.
                whole = torch.uint8 if found.itemsize == 1 else torch.int16
                self.assertTrue(torch.equal(found.view(whole)[number], wanted.view(whole)[number]))

    def test_eight_bit_weights_stay_as_they_are(self):
        weight = make(torch.float8_e4m3fn, (4, 8), 3)
        source = self.source({"w": weight, "w_scale": torch.ones(4), "n": torch.arange(3)})
        said = self.ucp.run("ucp-load", source, self.folder / "out", "--format", "safetensors", "--target",
                            "dtype=bf16")
        found = safetensors.torch.load_file(self.folder / "out" / "model.safetensors")
        self.assertEqual(bits(found["w"]), bits(weight))
        self.assertEqual(found["w_scale"].dtype, torch.float32)
        self.assertEqual(found["n"].dtype, torch.int64)
        self.assertIn("1 tensor of float8_e4m3fn", said)


if __name__ == "__main__":
    Types.ucp = commands.from_arguments()
    unittest.main()
