#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Feeds check.py small trees: a good one, and that one with a single thing wrong at a time."""

import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check.py")

GOOD = {
    "CMakeLists.txt": "",
    "LICENSE": "",
    ".gitignore": "/build/\n",
    ".ci/run": "#!/usr/bin/env bash\n",
    "apps/common/ucp.h": "",
    "apps/ucp-load/main.cc": '#include "convert/load.h"\n#include "common/ucp.h"\n' + "\n" * 118,
    "build/dev/big.cc": "\n" * 5000 + "#include <mpi.h>\n",
    "docs/long.md": "line\n" * 5000,
    "lib/support/base/result.h": "// lib/support/base: words\n#include <tl/expected.hpp>\n",
    "lib/support/base/version.h.in": "\n",
    "lib/support/comm/mpi_comm.cc": '#include <mpi.h>\n\n#include "support/base/result.h"\n',
    "lib/engine/device/copy.cc": "#include <cuda_runtime.h>\n#include <nccl.h>\n",
    "lib/engine/exec/run.cc": '#include "support/base/version.h"\n#include "engine/layout/map.h"\n#include "engine/exec/x_internal.h"\n',
    "lib/engine/exec/x_internal.h": "// lib/engine/exec: words\n",
    "lib/files/zip/a.cc": '#include "files/zip/x_internal.h"\n',
    "lib/files/zip/x_internal.h": "// lib/files/zip: words\n",
    "lib/engine/layout/map.h": "// lib/engine/layout: words\n/* words\n#include <mpi.h>\n*/\n// #include <torch/torch.h>\n",
    "lib/support/os/file.h": '// lib/support/os: words\n#include "support/base/result.h"\n',
    "lib/convert/load.h": "// lib/convert: words\n" + "\n" * 499,
    "tests/mpi/main.cc": '#include "shared.h"\n#include "unit/engine/exec/help.h"\n' + "\n" * 200,
    "tests/mpi/shared.h": "",
    "tests/unit/engine/exec/help.h": "",
    "tests/unit/engine/exec/x_test.cc": '#include "engine/exec/x_internal.h"\n',
    "tests/unit/files/zip_test.cc": '#include "files/zip/x_internal.h"\n',
}


