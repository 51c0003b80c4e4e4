# SPDX-License-Identifier: Apache-2.0
"""Values that other tests have recorded: benchmarks, and resumes of real trainers."""

import csv
import re

from rows import ROOT, Wrong

BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESUMES = ROOT / "tests" / "interop" / "formats" / "results.tsv"


def benchmark(key):
    """\\returns the first statement of the row of docs/benchmarks.md that begins with the key"""
    for line in BENCHMARKS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0].startswith(key):
            return re.split(r" \(|, ", cells[1])[0]
    raise Wrong(f"docs/benchmarks.md has no row {key}")


def resumes(source):
    """\\param source  beginning of the names of the source checkpoints
    \\returns how many conversions real trainers resumed from, their equal tensors and the largest difference of a loss"""
    equal = tensors = count = 0
    largest = 0.0
    with RESUMES.open(encoding="utf-8", newline="") as file:
        for row in csv.reader((line for line in file if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE):
            if not row[0].startswith(source):
                continue
            same, of = row[5].split("/")
            count, equal, tensors, largest = count + 1, equal + int(same), tensors + int(of), max(largest, float(row[6]))
    if not count:
        raise Wrong(f"{RESUMES.name} has no source {source}")
    return (f"{count} resumes, {100 * equal / tensors:.1f} % of their tensors equal bit for bit, "
            f"losses differ by at most {largest:.2g}")


READERS = {"benchmark": benchmark, "resumes": resumes}
WRITERS = {"benchmark": "tests/perf/bench.py", "resumes": "tests/interop/formats/matrix.py --all --record"}


def value(row):
    """\\returns the recorded value of a row"""
    return READERS[row["recorded"]](row["key"])
