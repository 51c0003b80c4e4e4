#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/papers.md from the rows and results in tests/papers.

Usage: page.py [--check] [PAGE]
  --check  change nothing; show the difference and exit with code 1 if the page is not current
  PAGE     docs/papers.md
"""

import argparse
import difflib
import json
import pathlib
import sys
import textwrap

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import inputs  # pylint: disable=wrong-import-position
import recorded  # pylint: disable=wrong-import-position
import rows  # pylint: disable=wrong-import-position

NO_COMMAND, NO_VALUE = "none", "not computed"
HEAD = ("Item", "Content", "Command", "Our value", "Published", "Verdict")
INTRODUCTION = """\
# Figures and tables of the papers

This page compares every figure and every table of the five papers behind Shardwright with the output of its commands.
`tests/papers/page.py` writes it from `tests/papers/published` and `tests/papers/results`. Change those,
not this page.

    python3 tests/papers/inputs.py work && (cd work && pec-save plan --keep master)    # one row by hand
    python3 tests/papers/run.py build/release/bin && python3 tests/papers/page.py      # all rows that take seconds

`run.py` runs the commands. A test runs the quick rows again and fails if a value changed. A verdict of *reproduced* or
*better* states which values it permits, and the test compares ours with them.

| Verdict | Meaning |
|---|---|
| reproduced | our value agrees with the published one, within the rounding, the range or the direction that the paper prints |
| better | our value is better than the published one |
| deviates | our value is another one; the reason follows |
| not reproduced | there is no value to compare; the reason follows |
| needs GPUs | the paper measured a training run on GPUs, and no command can replace it |

Where a paper prints no value, the column describes its figure.
[Planning](pec-planning.md#10-published-figures) and [placement](placement.md) describe the commands.
"""

LOSS = """\
## Loss after lost tokens

A checkpoint with some of the experts restores the others from older versions, which lose tokens. MoC-System (figure 7)
and MoEtion (figure 8) measure what this does to the validation loss. This command repeats both with a small model on
CPUs:

    tests/papers/loss/run.py build/release/bin OUT && tests/papers/loss/record.py OUT

{setup}

![Validation loss after one and after four faults, and without](loss-curves.svg)

![Difference of the final validation loss by PLT](loss-plt.svg)
"""
LOSS_SETUP = """\
DeepSpeed {deepspeed} trains {layers} layers of width {width} on {ranks} ranks. Every second layer has {experts} experts
and top-1 routing. {iterations} iterations read {megabytes:.0f} MiB of Python source, as bytes. `pec-save` or an agent
saves, a fault ends the training, `pec-restore` restores, and DeepSpeed trains to the end. PLT is the one in the store's
report. A loss is *back* when it stays within {tolerance} nats per byte of the uninterrupted run until the next fault.
"""
LOSS_HEAD = ("Run", "Seeds", "PLT", "Final validation loss, minus uninterrupted", "Range over seeds", "Largest rise", "Back within")
LOSS_NOTES = """\
K is the number of experts in each checkpoint, of two levels those in memory and in storage. I is the number of
iterations between checkpoints. If all experts are saved, all losses after a restore equal the uninterrupted ones bit
for bit. The model is small and its loss still falls, so directions can be compared with the papers, and loss values
cannot. Accuracy in other tasks is not measured.
"""


def cell(text):
    return text.replace("|", "\\|")


def table(head, lines):
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in (head, *lines)).replace(
        "\n", "\n|" + "---|" * len(head) + "\n", 1) + "\n"


def command_cell(row):
    if "recorded" in row:
        return f"`{recorded.WRITERS[row['recorded']]}`"
    if row.get("commands") is None:
        return NO_COMMAND
    commands = row["commands"]
    for name in row.get("for", {}):
        commands = [command.replace("{" + name + "}", name) for command in commands]
    text = ", then ".join(f"`{command}`" for command in commands)
    for name, values in row.get("for", {}).items():
        shown = [str(value) for value in values]
        if len(shown) > 6:
            shown = [*shown[:2], "...", shown[-1]]
        text += f" with {name} = {', '.join(shown)}"
    return text


def verdict_cell(row):
    reason = row["reason"]
    text = row["verdict"]
    if reason and text in rows.NEEDS_REASON:
        text += f" because {reason}"
    elif reason:
        text += f". {reason[0].upper()}{reason[1:]}"
    return text + (f" (measured on {row['machine']})" if row["machine"] else "")


def lines_of(paper):
    for row in paper["rows"]:
        value = row["value"] if row["value"] is not None else NO_VALUE
        yield row["item"], row["subject"], command_cell(row), value, row["published"], verdict_cell(row)


def count_line(paper):
    """Numbers of rows by verdict."""
    found = [row["verdict"] for row in paper["rows"]]
    return (f"[{paper['paper']}](#{paper['paper'].lower().replace(' ', '-')})", f"{paper['figures']}", f"{paper['tables']}",
            *(str(found.count(verdict)) for verdict in rows.VERDICTS))


def loss_section():
    """Losses of a real training, which loss/record.py has recorded."""
    recorded_loss = json.loads((rows.FOLDER / "results" / "loss.json").read_text(encoding="utf-8"))
    setup = recorded_loss["setup"]
    lines = [(line["run"], str(line["seeds"]), f"{100 * line['plt']:.2f} %", f"{line['difference']:+.4f}",
              f"{line['least']:+.4f} to {line['most']:+.4f}", f"{line['spike']:+.4f}",
              "not always" if line["back"] is None else f"{line['back']} iterations") for line in recorded_loss["lines"]]
    text = LOSS_SETUP.format(**setup, megabytes=setup["training_bytes"] / 2**20)
    return [LOSS.format(setup=textwrap.fill(" ".join(text.split()), 120)), table(LOSS_HEAD, lines), LOSS_NOTES]


def used_inputs(papers):
    names = {name for paper in papers for row in paper["rows"] for name in row.get("inputs", [])}
    return [(f"`{name}`", text) for name, (text, _) in inputs.INPUTS.items() if name in names]


def page(papers):
    parts = [INTRODUCTION, table(("Paper", "Figures", "Tables", *rows.VERDICTS), map(count_line, papers))]
    parts += ["Rows are counted by verdict. A figure has several rows if it shows several values.\n",
              "## Inputs\n", textwrap.fill("The commands run in a folder with these files. `inputs.py` makes them. Those of the "
                                           "trace need a copy of it, in the folder that `SHARDWRIGHT_SHARED` names.", 120) + "\n",
              table(("File", "Content"), used_inputs(papers))]
    for paper in papers:
        parts += [f"## {paper['paper']}\n", textwrap.fill(f"Source: {paper['source']}. {paper.get('note', '')}".strip(), 120) + "\n",
                  table(HEAD, lines_of(paper))]
    return "\n".join(parts + loss_section())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("page", nargs="?", type=pathlib.Path, default=rows.ROOT / "docs" / "papers.md")
    arguments = parser.parse_args()
    try:
        fresh = page(rows.joined(rows.published(), rows.results(), recorded.value))
    except rows.Wrong as wrong:
        sys.exit(f"page.py: error: {wrong}")
    if not arguments.check:
        arguments.page.write_text(fresh, encoding="utf-8")
        return 0
    old = arguments.page.read_text(encoding="utf-8") if arguments.page.exists() else ""
    if old == fresh:
        return 0
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), fresh.splitlines(True), str(arguments.page), "fresh"))
    print(f"page.py: {arguments.page} is not current: run tests/papers/page.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
