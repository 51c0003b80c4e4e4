# SPDX-License-Identifier: Apache-2.0
"""Reads the English out of the tree: pages, help texts, messages and comments, with the line of every word.

Each scope yields Text objects. Code is replaced by a mark or by spaces, line breaks stay, so that an offset in a text
leads to its line in the file.
"""

import dataclasses
import functools
import pathlib
import re
import subprocess

CODE = "X"  # stands for inline code, so that it counts as one word
GENERATED = "docs/commands.md"
HISTORY = "docs/changelog.md"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md")
CPP = (".cc", ".h", ".cu", ".cuh", ".c", ".in")
HASH = (".sh", ".sbatch", ".cmake", ".txt", "")

CPP_TOKEN = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<tag>[^(\s"]*)\((?P<raw>.*?)\)(?P=tag)"'
    r"|\"(?P<text>(?:\\.|[^\"\\\n])*)\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.S)
PYTHON_TOKEN = re.compile(
    r'(?P<comment>#[^\n]*)|"""(?P<doc>(?:\\.|[^\\])*?)"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?P<text>(?:\\.|[^"\\\n])*)"|\'(?P<other>(?:\\.|[^\'\\\n])*)\'', re.S)
HASH_COMMENT = re.compile(r"(?m)(?:^[ \t]*|[ \t])#(?!!)(?=\s)[^\n]*")
# Tokens that a program reads: paths, file names, scoped and underscored names, addresses.
NAMES = re.compile(r"https?://\S+|\b(?:lib|apps|tests|docs|scripts)/[\w./<>*-]*|[\w./-]*\w\.(?:cc|h|py|md|json|tsv|sh)\b"
                   r"|\w+(?:::\w+)+|\w*_\w+")
VALUES = re.compile(r'\\+param\s+\w+|"\w+"')  # in comments: names of parameters, and keys and values of one word
BACKTICKS = re.compile(r"``[^`]*``|`[^`\n]*(?:\n[^`\n]+)?`")
FENCE = re.compile(r"^([ \t]*)(```+|~~~+).*?^[ \t]*\2[ \t]*$", re.S | re.M)
HIDDEN = re.compile(r"<!--.*?-->", re.S)
TARGET = re.compile(r"\]\([^()\s]*(?:\([^()]*\)[^()\s]*)?\)")
HELP_ITEM = re.compile(r" {0,2}\S")  # all but the lines that continue the text of a flag
LIST_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d+[.)])[ \t]+")
SENTENCE_END = re.compile(r"""[.!?]["')\]*_]*\s+(?=["'(\[*_]*[A-Z0-9])""")
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|vs|cf|etc|approx|Fig|Sec|No|Eq)\.$")


@dataclasses.dataclass
class Text:
    """A piece of prose, and the line of its file that it begins in."""

    path: str
    line: int
    text: str

    @property
    def flat(self):
        """Its words with one space between them, in lower case: what patterns are looked for in."""
        return " ".join(self.text.lower().split())

    def line_at(self, offset):
        return self.line + self.text.count("\n", 0, offset)

    def line_of_word(self, number):
        """The line of the word with this number, from 0."""
        starts = [match.start() for match in re.finditer(r"\S+", self.text)]
        return self.line_at(starts[min(number, len(starts) - 1)]) if starts else self.line


def blanked(pattern, text, mark=""):
    """Replaces matches by a mark, and keeps their line breaks."""
    return pattern.sub(lambda match: mark + "\n" * match.group().count("\n"), text)


def tracked(root):
    """Paths of the files that git knows or would add, relative to the root."""
    done = subprocess.run(["git", "-c", f"safe.directory={root}", "ls-files", "-z", "--cached", "--others",
                           "--exclude-standard"], cwd=root, capture_output=True, check=False)
    if done.returncode == 0 and done.stdout:
        return sorted(set(done.stdout.decode().split("\0")) - {""})
    return sorted(str(path.relative_to(root)) for path in root.rglob("*")
                  if path.is_file() and not {"build", ".git"} & set(path.parts))


@functools.lru_cache(maxsize=None)
def read(path):
    """The text of a file, "" for one that is not text or was removed."""
    try:
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


def is_page(path):
    return path in TOP_PAGES or (path.startswith("docs/") and path.endswith(".md") and path not in (GENERATED, HISTORY))


def without_indented_code(text):
    """Empties blocks that are indented by four columns, follow an empty line and belong to no list."""
    lines, in_list, in_code = text.split("\n"), False, False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        after_gap = number == 0 or not lines[number - 1].strip()
        if line.startswith(("    ", "\t")):
            in_code = in_code or (after_gap and not in_list)
            if in_code:
                lines[number] = ""
            continue
        in_code = False
        in_list = bool(LIST_ITEM.match(line)) or (in_list and (not after_gap or line.startswith("  ")))
    return "\n".join(lines)


def page_prose(text):
    """A Markdown text without code, link targets and hidden comments."""
    text = without_indented_code(blanked(HIDDEN, blanked(FENCE, text)))
    text = blanked(TARGET, blanked(BACKTICKS, text, CODE), "]")
    return blanked(NAMES, text, CODE)


def help_prose(text):
    """The page of commands without names of subcommands where they are listed, and without the frame of its blocks."""
    text = re.sub(r"(?ms)^Subcommands:\n.*?^$", lambda match: re.sub(r"(?m)^  [a-z]\S*", "  ", match.group()), text)
    text = re.sub(r"(?m)^```.*$", "", text)
    return blanked(NAMES, blanked(BACKTICKS, text, CODE), CODE)


