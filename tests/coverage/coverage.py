#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the lines and branches of lib/ that the tests run, by module, as gcov of the compiler counts them.

Usage: coverage.py [--target NAME]... [--tests REGEX] [--label LABEL]... [--gate MODULE]... [--missed MODULE] [--jobs N]
  --target NAME    build only this target (default all)
  --tests REGEX    run only tests with matching names
  --label LABEL    run tests with this label; default fast and mpi
  --gate MODULE    with --target or --tests: the gate of this module (or lib) holds all the same
  --missed MODULE  the lines of this module that no test runs, and those with branches that no test takes, by file
  --jobs N         compilers and tests at once; default SHARDWRIGHT_JOBS, or one per processor

The build is that of the preset cover: without optimisation, so that each branch is one of the text. Branches that only an
exception takes do not count, and a line of a template counts as run when one of its kinds has run it. A killed process
leaves no counts. Exits 1 below a gate: 90 % of the lines of lib, 95 % of the lines and 85 % of the branches of format,
os, layout and plan. With --target or --tests only those of --gate hold.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tests" / "docs"))

import tables  # pylint: disable=wrong-import-position

BUILD = ROOT / "build" / "cover"
LIB_LINES = 90.0
STRICT = {"files", "support/os", "engine/layout", "engine/plan"}
STRICT_LINES, STRICT_BRANCHES = 95.0, 85.0


def die(message):
    print(f"coverage: error: {message}", file=sys.stderr)
    sys.exit(2)


def build_and_run(asked):
    log = BUILD / "coverage.log"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:
        def run(*words):
            return subprocess.run(list(map(str, words)), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode

        targets = [word for name in asked.target for word in ("--target", name)]
        if run("cmake", "--preset", "cover", "-DSW_TORCH=off", "-DSW_CUDA=off") != 0 or \
                run("cmake", "--build", BUILD, "--parallel", asked.jobs, *targets) != 0:
            die(f"the build failed, log in {log}")
        for counts in BUILD.rglob("*.gcda"):
            counts.unlink()
        tests = ["-R", asked.tests] if asked.tests else []
        labels = f"^({'|'.join(asked.label or ['fast', 'mpi'])})$"
        code = run("ctest", "--test-dir", BUILD, "-L", labels, *tests, "--parallel", asked.jobs, "--output-on-failure", "--timeout", 1800)
    if code != 0:
        print(f"coverage: tests failed, log in {log}; what they ran counts all the same", file=sys.stderr)
    return code


class Counts:
    """Of the files of lib/: how often each line was run, and each branch of a line was taken."""

    def __init__(self):
        self.lines, self.branches = {}, {}

    def add(self, counted):
        for file in counted["files"]:
            path = os.path.normpath(file["file"])
            if not path.startswith(f"{ROOT}/lib/"):
                continue
            name = path[len(str(ROOT)) + 1:]
            for line in file["lines"]:
                at = (name, line["line_number"])
                self.lines[at] = self.lines.get(at, 0) + line["count"]
                taken = [branch["count"] for branch in line["branches"] if not branch["throw"]]
                known = self.branches.setdefault(at, [])
                known += [0] * (len(taken) - len(known))
                for i, count in enumerate(taken):
                    known[i] += count


def count_one(path):
    done = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", "--branch-counts", path], cwd=path.parent, capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]


def read_counts(jobs):
    counts = Counts()
    # Of lib/ also what no program has run.
    paths = sorted({*(BUILD / "lib").rglob("*.gcno"), *BUILD.rglob("*.gcda")} -
                   {path.with_suffix(".gcda") for path in (BUILD / "lib").rglob("*.gcno")})
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for counted in pool.map(count_one, paths):
            for one in counted:
                counts.add(one)
    return counts


def module_of(name):
    """The module of a file of lib/; of support and engine the submodule."""
    parts = name.split("/")
    return "/".join(parts[1:3]) if parts[1] in ("support", "engine") else parts[1]


def share(hit, all_of):
    return 100.0 * hit / all_of if all_of else 100.0


def report(counts, gates):
    """The table. Returns which of the modules in `gates` are below theirs."""
    rows = {}
    for (name, _), count in counts.lines.items():
        row = rows.setdefault(module_of(name), [0, 0, 0, 0])
        row[0] += count > 0
        row[1] += 1
    for (name, _), taken in counts.branches.items():
        row = rows[module_of(name)]
        row[2] += sum(count > 0 for count in taken)
        row[3] += len(taken)
    total = [sum(row[i] for row in rows.values()) for i in range(4)]
    below, table = sorted(gates - {*rows, "lib"}), []  # a module without any run line is below its gate, too
    for name, (hit, lines, taken, branches) in [*sorted(rows.items()), ("lib", total)]:
        of_lines, of_branches = share(hit, lines), share(taken, branches)
        table.append((f"`{name}`", lines, f"{of_lines:.1f} %", branches, f"{of_branches:.1f} %"))
        if name in gates & STRICT and (of_lines < STRICT_LINES or of_branches < STRICT_BRANCHES):
            below.append(name)
    if "lib" in gates and share(total[0], total[1]) < LIB_LINES:
        below.append("lib")
    tables.show(("Module", "Lines", "Run", "Branches", "Taken"), table)
    if gates:
        print("below its gate: " + ", ".join(below) if below else f"{', '.join(sorted(gates))}: above their gates")
    return below


def missed(counts, module):
    lines, branches = {}, {}
    for (name, line), count in sorted(counts.lines.items()):
        if count == 0 and name.startswith(f"lib/{module}/"):
            lines.setdefault(name, []).append(str(line))
    for (name, line), taken in sorted(counts.branches.items()):
        left = sum(count == 0 for count in taken)
        if left > 0 and name.startswith(f"lib/{module}/"):
            branches.setdefault(name, []).append(f"{line}({left}/{len(taken)})")
    for title, table in (("lines", lines), ("branches", branches)):
        for name, places in table.items():
            print(f"{title} of {name}: {' '.join(places)}")


def main():
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(__doc__.strip())
        return 0
    parser = argparse.ArgumentParser(prog="coverage.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--tests")
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--gate", action="append", choices=sorted({*STRICT, "lib"}))
    parser.add_argument("--missed")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("SHARDWRIGHT_JOBS") or os.cpu_count()))
    asked = parser.parse_args()
    code = build_and_run(asked)
    counts = read_counts(asked.jobs)
    if not counts.lines:
        die("no file of lib/ was run")
    if asked.missed:
        missed(counts, asked.missed)
    some = asked.target or asked.tests
    below = report(counts, set(asked.gate or ([] if some else {*STRICT, "lib"})))
    return 1 if below or code != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
