# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/papers.md: figures and tables as the papers publish them, joined with our values.

published/PAPER.json has everything that is the same before and after a command runs:

    paper, source      name of the paper and where to find it
    note               a sentence about the numbering of its figures; optional
    figures, tables    how many of them the paper has; each needs a row
    rows               the list of rows

Members of a row:

    id                 unique name; results use it
    item               "Figure 5" or "Table 1"
    subject            the content of the figure, in our words
    published          the published value
    verdict, reason    one of VERDICTS; why, where NEEDS_REASON
    commands           commands that run.py runs in one scratch folder; {NAME} stands for a value of `for`
    for                {NAME: [values]}: repeats the commands
    inputs             files that inputs.py makes for the commands
    value              our value as a template: {0.size.persist.ratio:1%} reads the first command's `result`
    compute            a function of values.py that makes the fields of `value` out of the commands
    recorded, key      a function of recorded.py, in place of commands: reads a value that other tests have recorded
    expect             the whole value that a verdict of EXPECTED rests on, or
    within             [least, most] of each number in the value
    when               "quick" (default): seconds, exact. "slow": minutes, exact. "timed": measures time

results/*.json hold {"machine": TEXT or null, "rows": {ID: {"value": TEXT, "commands": [...]}}}. A row of a results file
may also have `verdict`, `reason`, `expect`, `within` and `machine`, which then replace those of the row. This is how
measurements by other programs, such as those of loss.json, fill rows without commands.
"""

import json
import pathlib
import re

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAPERS = ("ucp", "moc", "moetion", "lazarus", "hecate")
VERDICTS = ("reproduced", "better", "deviates", "not reproduced", "needs GPUs")
NEEDS_REASON = ("deviates", "not reproduced")
WITHOUT_VALUE = ("not reproduced", "needs GPUs")
EXPECTED = ("reproduced", "better")
MEMBERS = {"id", "item", "subject", "published", "verdict", "reason", "commands", "for", "inputs", "value", "compute",
           "recorded", "key", "expect", "within", "when"}
REPLACED = ("verdict", "reason", "expect", "within")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


class Wrong(Exception):
    """Rows or results that contradict each other; the message names the row."""


def published(folder=FOLDER / "published"):
    """\\returns the papers with their rows, in the order of PAPERS"""
    return [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in PAPERS]


def results(folder=FOLDER / "results"):
    """\\returns the results of all files by row id, each with the machine of its file.
    \\exception Wrong  two files have the same row"""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, row in content.get("rows", {}).items():
            if name in found:
                raise Wrong(f"{name}: is in {path.name} and in another file")
            found[name] = {"machine": content.get("machine")} | row
    return found


def expanded(row):
    """\\returns the commands of a row with every value of its `for`, one value after the other"""
    commands = row.get("commands", [])
    for name, values in row.get("for", {}).items():
        commands = [command.replace("{" + name + "}", str(value)) for value in values for command in commands]
    return commands


def numbers(text):
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def check_value(row, value):
    """\\exception Wrong  the value does not support the verdict"""
    if row["verdict"] not in EXPECTED:
        return
    if "expect" in row:
        if value != row["expect"]:
            raise Wrong(f"{row['id']}: {row['verdict']} needs \"{row['expect']}\", the value is \"{value}\"")
    elif "within" in row:
        found = numbers(value)
        if len(found) != len(row["within"]):
            raise Wrong(f"{row['id']}: {len(row['within'])} limits, but the value is \"{value}\"")
        for number, (least, most) in zip(found, row["within"]):
            if not least <= number <= most:
                raise Wrong(f"{row['id']}: {row['verdict']} needs {least} to {most}, the value is \"{value}\"")
    else:
        raise Wrong(f"{row['id']}: {row['verdict']} needs `expect` or `within`")


def check_row(row):
    """\\exception Wrong  a row is incomplete"""
    for member in ("id", "item", "subject", "published", "verdict"):
        if not row.get(member, "").strip():
            raise Wrong(f"{row.get('id', row)}: {member} is missing")
    if unknown := set(row) - MEMBERS:
        raise Wrong(f"{row['id']}: unknown {', '.join(sorted(unknown))}")
    if not re.fullmatch(r"(Figure|Table) \d+", row["item"]):
        raise Wrong(f"{row['id']}: {row['item']} is neither a figure nor a table")
    if row["verdict"] not in VERDICTS:
        raise Wrong(f"{row['id']}: unknown verdict {row['verdict']}")
    if row["verdict"] in NEEDS_REASON and not row.get("reason"):
        raise Wrong(f"{row['id']}: {row['verdict']} needs a reason")
    has_value = "recorded" in row or "commands" in row
    if not has_value and row["verdict"] not in WITHOUT_VALUE:
        raise Wrong(f"{row['id']}: {row['verdict']} needs commands or a recorded value")
    if "commands" in row and "value" not in row:
        raise Wrong(f"{row['id']}: commands without value")


def check_inventory(paper):
    """\\exception Wrong  a figure or table has no row, or a row is not of the paper or not in order"""
    wanted = [f"Figure {n + 1}" for n in range(paper["figures"])] + [f"Table {n + 1}" for n in range(paper["tables"])]
    found = list(dict.fromkeys(row["item"] for row in paper["rows"]))
    if found != wanted:
        missing = [item for item in wanted if item not in found]
        raise Wrong(f"{paper['paper']}: missing {missing}, other or out of order: "
                    f"{[item for item in found if item not in wanted] or found}")


def joined(papers, measured, recorded):
    """Joins rows and results.

    \\param recorded  function of a row that returns its recorded value
    \\returns the papers; every row has `value`, `commands` and `machine`, which may be None
    \\exception Wrong  incomplete rows, results of no row or of other commands, or a verdict without support"""
    known = set()
    whole = []
    for paper in papers:
        check_inventory(paper)
        rows = []
        for row in paper["rows"]:
            check_row(row)
            if row["id"] in known:
                raise Wrong(f"{row['id']}: occurs twice")
            known.add(row["id"])
            rows.append(join_row(row, measured.get(row["id"]), recorded))
        whole.append(paper | {"rows": rows})
    if unknown := set(measured) - known:
        raise Wrong(f"results of no row: {', '.join(sorted(unknown))}")
    return whole


def join_row(row, result, recorded):
    out = {"machine": None, "reason": ""} | row
    out["value"] = None
    if "recorded" in row:
        out["value"] = recorded(row)
    elif result is not None:
        if "commands" in row and result.get("commands") != expanded(row):
            raise Wrong(f"{row['id']}: the result is of other commands; run tests/papers/run.py --only {row['id']}")
        out |= {member: result[member] for member in REPLACED if member in result}
        out["value"], out["machine"] = result["value"], result["machine"]
        out["commands"] = row.get("commands") or result["commands"]
    elif "commands" in row:
        raise Wrong(f"{row['id']}: no result; run tests/papers/run.py --only {row['id']}")
    if out["value"] is not None:
        check_value(out, out["value"])
    return out
