#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of docs/papers.md and records our values in tests/papers/results.

Usage: run.py BIN [--only ID]... [--slow] [--timed] [--check]
  BIN        folder of the built commands
  --only ID  only this row; may be repeated
  --slow     also rows that take minutes
  --timed    also rows that measure time; run them on an idle machine
  --check    record nothing; exit with code 1 if a value differs from the recorded one. Rows that measure time are not
             compared. Rows without their input are named and left out

Afterwards run tests/papers/page.py, which writes the page.
"""

import argparse
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import inputs  # pylint: disable=wrong-import-position
import rows  # pylint: disable=wrong-import-position
import values  # pylint: disable=wrong-import-position


def result_of(folder, bin_folder, command):
    """Runs a command in the folder. \\returns the `result` of its report"""
    program, *words = shlex.split(command)
    report = folder / "report.json"
    done = subprocess.run([str(bin_folder / program), *words, "-q", f"--json={report}"], cwd=folder, text=True,
                          capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(report.read_text(encoding="utf-8"))["result"]


def value_of(row, bin_folder):
    """Runs the commands of a row. \\returns our value"""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for wanted in row.get("inputs", []):
            inputs.make(wanted, folder)
        commands = rows.expanded(row)

        def run(command):
            return result_of(folder, bin_folder, command)

        if "compute" in row:
            return values.rendered(row["value"], [], getattr(values, row["compute"])(commands, run, folder))
        return values.rendered(row["value"], [run(command) for command in commands], {})


def machine():
    """\\returns the machine in words"""
    cpu = platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores of {cpu}, {platform.system()}"


def chosen(paper, arguments):
    """The rows of a paper to run."""
    for row in paper["rows"]:
        when = row.get("when", "quick")
        wanted = row["id"] in arguments.only if arguments.only else when == "quick" or getattr(arguments, when)
        if "commands" in row and wanted:
            yield row


def record(path, paper, found):
    """Writes new values into a results file, in the order of the rows."""
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    merged = old | found
    ordered = {row["id"]: merged[row["id"]] for row in paper["rows"] if row["id"] in merged}
    path.write_text(json.dumps({"rows": ordered}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    bin_folder = arguments.bin.resolve()
    recorded = rows.results() if arguments.check else {}
    ran, left_out, wrong = 0, [], []
    for name, paper in zip(rows.PAPERS, rows.published()):
        found = {}
        for row in chosen(paper, arguments):
            try:
                value = value_of(row, bin_folder)
                rows.check_value(row, value)
            except inputs.Missing as missing:
                left_out.append(f"{row['id']}: {missing}")
                continue
            except (rows.Wrong, RuntimeError) as error:
                wrong.append(str(error))
                continue
            ran += 1
            timed = row.get("when") == "timed"
            found[row["id"]] = {"value": value, "commands": rows.expanded(row)} | ({"machine": machine()} if timed else {})
            before = recorded.get(row["id"], {}).get("value")
            if arguments.check and not timed and value != before:
                wrong.append(f"{row['id']}: recorded \"{before}\", now \"{value}\"")
        if found and not arguments.check:
            record(rows.FOLDER / "results" / f"{name}.json", paper, found)
    for text in left_out:
        print(f"run.py: left out: {text}", file=sys.stderr)
    for text in wrong:
        print(f"run.py: error: {text}", file=sys.stderr)
    print(f"run.py: {ran} rows, {len(left_out)} left out, {len(wrong)} errors")
    return 1 if wrong or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