class CheckTest(unittest.TestCase):
    def check(self, changes):
        """Exit code and output of the check on GOOD with `changes`: path -> text."""
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**GOOD, **changes}.items():
                full = os.path.join(root, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w", encoding="utf-8") as file:
                    file.write(text)
            done = subprocess.run(
                [sys.executable, CHECK, root], capture_output=True, text=True, check=False
            )
            self.assertEqual(done.stderr, "")
            return done.returncode, done.stdout

    def assert_found(self, changes, *lines):
        code, out = self.check(changes)
        self.assertEqual((code, out.splitlines()), (1, list(lines)))

    def test_good_tree_passes(self):
        self.assertEqual(self.check({}), (0, ""))

    def test_include_against_the_arrows(self):
        self.assert_found(
            {"lib/support/os/a.cc": '\n#include "engine/layout/map.h"\n'},
            "lib/support/os/a.cc:2: lib/support may not include engine/layout/map.h: no arrow leads from support to engine",
        )
        self.assert_found(
            {"lib/support/base/a.h": "#  include <support/os/file.h>\n"},
            "lib/support/base/a.h:1: lib/support/base may not include support/os/file.h: no arrow leads from support/base to support/os",
        )
        self.assert_found(
            {"lib/support/base/version.h.in": '#include "support/os/file.h"\n'},
            "lib/support/base/version.h.in:1: lib/support/base may not include support/os/file.h: no arrow leads from support/base to support/os",
        )
        self.assert_found(
            {"lib/support/text/a.cc": '#include "support/os/file.h"\n'},
            "lib/support/text/a.cc:1: lib/support/text may not include support/os/file.h: no arrow leads from support/text to support/os",
        )

    def test_folders_that_few_may_include(self):
        for path, included, homes in (
            ("lib/engine/tensor/a.cc", "support/os/file.h", "support, engine/exec, files, checkpoints, token_counts, "),
            ("lib/files/a.cc", "engine/layout/map.h", "engine, checkpoints, "),
            ("lib/files/zip/a.cc", "engine/exec/e.h", "engine, "),
        ):
            known = {"lib/engine/exec/e.h": "", "lib/files/a.cc": ""}
            self.assert_found(
                {**known, path: f'#include "{included}"\n'},
                f"{path}:1: {os.path.dirname(path)} may not include {included}: only {homes}"
                "convert, placement, partial, trainer may",
            )

    def test_fenced_headers(self):
        self.assert_found(
            {"lib/support/os/a.cc": "#include <mpi.h>\n"},
            "lib/support/os/a.cc:1: mpi.h may be included in lib/support/comm only",
        )
        self.assert_found(
            {"tests/mpi/a.cc": '/* why */\n#include "mpi.h"\n'},
            "tests/mpi/a.cc:2: mpi.h may be included in lib/support/comm only",
        )
        self.assert_found(
            {"lib/engine/tensor/a.cc": "#include <torch/script.h>\n#include <ATen/ATen.h>\n"},
            "lib/engine/tensor/a.cc:1: torch/script.h may be included nowhere",
            "lib/engine/tensor/a.cc:2: ATen/ATen.h may be included nowhere",
        )
        self.assert_found(
            {"lib/engine/exec/a.cc": "#include <cuda.h>\n#include <nccl.h>\n#include <cuda/std/span>\n"},
            "lib/engine/exec/a.cc:1: cuda.h may be included in lib/engine/device only",
            "lib/engine/exec/a.cc:2: nccl.h may be included in lib/engine/device only",
            "lib/engine/exec/a.cc:3: cuda/std/span may be included in lib/engine/device only",
        )

    def test_an_include_in_comments_hides_nothing_after_it(self):
        self.assert_found(
            {"lib/support/os/a.cc": 'const char* a = "/*";\n#include <mpi.h>\nconst char* b = "*/";\n'},
            "lib/support/os/a.cc:2: mpi.h may be included in lib/support/comm only",
        )

    def test_quoted_paths_start_at_a_module(self):
        self.assert_found(
            {"lib/support/os/a.cc": '#include "file.h"\n#include "../base/result.h"\n'},
            'lib/support/os/a.cc:1: "file.h" is not a header of lib/ (written "module/file.h")',
            'lib/support/os/a.cc:2: "../base/result.h" is not a header of lib/ (written "module/file.h")',
        )

    def test_helpers_of_commands_and_tests_stay_theirs(self):
        for path, helper in (
            ("lib/support/os/a.cc", "common/ucp.h"),
            ("apps/ucp-load/main.cc", "unit/engine/exec/help.h"),
            ("tests/mpi/main.cc", "common/ucp.h"),
        ):
            self.assert_found(
                {path: f'#include "{helper}"\n'},
                f'{path}:1: "{helper}" is not a header of lib/ (written "module/file.h")',
            )

    def test_private_headers_stay_private(self):
        self.assert_found(
            {"lib/convert/a.cc": '#include "engine/exec/x_internal.h"\n'},
            "lib/convert/a.cc:1: engine/exec/x_internal.h is private to lib/engine/exec",
        )
        for path in ("lib/files/torch_pt/a.cc", "lib/convert/a.cc", "tests/unit/engine/exec/a_test.cc"):
            self.assert_found(
                {path: '#include "files/zip/x_internal.h"\n'},
                f"{path}:1: files/zip/x_internal.h is private to lib/files/zip",
            )

    def test_texts_from_outside_have_one_parser(self):
        wrong = "texts from outside are parsed by support/json/json.h only"
        for call in ("json::parse(text)", "Json::sax_parse(a, b, &c)", "json::from_msgpack(a)"):
            text = f"// json::parse(text) in a comment\nx = nlohmann::{call};\n"
            self.assert_found({"lib/support/os/a.cc": text}, f"lib/support/os/a.cc:2: {wrong}")
            self.assertEqual(self.check({"lib/support/json/parse.cc": text,
                                         "tests/mpi/a.cc": text}), (0, ""))
        self.assertEqual(self.check({"lib/support/os/a.cc": "cli_.parse(words); json::Parse(text, x);\n"}),
                         (0, ""))

    def test_unknown_module(self):
        self.assert_found(
            {"lib/util/a.h": "// lib/util: words\n"},
            "lib/util/a.h: util is not a module that this check knows",
        )

    def test_long_files(self):
        for path in ("lib/support/os/a.cc", "lib/support/os/a.h", "tests/a.py", "scripts/slurm/a.sh"):
            self.assert_found(
                {path: "\n" * 501}, f"{path}: 501 lines, at most 500 are allowed"
            )
        self.assert_found(
            {"scripts/a": "#!/usr/bin/env bash\n" + "\n" * 500},
            "scripts/a: 501 lines, at most 500 are allowed",
        )

    def test_long_main(self):
        self.assert_found(
            {"apps/ucp-load/main.cc": "\n" * 121},
            "apps/ucp-load/main.cc: 121 lines, at most 120 are allowed in a main",
        )

    def test_comments(self):
        good = "/// Reads.\n/// \\error kIo\n/// Local.\nint f();\n\n/// One. \\error kIo\nint g();\n"
        self.assertEqual(self.check({"lib/support/os/a.h": good}), (0, ""))
        self.assert_found(
            {"lib/support/os/a.h": "/// Reads. \\error kIo\n/// Local.\nint f();\n"},
            "lib/support/os/a.h:1: \\error does not begin its line of the comment",
        )
        self.assert_found(
            {"lib/support/os/a.h": "  /// Reads a file\n  /// whole. \\pre open\nint f();\n"},
            "lib/support/os/a.h:2: \\pre does not begin its line of the comment",
        )
        self.assert_found(
            {"lib/support/os/a.h": "/// \\error " + "x" * 90 + "\n"},
            "lib/support/os/a.h:1: a comment of 101 columns, at most 100 are allowed",
        )

    def test_one_header_of_a_folder_is_read_first(self):
        self.assert_found(
            {"lib/support/os/file.h": ""},
            'lib/support/os: one header begins with "// lib/support/os: ", to be read first; found none',
        )
        self.assert_found(
            {"lib/support/os/dir.h": "// lib/support/os: words\n"},
            'lib/support/os: one header begins with "// lib/support/os: ", to be read first; found dir.h, file.h',
        )

    def test_paths_are_opened_in_os_only(self):
        for line, call in [
            ("  const int fd = ::open(path.c_str(), O_RDONLY);", "open"),
            ("  const int fd = open(path.c_str(), O_RDONLY);", "open"),
            ("  if (::renameat2(a, b, c, d, 0) != 0) return;", "renameat2"),
            ("  unlink(path);", "unlink"),
            ("  std::ofstream out(path);", "std::ofstream"),
            ("  std::filesystem::remove(path);", "std::filesystem"),
        ]:
            self.assert_found(
                {"lib/engine/exec/run.cc": line + "\n"},
                f"lib/engine/exec/run.cc:1: {call}: paths are opened in lib/support/os only (support/os/directory.h)",
            )
            self.assertEqual(self.check({"lib/support/os/dir.cc": line + "\n"}), (0, ""))
            self.assertEqual(self.check({"tests/mpi/main.cc": line + "\n"}), (0, ""))
        text = "// ::open(a)\nf(\"unlink(x)\"); directory.open(); Rename(a); return comm.Agree(open());\n"
        self.assertEqual(self.check({"lib/engine/exec/run.cc": text}), (0, ""))

    def test_top_level(self):
        self.assert_found(
            {"notes.txt": "", "src/a.cc": ""},
            "notes.txt: not one of the entries that the top level holds",
            "src: not one of the entries that the top level holds",
        )


if __name__ == "__main__":
    unittest.main()
