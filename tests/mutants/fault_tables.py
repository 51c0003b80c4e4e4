# SPDX-License-Identifier: Apache-2.0
"""Reads the tables of faults, finds their places in the sources, and puts each fault behind its switch."""

import hashlib
import json
import pathlib
import re
import sys
from dataclasses import dataclass, field

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = {
    "sync": "a sync that is left out",
    "swap": "dimensions, arguments or sides exchanged",
    "bound": "off by one, or another bound",
    "ignored": "a result that is not looked at",
    "order": "locks and steps in another order, or without the lock",
    "check": "a check that is left out or turned round",
    "value": "another value, unit or case",
}
HEADER = re.compile(r"^(\d+) (\w+): (.+)$")


def die(message):
    print(f"mutants: error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Fault:
    """One row of a table."""

    number: int
    kind: str
    reason: str
    path: str
    text: str = ""  # With @{ and }@ around the replaced part, if that is not all.
    to: str = ""
    equivalent: str = ""  # Why no test can notice it.
    span: tuple = (0, 0)
    lines: list = field(default_factory=list)

    @property
    def key(self):
        return hashlib.sha256(json.dumps([self.path, self.text, self.to]).encode()).hexdigest()[:16]

    def __str__(self):
        return f"{self.number} {self.path} {self.kind}: {self.reason}"


def read_table(path):
    """The faults of one file: PATH; "NUMBER KIND: REASON"; the text, indented; "=> REPLACEMENT"; "equivalent: WHY"."""
    faults, source, in_text = [], None, False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        header = HEADER.match(line)
        if not line.strip() or line.startswith("#"):
            continue
        if header:
            if header[2] not in KINDS:
                die(f"{where}: kind {header[2]}: one of {', '.join(KINDS)} expected")
            if source is None:
                die(f"{where}: a fault before the name of a file")
            faults.append(Fault(int(header[1]), header[2], header[3], source))
            in_text = True
        elif line.startswith("lib/"):
            source = line.strip()
        elif line.startswith("=>") and in_text:
            faults[-1].to, in_text = line[2:].strip(), False
        elif line.startswith("equivalent: ") and faults:
            faults[-1].equivalent = line.removeprefix("equivalent: ")
        elif line.startswith("  ") and faults and in_text:
            faults[-1].text += line.strip() + "\n"
        elif line.startswith("  ") and faults:
            faults[-1].to += "\n" + line.strip()
        else:
            die(f"{where}: not understood: {line}")
    return faults


def locate(fault, source):
    """Finds the replaced text in `source`; spaces and line breaks count as one. Returns the error."""
    begin, end = "@{", "}@"
    if begin not in fault.text:
        fault.text = begin + fault.text.strip() + end
    parts = re.fullmatch(r"(.*)@\{(.*)\}@(.*)", fault.text.strip(), re.DOTALL)
    if not parts:
        return f"{fault}: no text, or {begin} without {end}"

    def pattern(text):
        return r"\s+".join(re.escape(word) for word in text.split())

    def joined(left, right):
        """Any white space matches a space between the brackets and the text next to them."""
        return r"\s+" if (left[-1:].isspace() or right[:1].isspace()) and left.strip() and right.strip() else ""

    before, middle, after = parts[1], parts[2], parts[3]
    whole = (f"(?:{pattern(before)}){joined(before, middle)}({pattern(middle)}){joined(middle, after)}(?:{pattern(after)})")
    found = list(re.finditer(whole, source))
    if len(found) != 1:
        return f"{fault}: the text is there {len(found)} times, once is expected: {fault.text.strip()}"
    fault.span = found[0].span(1)
    return ""


def read_faults():
    """All faults, each with its place in its file."""
    faults = [fault for path in sorted((HERE / "faults").glob("*.txt")) for fault in read_table(path)]
    sources = {}
    wrong = []
    seen = {}
    for fault in faults:
        if fault.number in seen or not 0 < fault.number < 4096:
            wrong.append(f"{fault}: number given twice, or not 1 to 4095")
        seen[fault.number] = fault
        if fault.path not in sources:
            path = ROOT / fault.path
            sources[fault.path] = path.read_text(encoding="utf-8") if path.is_file() else ""
        problem = locate(fault, sources[fault.path])
        if problem:
            wrong.append(problem)
    for path in sources:
        mine = sorted((fault for fault in faults if fault.path == path), key=lambda fault: (fault.span[0], -fault.span[1]))
        for one, two in zip(mine, mine[1:]):
            if two.span[0] < one.span[1] < two.span[1]:
                wrong.append(f"{one} and {two} overlap")
    if wrong:
        for line in wrong:
            print(f"mutants: {line}", file=sys.stderr)
        die(f"{len(wrong)} of {len(faults)} faults do not fit the sources")
    return faults, sources


def switched(source, faults):
    """The text with every fault behind its switch; inner ones first, so that one may be inside another."""
    def text(begin, end, rest):
        out, at = "", begin
        while rest:
            outer = rest[0]
            first, last = outer.span
            inner = [fault for fault in rest[1:] if fault.span[1] <= last and fault.span[0] < last]
            original = text(first, last, inner)
            out += source[at:first] + switch(outer, source[first:last], original)
            at = last
            rest = [fault for fault in rest if fault is not outer and fault not in inner]
        return out + source[at:end]

    return text(0, len(source), sorted(faults, key=lambda fault: (fault.span[0], -fault.span[1])))


def switch(fault, plain, original):
    """A statement, a condition, or another expression."""
    if ";" in plain and plain.endswith((";", "}")):
        return f"if (SwMutant({fault.number})) {{ {fault.to} }} else {{ {original} }}"
    if fault.to in ("true", "false"):
        return f"(SwMutant({fault.number}) ? {fault.to} : static_cast<bool>({original}))"
    return f"(SwMutant({fault.number}) ? ({fault.to}) : ({original}))"
