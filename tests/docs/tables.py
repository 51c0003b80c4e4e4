#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of the findings of campaigns: each prints its own, in Markdown, and this copies it from its log into a page.

Usage: tables.py PAGE NAME LOG

PAGE has <!-- table of NAME --> and <!-- end of table --> around the table. The last table of the log takes its place. Rows
without a head replace only the rows with the same first cells, or are added; there an empty cell keeps the value of the
page, and numbers get their commas. A log without rows changes nothing. Exits 2 where the page has no such place or
other columns.
"""

import os
import pathlib
import sys

sys.dont_write_bytecode = True

RULE = "|---"  # begins the line below the head of a table


def line(*cells):
    """Whole numbers get their commas; what would end a cell does not."""
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "\\|") for cell in cells) + " |"


def show(head, rows):
    """Prints a table. \\param rows  of as many cells as the head"""
    print(line(*head))
    print(RULE * len(head) + "|")
    show_rows(rows)


def show_rows(rows):
    """Prints rows of a table that has others too."""
    for row in rows:
        print(line(*row), flush=True)


def with_sum(rows, first):
    """The rows and, below several, the totals of their columns from the given one on."""
    if len(rows) < 2:
        return rows
    sums = [sum(column) for column in zip(*(row[first:] for row in rows))]
    return [*rows, ("**Sum**", *[""] * (first - 1), *(f"**{total:,}**" for total in sums))]


def cells(text):
    return [cell.strip() for cell in text.replace("\\|", "\0")[1:-1].split("|")]


def is_row(text):
    return text.startswith("|") and text.endswith("|")


def last_table(log):
    """The lines of the last table, or all rows where none has a head."""
    rows = [text for text in log.splitlines() if is_row(text)]
    heads = [at for at, text in enumerate(rows) if text.startswith(RULE)]
    return rows[heads[-1] - 1:] if heads else rows


def merged(old, rows):
    """The old table with some of its rows replaced and new ones added."""
    table, columns = {cells(text)[0]: text for text in old}, len(cells(old[0]))
    for row in map(cells, rows):
        if len(row) != columns:
            raise ValueError(f"{columns} columns in the page, {len(row)} in the log: {line(*row)}")
        if row[0] in table:
            row = [given or there for given, there in zip(row, cells(table[row[0]]))]
        table[row[0]] = line(*(int(cell) if cell.isdigit() else cell for cell in row)).replace("\0", "\\|")
    return list(table.values())


def put(page, name, log):
    """\\returns the text of the page with the table of the log"""
    new = last_table(log)
    if not new:
        return page
    before, begin, rest = page.partition(f"<!-- table of {name} -->\n")
    inside, end, after = rest.partition("<!-- end of table -->\n")
    if not begin or not end:
        raise ValueError(f"it has no place for the table of {name}")
    headed = any(text.startswith(RULE) for text in new)
    table = new if headed else merged(inside.strip().splitlines(), new)
    return f"{before}{begin}\n" + "\n".join(table) + f"\n\n{end}{after}"


def main():
    if len(sys.argv) != 4:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    page, name, log = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    try:
        text = put(page.read_text(encoding="utf-8"), name, log.read_text(encoding="utf-8", errors="replace"))
    except ValueError as wrong:
        print(f"tables: error: {page}: {wrong}", file=sys.stderr)
        return 2
    new = page.with_name(page.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
