#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Texts and code cite files and sections that exist: links in *.md, and "docs/..." in comments.

A citation is a path below docs/, alone or followed by section titles in quotes:
    docs/formats/deepspeed.md, "File names"
    docs/formats/deepspeed.md sections "Files" and "Flattening"
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = ("lib", "apps", "scripts", "tests", "cmake", "patterns")
SUFFIXES = {".h", ".cc", ".in", ".py", ".sh", ".txt", ".cmake", ".json", ".sbatch", ""}

CITED = re.compile(r'\bdocs/[\w./-]*\w\.(?:md|json)\b(?:,? (?:sections? )?"[A-Za-z][^"\n]*"(?: and "[^"\n]+")*)?')
LINK = re.compile(r"\]\(([^()\s]+)\)")
COMMENT_BREAK = re.compile(r"\n[ \t]*(?:///?|#|\*)?[ \t]*")
FENCE = re.compile(r"^```.*?^```", re.S | re.M)


def titles(text):
    """Headings of a Markdown text, without their numbers."""
    found = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"^[\d.]+ +", "", title).strip().lower() for title in found}


def wrong_citations(root, text):
    """Missing files and sections that a source text cites."""
    for match in CITED.finditer(COMMENT_BREAK.sub(" ", text)):
        path, *rest = re.split(r'(?<=\.md)|(?<=\.json)', match.group(), maxsplit=1)
        if not (root / path).is_file():
            yield f"{path} does not exist"
            continue
        known = titles((root / path).read_text(encoding="utf-8"))
        for title in re.findall(r'"([^"]+)"', "".join(rest)):
            if title.lower() not in known:
                yield f'{path} has no section "{title}"'


def wrong_links(root, page, text):
    """Relative links of a Markdown text that lead nowhere."""
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:|#", target):
            continue
        if not (root / page).parent.joinpath(target.split("#")[0]).exists():
            yield f"links to {target}, which does not exist"


def tracked(root):
    """Files that git knows; all files where there is no repository."""
    done = subprocess.run(["git", "-c", f"safe.directory={root}", "ls-files", "-z"], cwd=root,
                          capture_output=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [pathlib.Path(name) for name in done.stdout.decode().split("\0") if name]
    return [path.relative_to(root) for path in root.rglob("*") if "build" not in path.parts]


class References(unittest.TestCase):
    def test_code_cites_what_exists(self):
        wrong = []
        cited = 0
        for path in tracked(ROOT):
            if path.parts[0] not in CODE or path.suffix not in SUFFIXES or path.parts[1] == "docs":
                continue
            if path.parts[:2] == ("tests", "structure") or not (ROOT / path).is_file():
                continue
            text = (ROOT / path).read_bytes().decode("utf-8", "replace")
            cited += len(CITED.findall(text))
            wrong += [f"{path}: {what}" for what in wrong_citations(ROOT, text)]
        self.assertGreater(cited, 20)
        self.assertEqual(wrong, [])

    def test_links_lead_somewhere(self):
        wrong = []
        for path in tracked(ROOT):
            if path.suffix == ".md" and (ROOT / path).is_file():
                text = (ROOT / path).read_text(encoding="utf-8")
                wrong += [f"{path}: {what}" for what in wrong_links(ROOT, path, text)]
        self.assertEqual(wrong, [])

    def test_all_name_one_version(self):
        def found(path, pattern):
            return re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M).group(1)

        version = found("CMakeLists.txt", r"^project\(shardwright VERSION (\d+\.\d+\.\d+) ")
        minor = version.rpartition(".")[0]
        self.assertEqual(found("CITATION.cff", r"^version: (\S+)$"), version)
        self.assertEqual(found("docs/changelog.md", r"^## (\d\S+)$"), version)
        self.assertEqual(found("README.md", r"^Version (\d\S*), "), minor)
        for path in ("docs/library.md", "tests/install/example/CMakeLists.txt"):
            self.assertEqual(found(path, r"^find_package\(shardwright (\S+) CONFIG"), minor)

    def test_the_index_names_what_there_is(self):
        commands = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
        spans = re.findall(r"`([^`]+)`", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
        flags = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z_-]+", span)}
        self.assertGreater(len(flags), 10)
        self.assertEqual({flag for flag in flags if not re.search(rf"{flag}\b", commands)}, set())
        used = {match.group() for span in spans if (match := re.match(r"(ucp|pec|moe)-[a-z]+( [a-z][a-z-]+)?", span))}
        self.assertEqual({name for name in used if not re.search(rf"^###? {name}$", commands, re.M)}, set())
        pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
        linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
        self.assertEqual(pages - {target.split("#")[0] for target in linked}, set())

    def test_it_sees_what_is_wrong(self):
        text = '/// See docs/limits.md, "No\n/// such section", and docs/nothing.md. docs/limits.md, "Memory".\n'
        self.assertEqual(list(wrong_citations(ROOT, text)),
                         ['docs/limits.md has no section "No such section"',
                          "docs/nothing.md does not exist"])
        self.assertEqual(list(wrong_links(ROOT, pathlib.Path("docs/limits.md"),
                                          "[a](nowhere.md) [b](glossary.md#x) [c](https://d.e)")),
                         ["links to nowhere.md, which does not exist"])


if __name__ == "__main__":
    sys.exit(unittest.main())
