#!/usr/bin/env python3
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
    "apps/ucp-load/main.cc": '#include "ucp/load.h"\n#include "common/ucp.h"\n' + "\n" * 118,
    "build/dev/big.cc": "\n" * 5000 + "#include <mpi.h>\n",
    "docs/long.md": "line\n" * 5000,
    "lib/base/result.h": "// lib/base: words\n#include <tl/expected.hpp>\n",
    "lib/base/version.h.in": "\n",
    "lib/comm/mpi_comm.cc": '#include <mpi.h>\n\n#include "base/result.h"\n',
    "lib/device/copy.cc": "#include <cuda_runtime.h>\n#include <nccl.h>\n",
    "lib/exec/run.cc": '#include "base/version.h"\n#include "layout/map.h"\n#include "exec/x_internal.h"\n',
    "lib/exec/x_internal.h": "// lib/exec: words\n",
    "lib/format/zip/a.cc": '#include "format/zip/x_internal.h"\n',
    "lib/format/zip/x_internal.h": "// lib/format/zip: words\n",
    "lib/layout/map.h": "// lib/layout: words\n/* words\n#include <mpi.h>\n*/\n// #include <torch/torch.h>\n",
    "lib/os/file.h": '// lib/os: words\n#include "base/result.h"\n',
    "lib/ucp/load.h": "// lib/ucp: words\n" + "\n" * 599,
    "tests/mpi/main.cc": '#include "shared.h"\n#include "unit/exec/help.h"\n' + "\n" * 200,
    "tests/mpi/shared.h": "",
    "tests/unit/exec/help.h": "",
    "tests/unit/exec/x_test.cc": '#include "exec/x_internal.h"\n',
    "tests/unit/format/zip_test.cc": '#include "format/zip/x_internal.h"\n',
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
            {"lib/os/a.cc": '\n#include "layout/map.h"\n'},
            "lib/os/a.cc:2: lib/os may not include layout/map.h: no arrow leads from os to layout",
        )
        self.assert_found(
            {"lib/base/a.h": "#  include <os/file.h>\n"},
            "lib/base/a.h:1: lib/base may not include os/file.h: no arrow leads from base to os",
        )
        self.assert_found(
            {"lib/base/version.h.in": '#include "os/file.h"\n'},
            "lib/base/version.h.in:1: lib/base may not include os/file.h: no arrow leads from base to os",
        )
        self.assert_found(
            {"lib/cli/a.cc": '#include "os/file.h"\n'},
            "lib/cli/a.cc:1: lib/cli may not include os/file.h: no arrow leads from cli to os",
        )

    def test_fenced_headers(self):
        self.assert_found(
            {"lib/os/a.cc": "#include <mpi.h>\n"},
            "lib/os/a.cc:1: mpi.h may be included in lib/comm only",
        )
        self.assert_found(
            {"tests/mpi/a.cc": '/* why */\n#include "mpi.h"\n'},
            "tests/mpi/a.cc:2: mpi.h may be included in lib/comm only",
        )
        self.assert_found(
            {"lib/tensor/a.cc": "#include <torch/script.h>\n#include <ATen/ATen.h>\n"},
            "lib/tensor/a.cc:1: torch/script.h may be included nowhere",
            "lib/tensor/a.cc:2: ATen/ATen.h may be included nowhere",
        )
        self.assert_found(
            {"lib/exec/a.cc": "#include <cuda.h>\n#include <nccl.h>\n#include <cuda/std/span>\n"},
            "lib/exec/a.cc:1: cuda.h may be included in lib/device only",
            "lib/exec/a.cc:2: nccl.h may be included in lib/device only",
            "lib/exec/a.cc:3: cuda/std/span may be included in lib/device only",
        )

    def test_an_include_in_comments_hides_nothing_after_it(self):
        self.assert_found(
            {"lib/os/a.cc": 'const char* a = "/*";\n#include <mpi.h>\nconst char* b = "*/";\n'},
            "lib/os/a.cc:2: mpi.h may be included in lib/comm only",
        )

    def test_quoted_paths_start_at_a_module(self):
        self.assert_found(
            {"lib/os/a.cc": '#include "file.h"\n#include "../base/result.h"\n'},
            'lib/os/a.cc:1: "file.h" is no header of lib/ (written "module/file.h")',
            'lib/os/a.cc:2: "../base/result.h" is no header of lib/ (written "module/file.h")',
        )

    def test_helpers_of_commands_and_tests_stay_theirs(self):
        for path, helper in (
            ("lib/os/a.cc", "common/ucp.h"),
            ("apps/ucp-load/main.cc", "unit/exec/help.h"),
            ("tests/mpi/main.cc", "common/ucp.h"),
        ):
            self.assert_found(
                {path: f'#include "{helper}"\n'},
                f'{path}:1: "{helper}" is no header of lib/ (written "module/file.h")',
            )

    def test_private_headers_stay_private(self):
        self.assert_found(
            {"lib/ucp/a.cc": '#include "exec/x_internal.h"\n'},
            "lib/ucp/a.cc:1: exec/x_internal.h is private to lib/exec",
        )
        for path in ("lib/format/torch_pt/a.cc", "lib/exec/a.cc", "tests/unit/exec/a_test.cc"):
            self.assert_found(
                {path: '#include "format/zip/x_internal.h"\n'},
                f"{path}:1: format/zip/x_internal.h is private to lib/format/zip",
            )

    def test_texts_from_outside_have_one_parser(self):
        wrong = "texts from outside are parsed by format/json/json.h only"
        for call in ("json::parse(text)", "Json::sax_parse(a, b, &c)", "json::from_msgpack(a)"):
            text = f"// json::parse(text) in a comment\nx = nlohmann::{call};\n"
            self.assert_found({"lib/os/a.cc": text}, f"lib/os/a.cc:2: {wrong}")
            self.assertEqual(self.check({"lib/format/json/parse.cc": text,
                                         "tests/mpi/a.cc": text}), (0, ""))
        self.assertEqual(self.check({"lib/os/a.cc": "cli_.parse(words); json::Parse(text, x);\n"}),
                         (0, ""))

    def test_unknown_module(self):
        self.assert_found(
            {"lib/util/a.h": "// lib/util: words\n"},
            "lib/util/a.h: util is no module that this check knows",
        )

    def test_long_files(self):
        for path in ("lib/os/a.cc", "lib/os/a.h", "tests/a.py", "scripts/slurm/a.sh"):
            self.assert_found(
                {path: "\n" * 601}, f"{path}: 601 lines, at most 600 are allowed"
            )
        self.assert_found(
            {"scripts/a": "#!/usr/bin/env bash\n" + "\n" * 600},
            "scripts/a: 601 lines, at most 600 are allowed",
        )

    def test_long_main(self):
        self.assert_found(
            {"apps/ucp-load/main.cc": "\n" * 121},
            "apps/ucp-load/main.cc: 121 lines, at most 120 are allowed in a main",
        )

    def test_comments(self):
        good = "/// Reads.\n/// \\error kIo\n/// Local.\nint f();\n\n/// One. \\error kIo\nint g();\n"
        self.assertEqual(self.check({"lib/os/a.h": good}), (0, ""))
        self.assert_found(
            {"lib/os/a.h": "/// Reads. \\error kIo\n/// Local.\nint f();\n"},
            "lib/os/a.h:1: \\error does not begin its line of the comment",
        )
        self.assert_found(
            {"lib/os/a.h": "  /// Reads a file\n  /// whole. \\pre open\nint f();\n"},
            "lib/os/a.h:2: \\pre does not begin its line of the comment",
        )
        self.assert_found(
            {"lib/os/a.h": "/// \\error " + "x" * 90 + "\n"},
            "lib/os/a.h:1: a comment of 101 columns, at most 100 are allowed",
        )

    def test_one_header_of_a_folder_is_read_first(self):
        self.assert_found(
            {"lib/os/file.h": ""},
            'lib/os: one header begins with "// lib/os: ", to be read first; found none',
        )
        self.assert_found(
            {"lib/os/dir.h": "// lib/os: words\n"},
            'lib/os: one header begins with "// lib/os: ", to be read first; found dir.h, file.h',
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
                {"lib/exec/run.cc": line + "\n"},
                f"lib/exec/run.cc:1: {call}: paths are opened in lib/os only (os/directory.h)",
            )
            self.assertEqual(self.check({"lib/os/dir.cc": line + "\n"}), (0, ""))
            self.assertEqual(self.check({"tests/mpi/main.cc": line + "\n"}), (0, ""))
        text = "// ::open(a)\nf(\"unlink(x)\"); directory.open(); Rename(a); return comm.Agree(open());\n"
        self.assertEqual(self.check({"lib/exec/run.cc": text}), (0, ""))

    def test_top_level(self):
        self.assert_found(
            {"notes.txt": "", "src/a.cc": ""},
            "notes.txt: not one of the entries that the top level holds",
            "src: not one of the entries that the top level holds",
        )


if __name__ == "__main__":
    unittest.main()
