# SPDX-License-Identifier: Apache-2.0
"""The rows of a matrix of conversions: which of them run, what became of them, and the table of it in the documents.

    results.py TABLE RESULTS    prints the table in Markdown; fails if a row of TABLE has no result, or RESULTS has another
"""

import fcntl
import pathlib
import sys
import tempfile
import time

# Columns of matrix.tsv and of results.tsv. The columns in KEY identify a row.
KEY = ("source", "convert", "judge", "ranks", "case")
ROW = ("sample", *KEY)
RESULT = (*KEY, "tensors", "losses", "versions")
FAILS = "fails"  # in place of tensors and losses
SKIPPED = 77
HEAD = """# What was seen of each row of {table}.tsv. Written by {table}.py --all --record: change that, not this file. After what
# the row asks for: tensors that the trainer holds bit for bit of how many, the largest difference of a loss of the next
# steps ("fails" in both where it does not go on), and the versions of its programs.
"""


def rows(path, columns):
    """The rows of a file of tab-separated cells, a dict each; lines that begin with # are left out."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) != len(columns):
            sys.exit(f"{path}:{number}: {len(columns)} columns expected, found {len(cells)}")
        found.append(dict(zip(columns, cells)))
    return found


def key(row):
    return tuple(row[column] for column in KEY)


def good(path):
    """The keys of results that hold; none where there are no results yet."""
    return {key(result) for result in rows(path, RESULT) if result["tensors"] != FAILS} if path.exists() else set()


def record(path, table, row, seen, versions):
    """Writes the results of a row (tensors and losses, or None) into the results. They have the order of the rows of
    `table` (matrix.tsv, as it is now), and those that it no longer has go."""
    with open(pathlib.Path(tempfile.gettempdir()) / "shardwright-matrix.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may each do a part of the rows
        known = {key(result): result for result in rows(path, RESULT)} if path.exists() else {}
        tensors, losses = seen or (FAILS, FAILS)
        known[key(row)] = row | {"tensors": tensors, "losses": losses, "versions": versions}
        lines = ["\t".join(known[key(want)][column] for column in RESULT) for want in rows(table, ROW) if key(want) in known]
        path.write_text(HEAD.format(table=table.stem) + "".join(line + "\n" for line in lines), encoding="utf-8")


def options(parser):
    """The arguments of every matrix."""
    parser.add_argument("fixtures", type=pathlib.Path)
    parser.add_argument("--all", action="store_true", help="not only the rows of the sample")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose names have this")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", help="write what was seen into this file")
    parser.add_argument("--new", action="store_true", help="only rows of which that file has no good result")


def run(asked, table, versions, name, outcome):
    """Runs the requested rows of `table`, prints a line for each, and returns the exit code of the matrix.

    name(row)      name of a row, which --only looks at too
    versions(row)  of the programs that verify it, as text; None if they are not here, and the row is left out
    outcome(row)   True if the row passes, and (tensors, losses); or False, and the reason
    """
    if asked.new and not asked.record:
        sys.exit("--new needs --record")
    counts = {"passed": 0, "failed": 0, "left out": 0}
    done = good(asked.record) if asked.new else set()
    for row in rows(table, ROW):
        called = name(row)
        if key(row) in done or not (asked.all or row["sample"] == "x") or not all(text in called for text in asked.only):
            continue
        seen_with, begun = versions(row), time.monotonic()
        if seen_with is None:
            print(f"left out: {called}: {row['judge']} is not installed (scripts/peers)", flush=True)
            counts["left out"] += 1
            continue
        holds, seen = outcome(row)
        told = f"tensors {seen[0]}, losses off by {seen[1]}" if holds else seen
        print(f"{'ok    ' if holds else 'FAILED'} {called}: {told} ({time.monotonic() - begun:.0f} s)", flush=True)
        counts["passed" if holds else "failed"] += 1
        if asked.record:
            record(asked.record, table, row, seen if holds else None, seen_with)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    if counts["failed"]:
        return 1
    return 0 if counts["passed"] else SKIPPED


def markdown(wanted, found):
    """Lines of Markdown."""
    known = {key(result): result for result in found}
    missing = [want for want in wanted if key(want) not in known]
    if missing or len(known) != len(wanted):
        unwanted = set(known) - set(map(key, wanted))
        sys.exit("\n".join([f"no result: {want['source']} -> {want['convert']}, {want['judge']}" for want in missing] +
                           [f"not in the matrix: {' '.join(result)}" for result in sorted(unwanted)] +
                           ["run matrix.py --all --record tests/interop/formats/results.tsv"]))
    yield "| source | `ucp-load` flags | resumed by | bit-identical tensors | largest loss difference |"
    yield "|---|---|---|---|---|"
    for want in wanted:
        seen = known[key(want)]
        ranks = f"{want['ranks']} rank" + ("s" if want["ranks"] != "1" else "")
        yield (f"| {want['source']} | `{want['convert']}` | {want['judge']}, {ranks} | {seen['tensors']} | "
               f"{seen['losses']} |")


def main():
    wanted, found = rows(pathlib.Path(sys.argv[1]), ROW), rows(pathlib.Path(sys.argv[2]), RESULT)
    if len({key(want) for want in wanted}) != len(wanted):
        sys.exit(f"{sys.argv[1]}: a row is there twice")
    print("\n".join(markdown(wanted, found)))
    print()
    versions = sorted({version for seen in found for version in seen["versions"].split(", ")})
    print(f"Tested with {', '.join(versions)}.")


if __name__ == "__main__":
    main()
