#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of a command: CASE.sh, and its expected output, exit code and files.

The folder of CASE.sh has CASE.stdout, CASE.stderr, CASE.exit and CASE.disk (paths below the scratch folder
that the case runs in, folders with a slash). A missing one stands for an empty one, .exit for 0.
--refresh writes them; read the difference before committing it.
"""

import argparse
import concurrent.futures
import difflib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Text that differs from run to run or from machine to machine.
VARYING = [
    (re.compile(r"\b\d+(\.\d+)? [KMGT]?i?B/s"), "<rate>"),
    (re.compile(r"\b(\d+ h \d+ min|\d+ min \d+ s|\d+(\.\d+)? m?s)\b"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"), "<when>"),
    (re.compile(r'("(?:seconds|peak_memory_bytes|bytes_per_second|seconds_left)": ?)[0-9.e+-]+'), r"\1<n>"),
    (re.compile(r'("version": )"[0-9.]+"'), r'\1"<version>"'),
]
TIMEOUT_SECONDS = 600


def normal(text, scratch):
    text = text.replace(str(scratch), "<scratch>")
    for pattern, to in VARYING:
        text = pattern.sub(to, text)
    return text


def disk(scratch):
    paths = []
    for folder, names, files in os.walk(scratch):
        for name in names + files:
            path = pathlib.Path(folder, name)
            paths.append(str(path.relative_to(scratch)) + ("/" if path.is_dir() else ""))
    return "".join(path + "\n" for path in sorted(paths))


def run_case(script, bin_dirs):
    """Returns the results of the case, by suffix of the file with the expected result."""
    with tempfile.TemporaryDirectory(prefix="sw-case-") as scratch:
        scratch = os.path.realpath(scratch)
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith(("SHARDWRIGHT_", "NO_COLOR"))}
        environment.update(PATH=os.pathsep.join([*bin_dirs, os.environ["PATH"]]), LC_ALL="C.UTF-8",
                           TERM="dumb", CASE_DIR=str(script.parent))
        done = subprocess.run(["bash", "-u", str(script)], cwd=scratch, env=environment,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS,
                              check=False)
        return {
            ".stdout": normal(done.stdout.decode(errors="backslashreplace"), scratch),
            ".stderr": normal(done.stderr.decode(errors="backslashreplace"), scratch),
            ".exit": f"{done.returncode}\n",
            ".disk": disk(scratch),
        }


def expected(script, suffix):
    path = script.with_suffix(suffix)
    if path.exists():
        return path.read_text()
    return "0\n" if suffix == ".exit" else ""


def refresh(script, found):
    for suffix, text in found.items():
        path = script.with_suffix(suffix)
        if text == ("0\n" if suffix == ".exit" else ""):
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)


def judge(script, found):
    """Returns the differences as text, empty if there is none."""
    out = []
    for suffix, text in found.items():
        out += difflib.unified_diff(expected(script, suffix).splitlines(), text.splitlines(),
                                    f"{script.stem}{suffix} expected", f"{script.stem}{suffix} found",
                                    lineterm="")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="folder of the cases")
    parser.add_argument("--bin", action="append", default=[], metavar="DIR", help="where commands are")
    parser.add_argument("--command", action="append", default=[], metavar="NAME=PATH",
                        help="a command that is not called like its file")
    parser.add_argument("--only", metavar="CASE", help="run this case alone")
    parser.add_argument("--refresh", action="store_true", help="take what is found for what is expected")
    arguments = parser.parse_args()
    scripts = sorted(arguments.folder.resolve().glob(f"{arguments.only or '*'}.sh"))
    if not scripts:
        parser.error(f"{arguments.folder}: no cases")
    failures = 0
    with tempfile.TemporaryDirectory(prefix="sw-bin-") as links:
        for command in arguments.command:
            name, path = command.split("=", 1)
            os.symlink(os.path.abspath(path), os.path.join(links, name))
        bin_dirs = [links, *map(os.path.abspath, arguments.bin)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda script: run_case(script, bin_dirs), scripts))
    for script, found in zip(scripts, results):
        if arguments.refresh:
            refresh(script, found)
        elif difference := judge(script, found):
            failures += 1
            print(f"{script.stem}: differs\n{difference}\n")
    print(f"{len(scripts)} cases, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
