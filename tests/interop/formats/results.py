"""What became of the rows of matrix.tsv, and the table of it in the documents.

    results.py TABLE RESULTS    prints the table in Markdown; fails if a row of TABLE has no result, or RESULTS has another
"""

import fcntl
import pathlib
import sys
import tempfile

# Columns of matrix.tsv and of results.tsv. A row is known by what it asks for, its KEY.
KEY = ("source", "convert", "judge", "ranks", "case")
ROW = ("sample", *KEY)
RESULT = (*KEY, "tensors", "losses", "versions")
FAILS = "fails"  # in place of tensors and losses
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
    """Writes what was seen of a row (tensors and losses, or None) into the results. They have the order of the rows of
    `table` (matrix.tsv, as it is now), and those that it no longer has go."""
    with open(pathlib.Path(tempfile.gettempdir()) / "shardwright-matrix.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may each do a part of the rows
        known = {key(result): result for result in rows(path, RESULT)} if path.exists() else {}
        tensors, losses = seen or (FAILS, FAILS)
        known[key(row)] = row | {"tensors": tensors, "losses": losses, "versions": versions}
        lines = ["\t".join(known[key(want)][column] for column in RESULT) for want in rows(table, ROW) if key(want) in known]
        path.write_text(HEAD.format(table=table.stem) + "".join(line + "\n" for line in lines), encoding="utf-8")


def markdown(wanted, found):
    """Lines of Markdown."""
    known = {key(result): result for result in found}
    missing = [want for want in wanted if key(want) not in known]
    if missing or len(known) != len(wanted):
        unwanted = set(known) - set(map(key, wanted))
        sys.exit("\n".join([f"no result: {want['source']} -> {want['convert']}, {want['judge']}" for want in missing] +
                           [f"not in the matrix: {' '.join(result)}" for result in sorted(unwanted)] +
                           ["run matrix.py --all --record tests/interop/formats/results.tsv"]))
    yield "| source | `ucp-load` | resumed by | tensors bit for bit | losses off by |"
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
    print(f"Seen with {', '.join(versions)}.")


if __name__ == "__main__":
    main()
