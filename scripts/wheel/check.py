#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel: its files, its dependencies, its size, and that no file reveals the build folder.

Usage: check.py WHEEL [FOLDER...]
  FOLDER  must not be named anywhere in it
Exits 1 with one line per violation.
"""

import io
import pathlib
import re
import sys
import zipfile

from elftools.elf.elffile import ELFFile

BYTES_MAX = 25 * 10**6
COMMANDS = {"ucp-extract", "ucp-union", "ucp-load", "pec-save", "pec-restore", "moe-replace"}
PLUGINS = {f"lib/shardwright/shardwright_mpi_{family}.so" for family in ("openmpi", "mpich")}
LIBRARY = "lib/libshardwright_commands.so"
OPERATORS = "shardwright/libshardwright_torch.so"
GLIBC = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux-x86-64\.so\.2")
OTHERS = {OPERATORS: {"libgcc_s.so.1", "libtorch_cpu.so"}} | {f"data/{plugin}": {"libgcc_s.so.1"} for plugin in PLUGINS} | {
    f"scripts/{command}": {"libshardwright_commands.so"} for command in COMMANDS}


def needed(data):
    dynamic = ELFFile(io.BytesIO(data)).get_section_by_name(".dynamic")
    return {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}


def violations(path, folders):
    if path.stat().st_size > BYTES_MAX:
        yield f"the wheel has {path.stat().st_size} bytes, at most {BYTES_MAX} are allowed"
    with zipfile.ZipFile(path) as wheel:
        entries = {re.sub(r"^shardwright-[^/]*\.data/", "", entry.filename): entry
                   for entry in wheel.infolist() if not entry.is_dir()}
        scripts = {name.removeprefix("scripts/") for name in entries if name.startswith("scripts/")}
        if scripts != COMMANDS:
            yield f"scripts {sorted(COMMANDS)} expected, found {sorted(scripts)}"
        for name in sorted({f"data/{plugin}" for plugin in PLUGINS} | {f"data/{LIBRARY}", OPERATORS, "shardwright/__init__.py"}
                           | {f"data/share/man/man1/{command}.1" for command in COMMANDS}):
            if name not in entries:
                yield f"{name} is missing"
        if len({entry.date_time for entry in entries.values()}) != 1:
            yield "the modification times of files differ"
        for name, entry in entries.items():
            data = wheel.read(entry)
            for folder in folders:
                if re.search(re.escape(folder.encode()) + rb"(?![\w-])", data):
                    yield f"{name} contains the path {folder}"
            if not data.startswith(b"\x7fELF"):
                if name.startswith("scripts/"):
                    yield f"{name} is not a program"
                continue
            if name.startswith("scripts/") and not entry.external_attr >> 16 & 0o111:
                yield f"{name} cannot be executed"
            for library in sorted(needed(data) - OTHERS.get(name, set())):
                if not GLIBC.fullmatch(library):
                    yield f"{name} depends on {library}, which is not allowed"


if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
found = list(violations(pathlib.Path(sys.argv[1]), sys.argv[2:]))
print("\n".join(found), end="\n" if found else "", file=sys.stderr)
sys.exit(1 if found else 0)
