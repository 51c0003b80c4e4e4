#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Large inputs: a storage above 4 GiB, 10,000 files, names of 1,000 characters, written and read by PyTorch and
safetensors.

Usage: large_test.py BIN PT_PROBE [--files N] [--gigabytes N]

Takes twice the storage on the disk of TMPDIR, and once in memory.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

import safetensors.torch  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position
from harness import Broken, expect, succeed  # pylint: disable=wrong-import-position

MARKS = (0, 12345, -1)


def marked(elements):
    """A tensor of zeros with numbers where a wrong offset would show: below and above 4 GiB, first and last."""
    tensor = torch.zeros(elements, dtype=torch.int32)
    for place in (*MARKS, elements // 2, min(elements - 2, 2**30 + 1)):
        tensor[place] = place % 1000003 + 1
    return tensor


def same(found, wanted, what):
    expect(found.dtype == wanted.dtype and found.shape == wanted.shape, f"{what}: {found.dtype} {found.shape}")
    expect(torch.equal(found, wanted), f"{what}: other numbers")


def storage(arguments, folder):
    """One storage of so many GiB through the reader and writer of .pt, and through safetensors."""
    wanted = marked(arguments.gigabytes * 2**28 + 100000)
    small = torch.arange(10)
    torch.save({"large": wanted, "after": small}, folder / "theirs.pt")
    expect((folder / "theirs.pt").stat().st_size > 2**32 or arguments.gigabytes < 4, "the file is small")
    succeed([arguments.probe, "rewrite", folder / "theirs.pt", folder / "ours.pt"], deadline=3600)
    (folder / "theirs.pt").unlink()
    found = torch.load(folder / "ours.pt", weights_only=True, mmap=True)
    same(found["large"], wanted, "the large storage, written by us")
    same(found["after"], small, "what follows it")
    del found
    (folder / "ours.pt").unlink()
    source = folder / "source"
    source.mkdir()
    safetensors.torch.save_file({"a": small, "large": wanted}, source / "model.safetensors")
    one_file = f"shard-size={arguments.gigabytes + 2}GB"
    succeed([arguments.bin / "ucp-load", source, folder / "out", "--format", "safetensors", "--target", one_file,
             "--verify=readback"], deadline=3600)
    succeed([arguments.bin / "ucp-load", "--check", source, folder / "out"], deadline=3600)
    (source / "model.safetensors").unlink()
    with safetensors.safe_open(folder / "out" / "model.safetensors", "pt") as opened:
        same(opened.get_tensor("large"), wanted, "the large tensor of safetensors")
        same(opened.get_tensor("a"), small, "what lies beside it")
    (folder / "out" / "model.safetensors").unlink()


def files(arguments, folder):
    """So many files with an index, and names of 1,000 characters."""
    source, names = folder / "many", {}
    source.mkdir()
    count = arguments.files
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        name = f"layers.{i}." + "n" * (1000 - len(f"layers.{i}."))
        names[name] = file
        safetensors.torch.save_file({name: torch.full((3,), i, dtype=torch.int32)}, source / file)
    text = ",".join(f'"{name}":"{file}"' for name, file in names.items())
    (source / "model.safetensors.index.json").write_text('{"metadata":{},"weight_map":{' + text + "}}")
    began = time.monotonic()
    succeed([arguments.bin / "ucp-load", source, folder / "one", "--format", "safetensors"], deadline=3600)
    seconds = time.monotonic() - began
    found = safetensors.torch.load_file(folder / "one" / "model.safetensors")
    expect(found.keys() == names.keys(), f"{len(found)} names of {len(names)}")
    for i, name in enumerate(names):
        same(found[name], torch.full((3,), i, dtype=torch.int32), name[:20])
    succeed([arguments.bin / "ucp-load", "--check", source, folder / "one"], deadline=3600)
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("probe", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--gigabytes", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sw-large-", dir=os.environ.get("TMPDIR", "/tmp")) as name:
        folder = pathlib.Path(name)
        try:
            seconds = files(arguments, folder)
            storage(arguments, folder)
        except Broken as broken:
            print(f"VIOLATION: {broken}")
            return 1
    print(f"large: {arguments.files} files with names of 1,000 characters read in {seconds:.1f} s, a storage of "
          f"{arguments.gigabytes} GiB through .pt and safetensors, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
