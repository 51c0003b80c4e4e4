#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Texts are in plain language: counts the words and patterns of language.tsv, long sentences and long paragraphs.

Usage: language_test.py [--exact]      checks the tree, and this program on sentences made for it
       language_test.py --list ID [SCOPE]
       language_test.py --update

Each row of language.tsv has a maximum for each scope. More hits fail. Fewer hits print a note, or fail with --exact.
  --list    prints the place of every hit of a row, then stops
  --update  lowers the maxima to the present counts, never raises one

Scopes:
  docs      README.md and the other pages, without code, docs/commands.md and the changelog
  help      docs/commands.md, which scripts/gen-docs writes from --help
  messages  string literals with a space in lib/ and apps/
  comments  comments of lib/, apps/, tests/ and scripts/
"""

import bisect
import collections
import pathlib
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))

import prose  # pylint: disable=wrong-import-position

TABLE = ROOT / "tests" / "docs" / "language.tsv"
SENTENCE_WORDS_MAX = 35
PARAGRAPH_WORDS_MAX = 90
GLOSSARY_ROWS_MAX = 25
LONG_TARGET = 5  # long sentences and paragraphs of all pages together
SHOWN_MAX = 20
CHAIN = re.compile(r"[:;](?=\s)")

Row = collections.namedtuple("Row", "id pattern maxima instead example")
Hit = collections.namedtuple("Hit", "path line text")


def rows_of(table):
    """The rows of the table; maxima by scope, None where a scope is not checked."""
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        name, pattern, *maxima, instead, example = line.split("\t")
        if len(maxima) != len(prose.SCOPES):
            raise ValueError(f"{name}: {len(maxima)} maxima, expected one for each of {', '.join(prose.SCOPES)}")
        yield Row(name, pattern, {scope: None if cell == "-" else int(cell) for scope, cell in zip(prose.SCOPES, maxima)},
                  instead, example)


def lowered(table, counts):
    """The table with lower maxima. \\param counts  by (row, scope)"""
    lines = []
    for line in table.splitlines():
        cells = line.split("\t")
        for column, scope in enumerate(prose.SCOPES, 2):
            count = counts.get((cells[0], scope))
            if count is not None and cells[column] != "-":
                cells[column] = str(min(int(cells[column]), count))
        lines.append("\t".join(cells))
    return "\n".join(lines) + "\n"


class Corpus:
    """The texts of one scope as one string, in which all patterns are looked for."""

    def __init__(self, texts):
        self.texts = list(texts)
        self.starts, pieces, length = [], [], 1
        for text in self.texts:
            flat = text.flat
            self.starts.append(length)
            pieces.append(flat)
            length += len(flat) + 1
        self.all = "\0" + "\0".join(pieces) + "\0"

    def hits(self, pattern):
        """\\returns the matches of a pattern as (index of the text, match)"""
        head, body = compiled(pattern)
        return [(bisect.bisect_right(self.starts, match.start() + match.group().startswith("\0")) - 1, match)
                for match in body.finditer(self.all) if head.match(self.all, match.start())]

    def place(self, index, match):
        """The file and line of a match, with the words around it."""
        text, begin = self.texts[index], self.starts[index]
        around = self.all[max(begin, match.start() - 40):match.end() + 40].split("\0")[0]
        first_letter = match.start() + len(match.group()) - len(match.group().lstrip(" .,:;\0"))
        return Hit(text.path, text.line_of_word(self.all[begin:first_letter].count(" ")), around.strip())


def compiled(pattern):
    """The assertions that a pattern begins with, and the rest: a search for its first letters alone is much faster."""
    pattern = re.sub(r"(?<!\[)\^", r"(?<=\\0)", pattern)
    outside, before = pattern, ""
    while outside != before:
        outside, before = re.sub(r"\([^()]*\)", "", outside), outside
    head = "" if "|" in outside else re.match(r"(?:\(\?<[!=][^()]*\)|\\b)*", pattern).group()
    return re.compile(head), re.compile(pattern[len(head):])


def long_sentences(blocks):
    for block in blocks:
        for sentence in prose.sentences(block):
            if (words := prose.word_count(sentence.text)) > SENTENCE_WORDS_MAX:
                yield Hit(sentence.path, sentence.line, f"{words} words: {' '.join(sentence.text.split())[:80]}...")


def long_paragraphs(blocks):
    for block in blocks:
        if (words := prose.word_count(block.text)) > PARAGRAPH_WORDS_MAX:
            yield Hit(block.path, block.line, f"{words} words: {' '.join(block.text.split())[:80]}...")


def colon_chains(blocks):
    for block in blocks:
        for sentence in prose.sentences(block):
            if len(CHAIN.findall(sentence.text)) > 1:
                yield Hit(sentence.path, sentence.line, " ".join(sentence.text.split())[:100])


def glossary_terms(page):
    """(line, term) of each row of the glossary's table."""
    lines = page.splitlines()
    head = next((at for at, line in enumerate(lines) if line.startswith("|---")), len(lines))
    for number, line in enumerate(lines[head + 1:], head + 2):
        if line.startswith("|"):
            yield number, line.strip("|").split("|")[0].strip(" *`")


