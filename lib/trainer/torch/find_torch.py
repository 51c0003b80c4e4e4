# SPDX-License-Identifier: Apache-2.0
"""Prints where PyTorch is, its version and that of this Python, for CMake: "FOLDER;2.15.0;3.11"."""

import importlib.util
import pathlib
import re
import sys

OLDEST = (2, 10)

spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit(f"{sys.executable}: torch is not installed")
folder = pathlib.Path(spec.submodule_search_locations[0])
text = (folder / "version.py").read_text(encoding="utf-8")
version = re.search(r"__version__ = '([^']*)'", text).group(1)
if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
    sys.exit(f"torch {version} in {folder}: {'.'.join(map(str, OLDEST))} or newer expected")
if not (folder / "include/torch/csrc/stable/library.h").exists():
    sys.exit(f"torch {version} in {folder}: its headers are missing")
print(folder, version, f"{sys.version_info[0]}.{sys.version_info[1]}", sep=";")
