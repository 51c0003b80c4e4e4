#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Broken and hostile checkpoints against the built commands, one per rule.

Usage: hostile_test.py BIN_FOLDER [--thorough] [--traced] [--group NAME]...

Each case is made from the small checkpoint that the project carries. The command must reject it with
a documented exit code and a message that names the file, leaving no output and running nothing; or,
for damage to unused bytes, give exactly the output of the sound checkpoint.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import bench as at  # pylint: disable=wrong-import-position
import broken_checkpoints  # pylint: disable=wrong-import-position
import broken_files  # pylint: disable=wrong-import-position
import broken_folders  # pylint: disable=wrong-import-position
import broken_graphs  # pylint: disable=wrong-import-position
import broken_rows  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position
from harness import Broken, Log, Scratch  # pylint: disable=wrong-import-position

GROUPS = {
    "truncated": broken_files.truncations,
    "flips": broken_files.flips,
    "real": broken_files.real_flips,
    "archives": lambda bench, _: broken_files.archive_jobs(bench),
    "pickles": lambda bench, _: broken_files.pickle_jobs(bench),
    "checkpoints": lambda bench, _: broken_checkpoints.checkpoint_jobs(bench),
    "folders": lambda bench, _: broken_folders.folder_jobs(bench),
    "names": lambda bench, _: broken_checkpoints.name_jobs(bench),
    "others": lambda bench, _: broken_checkpoints.other_jobs(bench),
    "rows-truncated": broken_rows.truncations,
    "rows-flips": broken_rows.flips,
    "rows-swaps": broken_rows.swaps,
    "rows-folders": broken_rows.folders,
    "rows-archives": broken_rows.archives,
    "rows-pickles": broken_rows.pickles,
    "rows-documents": broken_rows.documents,
    "rows-indexes": broken_graphs.indexes,
    "rows-types": broken_graphs.types,
    "rows-names": broken_graphs.names,
}


def rows(counts):
    """For the table. \param counts  by kind of damage and, after a comma, outcome"""
    refused, accepted = collections.Counter(), collections.defaultdict(list)
    for name, count in sorted(counts.items()):
        what, _, ending = name.rpartition(", ")
        if ending == "refused":
            refused[what] += count
        else:
            accepted[what].append(f"{count:,} {ending}")
    return [(what, refused[what], ", ".join(accepted[what])) for what in sorted({*refused, *accepted})]


def perform(jobs, workers):
    failures = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(job) for job in jobs]:
            try:
                done.result()
            except Exception as broken:  # pylint: disable=broad-exception-caught
                failures.append(str(broken))
                what = broken if isinstance(broken, Broken) else f"the test itself: {broken!r}"
                print(f"FAILED: {what}", flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--sanitized", action="store_true", help="no limit on address space")
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--traced", action="store_true", help="watched by strace, within 256 MiB and 2 s")
    arguments = parser.parse_args()
    log = Log()
    failures = []
    with Scratch("hostile-") as folder:
        bench = at.Bench(arguments.bin, folder, arguments.sanitized, arguments.traced)
        bench.prepare()
        for name in arguments.group or GROUPS:
            jobs = GROUPS[name](bench, arguments.thorough)
            if arguments.sanitized and not arguments.thorough and name.startswith("rows-"):
                jobs = jobs[::3]  # every start is slow
            failures += perform(jobs, os.cpu_count() or 1)
            log(f"{name}: {len(jobs)} cases")
    tables.show(("What", "Refused", "Accepted"), rows(bench.counts))
    print(f"hostile: {sum(bench.counts.values())} cases, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