def glossary_excess(page):
    """The rows of the glossary above the number allowed."""
    return [Hit("docs/glossary.md", line, term) for line, term in list(glossary_terms(page))[GLOSSARY_ROWS_MAX:]]


def glossary_unused(page, used):
    """Terms of the glossary that do not occur in the text `used`, in lower case."""
    for line, row in glossary_terms(page):
        for term in re.split(r",\s*", re.sub(r"\([^()]*\)", "", row).lower()):
            words = re.escape(term.strip())
            if words and not re.search(rf"(?<!\w){words}(?:s|es)?(?!\w)", used):
                yield Hit("docs/glossary.md", line, term)


class Tree:
    """The texts of a tree, and the hits of every row in them."""

    def __init__(self, root):
        paths = prose.tracked(root)
        self.scopes = {scope: Corpus(texts(root, paths)) for scope, texts in prose.SCOPES.items()}
        self.glossary = prose.read(root / "docs" / "glossary.md")

    def measure(self, name):
        """The hits of a row that has no pattern."""
        blocks = self.scopes["docs"].texts
        if name == "glossary-unused":
            used = "\0".join(text.flat for scope in ("docs", "help", "messages") for text in self.scopes[scope].texts
                             if text.path != "docs/glossary.md")
            return list(glossary_unused(self.glossary, used))
        if name == "glossary-rows":
            return glossary_excess(self.glossary)
        measures = {"long-sentence": long_sentences, "long-paragraph": long_paragraphs, "colon-chain": colon_chains}
        return list(measures[name](blocks))

    def count(self, row, scope):
        return len(self.measure(row.id) if row.pattern == "-" else self.scopes[scope].hits(row.pattern))

    def places(self, row, scope):
        if row.pattern == "-":
            return self.measure(row.id)
        corpus = self.scopes[scope]
        return [corpus.place(*hit) for hit in corpus.hits(row.pattern)]


def changed_files():
    """Files that differ from the commit before, or from the branch that this one is pushed to: where a new hit may be."""
    found = set()
    for base in ("@{upstream}", "HEAD~1"):
        done = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "diff", "--name-only", base], cwd=ROOT, text=True,
                              capture_output=True, check=False)
        found |= set(done.stdout.split("\n")) if done.returncode == 0 else set()
    return found - {""}


def shown(hits):
    """Lines for a message: every hit, or of many those in files that have changed."""
    changed = changed_files() if len(hits) > SHOWN_MAX else set()
    picked = [hit for hit in hits if hit.path in changed] or hits
    for hit in picked[:SHOWN_MAX]:
        yield f"  {hit.path}:{hit.line}: {hit.text}"
    if len(hits) > len(picked[:SHOWN_MAX]):
        yield f"  and {len(hits) - len(picked[:SHOWN_MAX])} more, most of which were there before"


