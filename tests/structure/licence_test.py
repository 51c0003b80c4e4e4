#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source file names its licence in its first line, or in the second after "#!"."""

import os
import sys
import unittest

import check

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MORE_SUFFIXES = {".c", ".cmake"}  # in addition to those of check.is_source


def is_checked(path, text):
    top = path.split(os.sep)[0]
    if top not in ("apps", "examples", "lib", "scripts", "tests") or path.startswith(os.path.join("tests", "data")):
        return False
    name = os.path.basename(path)
    return check.is_source(path, text) or os.path.splitext(name)[1] in MORE_SUFFIXES or name == "CMakeLists.txt"


def names_licence(text):
    lines = text.split("\n")
    return check.LICENCE in lines[1 if lines[0].startswith("#!") else 0]


class LicenceTest(unittest.TestCase):
    def test_every_source_names_its_licence(self):
        checked, missing = 0, []
        for path in check.source_files(ROOT):
            if os.sep + "corpus" + os.sep in path:
                continue
            text = check.read(ROOT, path)
            if is_checked(path, text):
                checked += 1
                if not names_licence(text):
                    missing.append(path)
        self.assertGreater(checked, 1000)
        self.assertEqual(missing, [])

    def test_a_missing_line_is_found(self):
        self.assertFalse(names_licence("#include <a>\n"))
        self.assertFalse(names_licence("#!/bin/sh\n# words\n"))
        self.assertTrue(names_licence(f"#!/bin/sh\n# {check.LICENCE}\n"))


if __name__ == "__main__":
    sys.exit(unittest.main())
