#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/site.d/hooks.py: links of pages that are written for the repository lead somewhere on the site."""

import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "site.d"))

import hooks  # pylint: disable=wrong-import-position,import-error

REPOSITORY = "https://example.org/a/b"


class Site(unittest.TestCase):
    def links(self, text, page="tutorial.md", repository=REPOSITORY):
        return hooks.with_links(text, page, repository)

    def test_links_within_the_docs_stay(self):
        for text in ("[a](live.md#x) [b](#c) [d](https://e.f) [g](maps.schema.json)", "[a](no/such/page.md)"):
            self.assertEqual(self.links(text), text)

    def test_links_to_sources_lead_to_the_repository(self):
        self.assertEqual(self.links("[a](../lib/support/cli/app.h#L3)"), f"[a]({REPOSITORY}/blob/main/lib/support/cli/app.h#L3)")
        self.assertEqual(self.links("[`x` y](../../patterns)", "formats/dcp.md"), f"[`x` y]({REPOSITORY}/tree/main/patterns)")
        self.assertEqual(self.links("[`a`](../lib/support/cli/app.h) b", repository=""), "`a` b")

    def test_links_to_folders_lead_to_their_first_page(self):
        index = hooks.index_of("formats")
        self.assertEqual(self.links("[a](formats)"), f"[a](formats/{index})")
        self.assertEqual(self.links("[a](../formats/)", "decisions/x.md"), f"[a](../formats/{index})")

    def test_pages_of_the_top_level_are_on_the_site(self):
        self.assertEqual(self.links("[a](../CONTRIBUTING.md#set-up)"), "[a](CONTRIBUTING.md#set-up)")
        self.assertEqual(self.links("[a](docs/SECURITY.md) [b](CODE_OF_CONDUCT.md) [c](docs)", "CONTRIBUTING.md"),
                         "[a](SECURITY.md) [b](CODE_OF_CONDUCT.md) [c](README.md)")
        self.assertEqual(self.links("[a](../lib)", "CONTRIBUTING.md"), "[a](../lib)")

    def test_code_is_left_alone(self):
        text = "`[a](../lib)` ``b` [c](../lib)``\n```\n[d](../lib) x\\|y\n```\n"
        self.assertEqual(self.links(text), text)
        self.assertEqual(self.links("| `--a b\\|c` | d \\| e |"), "| `--a b|c` | d \\| e |")

    def test_lists_and_tables_after_a_paragraph_get_a_gap(self):
        for text, gaps in (("a\n* b\n  c\n* d\n", "a\n\n* b\n  c\n* d\n"), ("a\n1. b\n", "a\n\n1. b\n"),
                           ("a\n| b |\n|---|\n| c |\n", "a\n\n| b |\n|---|\n| c |\n"),
                           ("in\n1999. b\n", None),
                           ("1. a\n\n   b\n2. c\n3. d\n", "1. a\n\n   b\n\n2. c\n3. d\n"), ("```\na\n* b\n```\n", None)):
            self.assertEqual(hooks.with_gaps(text), gaps or text)

    def test_folders_of_the_navigation_become_their_pages(self):
        (formats,) = hooks.expanded([{"Formats": "formats/"}])
        names = [next(iter(page.values())) for page in formats["Formats"][1:]]
        self.assertIn("formats/dcp.md", names)
        self.assertEqual(names, sorted(names))
        self.assertEqual(hooks.expanded([{"A": ["b.md", {"C": "d.md"}]}]), [{"A": ["b.md", {"C": "d.md"}]}])

    def test_a_list_of_pages_leaves_out_those_that_have_a_link(self):
        self.assertIn("](dcp.md)", hooks.page_list("formats/"))
        self.assertNotIn("](dcp.md)", hooks.page_list("formats/", but="see [DCP](dcp.md#x)"))


if __name__ == "__main__":
    unittest.main()