def check(tree, rows, exact):
    """\\returns (errors, notes, counts by (row, scope))"""
    errors, notes, counts = [], [], {}
    for row in rows:
        for scope, maximum in row.maxima.items():
            if maximum is None:
                continue
            count = counts[row.id, scope] = tree.count(row, scope)
            if count > maximum:
                errors.append("\n".join([f"{row.id}: {count} in {scope}, at most {maximum}; write instead: {row.instead}",
                                         *shown(tree.places(row, scope)),
                                         f"  all of them: tests/docs/language_test.py --list {row.id} {scope}"]))
            elif count < maximum:
                lower = f"{row.id}: {count} in {scope}, lower the maximum of {maximum} to {count}: language_test.py --update"
                (errors if exact else notes).append(lower)
    return errors, notes, counts


def print_counts(rows, counts):
    print(f"{'row':<18}" + "".join(f"{scope:>10}" for scope in prose.SCOPES))
    for row in rows:
        print(f"{row.id:<18}" + "".join(f"{counts.get((row.id, scope), '-'):>10}" for scope in prose.SCOPES))
    long = counts["long-sentence", "docs"] + counts["long-paragraph", "docs"]
    print(f"long sentences and paragraphs: {long}, target at most {LONG_TARGET}", flush=True)


class Language(unittest.TestCase):
    exact = False

    def test_texts_are_plain(self):
        rows = list(rows_of(TABLE.read_text(encoding="utf-8")))
        errors, notes, counts = check(Tree(ROOT), rows, self.exact)
        print_counts(rows, counts)
        if notes:
            print(f"{len(notes)} maxima can be lowered: tests/docs/language_test.py --update", flush=True)
        if errors:
            self.fail("\n" + "\n".join(errors))

    def test_every_row_finds_its_example(self):
        for row in rows_of(TABLE.read_text(encoding="utf-8")):
            if row.pattern != "-":
                with self.subTest(row=row.id):
                    example = prose.comment_words(row.example) if row.example.startswith("//") else row.example
                    self.assertTrue(Corpus([prose.Text("x", 1, example)]).hits(row.pattern), row.example)

    def test_plain_sentences_have_no_hit(self):
        plain = ("Keys you omit keep the source's value. The command fails and prints the rule to add. There is no"
                 " default. For users who run training on clusters, `pec-save` reports the oldest expert. It writes"
                 " sums of counts and square roots. Both sides are named so far. pec-save tell")
        for row in rows_of(TABLE.read_text(encoding="utf-8")):
            if row.pattern != "-":
                self.assertEqual(Corpus([prose.Text("x", 1, plain)]).hits(row.pattern), [], row.id)

    def test_a_hit_has_its_line(self):
        page = prose.Text("docs/x.md", 1, prose.page_prose("# Title\n\nOne `told`\n[b](told.md) two\nhe told it.\n"))
        corpus = Corpus(prose.blocks(page))
        self.assertEqual([corpus.place(*hit)[:2] for hit in corpus.hits(r"\btold\b")], [("docs/x.md", 5)])
        corpus = Corpus([prose.Text("x", 7, "fine\n\n"), prose.Text("x", 10, "What it is.\nSo. What\nis it")])
        self.assertEqual([corpus.place(*hit)[:2] for hit in corpus.hits(r"(?:^|[.] )what\b")], [("x", 10), ("x", 11)])

    def test_code_is_not_prose(self):
        text = "a\n```sh\ntold\n```\n`told` <!-- told\n--> b\n\n    told\n    told\n\n- c\n\n    d of a list\n"
        words = prose.page_prose(text)
        self.assertNotIn("told", words)
        self.assertIn("d of a list", words)
        self.assertEqual(words.count("\n"), text.count("\n"))

    def test_long_sentences_and_paragraphs_are_found(self):
        def long(text):
            found = list(prose.blocks(prose.Text("x", 1, prose.page_prose(text))))
            return [hit.line for hit in long_sentences(found)], [hit.line for hit in long_paragraphs(found)]

        self.assertEqual(long("word " * 35 + "\n"), ([], []))
        self.assertEqual(long("One.\n" + "Word " * 36 + "\n"), ([2], []))
        self.assertEqual(long("| a | b |\n|---|---|\n| c | " + "word " * 36 + "|\n"), ([3], []))
        self.assertEqual(long("Ten words and so on, e.g. A to that end. " * 9), ([], []))
        self.assertEqual(long("Ten words and so on, as in that one here. " * 10), ([], [1]))
        items = "- " + "Ten words and so on, as in that one here. " * 5 + "\n" + "- " + "So it is. " * 20
        self.assertEqual(long(items), ([], []))

    def test_colon_chains_are_found(self):
        blocks = [prose.Text("x", 1, "One: two. Three; four.\nFive: six; seven, at 12:30:15.")]
        self.assertEqual([hit.line for hit in colon_chains(blocks)], [2])

    def test_literals_and_comments_are_read(self):
        code = ('#include "a b.h"\n// One\n/// two\nauto x = "no";  // three\nF("it is " /* four */,'
                ' "told \\n"\n  "twice {}");\n'
                "char c = '\"';  // five \"six\"\n/* seven\n * eight */\nauto y = R\"(raw text)\"; auto z = 1'000;\n")
        words = [text.flat for text in prose.literals("x.cc", code, prose.CPP_TOKEN)]
        self.assertEqual(words, ["it is", "told twice", "raw text"])
        found = [(text.line, text.flat) for text in prose.code_comments("x.cc", code, ".cc")]
        self.assertEqual(found, [(2, "one two"), (4, "three"), (5, "four"), (7, "five x"), (8, "seven eight")])
        python = '"""One\ntwo."""\nx = """no"""  # three\ny = "# no"\n# four\n# five\n'
        found = [(text.line, text.flat) for text in prose.code_comments("x.py", python, ".py")]
        self.assertEqual(sorted(found), [(1, "one two."), (3, "three"), (5, "four five")])

    def test_glossary_is_counted(self):
        page = "# G\n\n| Word | Meaning |\n|---|---|\n| atom | x |\n| PLT, MLT | y |\n"
        self.assertEqual([hit[1:] for hit in glossary_unused(page, "the atoms and plt")], [(6, "mlt")])
        self.assertEqual(len(glossary_excess(page + "| a | b |\n" * 25)), 2)

    def test_maxima_only_fall(self):
        table = "# id\tx\na\tp\t3\t-\t2\t1\tb\tc\n"
        counts = {("a", "docs"): 1, ("a", "messages"): 5, ("a", "help"): 0}
        self.assertEqual(lowered(table, counts), "# id\tx\na\tp\t1\t-\t2\t1\tb\tc\n")

    def test_more_hits_fail_and_fewer_are_noted(self):
        tree = Tree.__new__(Tree)
        tree.scopes = {scope: Corpus([prose.Text("docs/a.md", 4, "it was told")]) for scope in prose.SCOPES}

        def outcome(maximum, exact):
            row = Row("tell", r"\btold\b", {"docs": maximum}, "report", "")
            errors, notes, _ = check(tree, [row], exact)
            return errors, notes

        self.assertEqual(outcome(1, False), ([], []))
        errors, _ = outcome(0, False)
        self.assertIn("tell: 1 in docs, at most 0; write instead: report\n  docs/a.md:4: it was told\n", errors[0])
        self.assertEqual(len(outcome(2, False)[1]), 1)
        self.assertIn("lower the maximum of 2 to 1", outcome(2, True)[0][0])


def main():
    rows = list(rows_of(TABLE.read_text(encoding="utf-8")))
    if sys.argv[1:2] == ["--list"] and len(sys.argv) in (3, 4):
        wanted = [row for row in rows if row.id == sys.argv[2]]
        if not wanted or (len(sys.argv) == 4 and sys.argv[3] not in prose.SCOPES):
            sys.exit(f"language_test: error: {' '.join(sys.argv[2:])}: no such row or scope")
        tree = Tree(ROOT)
        for scope in sys.argv[3:] or [scope for scope, maximum in wanted[0].maxima.items() if maximum is not None]:
            for hit in tree.places(wanted[0], scope):
                print(f"{hit.path}:{hit.line}: {hit.text}")
        return
    if sys.argv[1:] == ["--update"]:
        _, _, counts = check(Tree(ROOT), rows, False)
        TABLE.write_text(lowered(TABLE.read_text(encoding="utf-8"), counts), encoding="utf-8")
        return
    if "--exact" in sys.argv:
        sys.argv.remove("--exact")
        Language.exact = True
    unittest.main()


if __name__ == "__main__":
    main()