def comment_words(comment):
    """A comment of C++, Python or a shell without the signs that frame it."""
    comment = re.sub(r"(?m)^[ \t]*(?:///?<?|/\*+|\*/?(?![*\w])|#)[ \t]?", "", comment).removesuffix("*/")
    return blanked(VALUES, blanked(NAMES, blanked(BACKTICKS, comment, CODE), CODE), CODE).strip(" \t")


def joined(path, text, pieces):
    """Comments on lines that follow one another as one Text each. \\param pieces  (begin, end) of comments"""
    group = []
    for begin, end in pieces:
        alone = not text[text.rfind("\n", 0, begin) + 1:begin].strip()
        if group and not (alone and group[-1][2] and re.fullmatch(r"[ \t]*\n[ \t]*", text[group[-1][1]:begin])):
            yield whole_comment(path, text, group)
            group = []
        group.append((begin, end, alone))
    if group:
        yield whole_comment(path, text, group)


def whole_comment(path, text, group):
    words = "\n".join(comment_words(text[begin:end]) for begin, end, _ in group)
    return Text(path, text.count("\n", 0, group[0][0]) + 1, words)


def literal_words(text):
    return blanked(NAMES, re.sub(r"\\[nt\"']|\{[^{}\n]*\}", "  ", text))


def literals(path, text, pattern):
    """String literals with a space in them, those that only white space separates as one Text."""
    found, end_before = [], None
    for match in pattern.finditer(text):
        kinds = match.groupdict()
        words = next((kinds[kind] for kind in ("text", "raw", "other") if kinds.get(kind) is not None), None)
        if words is None:
            continue
        if found and end_before is not None and not text[end_before:match.start()].strip():
            found[-1][1] += "\n" * text.count("\n", end_before, match.start()) + literal_words(words)
        else:
            found.append([match.start(), literal_words(words)])
        end_before = match.end()
    at, line = 0, 1
    for begin, words in found:
        line, at = line + text.count("\n", at, begin), begin
        if " " in words.strip():
            yield Text(path, line, words)


def docs(root, paths):
    for path in filter(is_page, paths):
        yield from blocks(Text(path, 1, page_prose(read(root / path))))


def help_texts(root, _paths):
    yield from blocks(Text(GENERATED, 1, help_prose(read(root / GENERATED))), HELP_ITEM)


def messages(root, paths):
    for path in paths:
        if path.startswith(("lib/", "apps/")) and path.endswith((*CPP, ".py")):
            yield from literals(path, read(root / path), PYTHON_TOKEN if path.endswith(".py") else CPP_TOKEN)


def comments(root, paths):
    for path in paths:
        if not path.startswith(("lib/", "apps/", "tests/", "scripts/")) or path.startswith("tests/data/"):
            continue
        suffix = pathlib.PurePath(path).suffix
        if suffix in (*CPP, ".py"):
            yield from code_comments(path, read(root / path), suffix)
        elif suffix in HASH and (suffix or read(root / path).startswith("#!")):
            text = read(root / path)
            yield from joined(path, text, [(match.start() + len(match.group()) - len(match.group().lstrip()), match.end())
                                           for match in HASH_COMMENT.finditer(text)])


def code_comments(path, text, suffix):
    python = suffix == ".py"
    pieces = []
    for match in (PYTHON_TOKEN if python else CPP_TOKEN).finditer(text):
        if match["comment"] is not None and not match["comment"].startswith("#!"):
            pieces.append(match.span())
        elif python and match["doc"] is not None and not text[text.rfind("\n", 0, match.start()) + 1:match.start()].strip():
            yield Text(path, text.count("\n", 0, match.start()) + 1, comment_words(match["doc"]))
    yield from joined(path, text, pieces)


SCOPES = {"docs": docs, "help": help_texts, "messages": messages, "comments": comments}


def blocks(page, item=LIST_ITEM):
    """Paragraphs, list items, headings and table cells of a page of prose, as one Text each."""
    block = []
    for number, line in enumerate([*page.text.split("\n"), ""], page.line):
        stripped = line.strip()
        fresh = not stripped or stripped.startswith(("#", "|")) or item.match(line)
        if fresh and block:
            yield Text(page.path, block[0][0], "\n".join(words for _, words in block))
            block = []
        if stripped.startswith("|"):
            for cell in stripped.strip("|").replace("\\|", " ").split("|"):
                yield Text(page.path, number, cell.strip())
        elif stripped.startswith("#"):
            yield Text(page.path, number, stripped.lstrip("# "))
        elif stripped:
            block.append((number, (LIST_ITEM.sub("", line, count=1) if item is LIST_ITEM else line).strip()))


def sentences(block):
    """The sentences of a block, as one Text each."""
    begin = 0
    for match in SENTENCE_END.finditer(block.text):
        if ABBREVIATED.search(block.text[begin:match.start() + 1]):
            continue
        yield Text(block.path, block.line_at(begin), block.text[begin:match.end()].rstrip())
        begin = match.end()
    if block.text[begin:].strip():
        yield Text(block.path, block.line_at(begin), block.text[begin:])


def word_count(text):
    return sum(1 for word in text.split() if any(letter.isalnum() for letter in word))
