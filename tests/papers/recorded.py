# SPDX-License-Identifier: Apache-2.0
"""Values that other tests have recorded: benchmarks, resumes of real trainers, and throughput in simulated failures."""

import csv
import re

from rows import ROOT, Wrong

BENCHMARKS = ROOT / "docs" / "benchmarks.md"
INTEROP = ROOT / "docs" / "interop.md"
LOSSLESS = ROOT / "docs" / "lossless.md"
PLACEMENT = ROOT / "docs" / "placement.md"
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


def pipelines(key):
    """\\returns what DeepSpeed found when it resumed the conversions of a row of docs/interop.md that begins with the key"""
    for line in INTEROP.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(f"| {key} ") and len(cells) == 4:
            return f"{cells[1]} to {cells[2]}: all tensors equal bit for bit, losses differ by at most {cells[3]}"
    raise Wrong(f"docs/interop.md has no row {key}")


def throughput(figure):
    """\\returns the ratios of lazarus to DeepSpeed for GPT-S and GPT-L, in the table of docs/placement.md"""
    found = re.findall(rf"^\| {figure}\b[^|]*\| GPT-[SL] \| ([0-9.]+) \|", PLACEMENT.read_text(encoding="utf-8"), re.MULTILINE)
    if len(found) != 2:
        raise Wrong(f"docs/placement.md has {len(found)} ratios of figure {figure}, not 2")
    return " and ".join(found) + " times"


def peer_gradients(names):
    """\\param names  rows of the table in docs/lossless.md, separated by ";"
    \\returns times fewer bytes of copies with gradients"""
    found = []
    for name in names.split(";"):
        cells = re.findall(rf"^\| {name} \| \S+ \| \S+ \| ([0-9.]+) \|$", LOSSLESS.read_text(encoding="utf-8"), re.MULTILINE)
        if len(cells) != 1:
            raise Wrong(f"docs/lossless.md has {len(cells)} rows \"{name}\", not 1")
        found += cells
    return ", ".join(found)


READERS = {"benchmark": benchmark, "steps": benchmark, "resumes": resumes, "pipelines": pipelines, "throughput": throughput,
           "peer_gradients": peer_gradients}
WRITERS = {"benchmark": "tests/perf/bench.py", "steps": "tests/perf/table3.py", "resumes": "tests/interop/formats/matrix.py --all --record",
           "pipelines": "tests/interop/megatron_deepspeed/resume_test.py --all", "throughput": "ctest -R placement_trace_test",
           "peer_gradients": "ctest -R cli_pec_peer_gradients"}


def value(row):
    """\\returns the recorded value of a row"""
    return READERS[row["recorded"]](row["key"])
