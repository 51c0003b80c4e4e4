#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The public interface of the Python package: help texts, signatures and exceptions.

Usage: interface_test.py BIN PACKAGE
"""

import inspect
import io
import pathlib
import pickle
import pydoc
import re
import subprocess
import sys
import typing
import unittest

import live  # first: it makes the modules of the other tests importable

ROOT = pathlib.Path(__file__).resolve().parents[3]
DOCUMENTED_AT = re.compile(r"Documentation: (\S+) in shardwright\.DOCS\b")
ERRORS = {2: "UsageError", 3: "NotFoundError", 4: "CorruptInputError", 5: "MismatchError", 6: "BusyError", 7: "TransferError",
          8: "LimitError", 9: "UnsupportedError"}
# These modules do not need PyTorch at run time. The package itself is replaced by a stub.
WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = sys.modules["deepspeed"] = None
package = types.ModuleType("shardwright")
package.__path__ = [sys.argv[1] + "/shardwright"]
sys.modules["shardwright"] = package
from shardwright import _errors, _snapshot, _types
"""
LAZY = """
import sys
sys.path.insert(0, sys.argv[1])
import shardwright
print(sorted({"deepspeed", "transformers"} & set(sys.modules)))
"""


def slug(heading):
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def public_objects():
    """(name, object) of all public classes, functions, methods and properties, and of constructors."""
    import shardwright
    for name in shardwright.__all__:
        found = getattr(shardwright, name)
        if inspect.isclass(found) or inspect.isroutine(found):
            yield name, found
        for key, value in vars(found).items() if inspect.isclass(found) else ():
            if key == "__init__" or not key.startswith("_") and (function_of(value) is not None):
                yield f"{name}.{key}", value


def issubclass_of(value, kind):
    return inspect.isclass(value) and issubclass(value, kind)


def function_of(value):
    """The function of a method, None for other objects."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return value if inspect.isfunction(value) else None


class Help(unittest.TestCase):
    def test_begins_with_the_two_entry_points(self):
        import shardwright
        self.assertEqual(shardwright.__all__[:2], ["load", "PartialCheckpoints"])
        self.assertEqual(len(set(shardwright.__all__)), len(shardwright.__all__))
        out = io.StringIO()
        pydoc.Helper(output=out).help(shardwright)
        text = out.getvalue()
        self.assertLess(text.index("load fills"), text.index("PartialCheckpoints takes"))
        self.assertLess(text.index("PartialCheckpoints takes"), text.index("PACKAGE CONTENTS"))
        self.assertLess(text.index("PACKAGE CONTENTS"), 1800)

    def test_every_public_object_is_documented(self):
        for name, found in public_objects():
            with self.subTest(name):
                if name.endswith(".__init__"):
                    continue
                text = inspect.getdoc(found) or ""
                self.assertTrue(text)
                if "." not in name and not issubclass_of(found, Exception):
                    self.assertRegex(text, DOCUMENTED_AT)
                if inspect.isroutine(found) or isinstance(found, classmethod):
                    self.assertRegex(text, r"\b[Cc]ollective\b|\bLocal\b")

    def test_every_argument_is_documented(self):
        for name, found in public_objects():
            function = function_of(found)
            if function is None or name.startswith("Error."):
                continue
            owner = dict(public_objects())[name.partition(".")[0]] if name.endswith(".__init__") else found
            for parameter in inspect.signature(function).parameters:
                if parameter not in ("self", "cls") and not parameter.startswith("_"):
                    with self.subTest(name, parameter=parameter):
                        self.assertRegex(inspect.getdoc(owner), rf"\b{parameter}\b")

    def test_links_lead_to_sections(self):
        import shardwright
        self.assertEqual(shardwright.DOCS, str(ROOT / "docs"))
        count = 0
        for name, found in public_objects():
            for link in DOCUMENTED_AT.findall(found.__doc__ or ""):
                page, _, section = link.partition("#")
                with self.subTest(name, link=link):
                    headings = re.findall(r"(?m)^#+ (.*)$", (pathlib.Path(shardwright.DOCS) / page).read_text(encoding="utf-8"))
                    self.assertTrue(not section or section in map(slug, headings))
                    count += 1
        self.assertGreater(count, 20)

    def test_no_link_is_of_another_form(self):
        import shardwright
        for name, found in [("shardwright", shardwright), *public_objects()]:
            with self.subTest(name):
                self.assertNotRegex(found.__doc__ or "", r"Documentation: (?!.* in shardwright\.DOCS\b)|\bdocs/")


class Signatures(unittest.TestCase):
    def test_have_types(self):
        for name, found in public_objects():
            function = function_of(found)
            if function is None:
                continue
            with self.subTest(name):
                signature = inspect.signature(function)
                for parameter in list(signature.parameters.values()):
                    if parameter.name not in ("self", "cls"):
                        self.assertIsNot(parameter.annotation, inspect.Parameter.empty)
                self.assertIsNot(signature.return_annotation, inspect.Signature.empty)
                self.assertNotRegex(str(signature), r"\bAny\b")
                self.assertTrue(typing.get_type_hints(function))  # every name of the annotations exists

    def test_types_and_errors_do_not_import_torch(self):
        subprocess.run([sys.executable, "-B", "-I", "-c", WITHOUT_TORCH, live.PACKAGE], check=True)

    def test_the_package_does_not_import_deepspeed(self):
        done = subprocess.run([sys.executable, "-B", "-I", "-c", LAZY, live.PACKAGE], check=True, text=True, capture_output=True)
        self.assertEqual(done.stdout, "[]\n")


class Errors(unittest.TestCase):
    def test_have_a_class_by_their_exit_code(self):
        import shardwright
        for code in (*range(1, 11), 75):
            with self.subTest(code):
                error = shardwright.Error(code, "text", 3)
                self.assertEqual(type(error).__name__, ERRORS.get(code, "Error"))
                self.assertIs(type(error), getattr(shardwright, ERRORS.get(code, "Error")))
                self.assertIsInstance(error, shardwright.Error)
                self.assertIsInstance(error, RuntimeError)
                self.assertEqual((error.code, error.rank, str(error)), (code, 3, "text"))

    def test_are_errors_of_python(self):
        import shardwright
        for expected, code in ((ValueError, 2), (ValueError, 4), (NotImplementedError, 9)):
            with self.assertRaises(expected):
                raise shardwright.Error(code, "text")

    def test_of_a_call(self):
        import shardwright
        with self.assertRaises(shardwright.NotFoundError) as caught:
            shardwright.IdleTimes("unix:/nowhere/agent.sock", 0)
        self.assertEqual((caught.exception.code, caught.exception.rank), (3, None))

    def test_pass_to_other_processes(self):
        import shardwright
        error = pickle.loads(pickle.dumps(shardwright.Error(7, "text", 1)))
        self.assertEqual((type(error), error.code, error.rank, str(error)), (shardwright.TransferError, 7, 1, "text"))


if __name__ == "__main__":
    live.start()
    unittest.main(verbosity=2)
