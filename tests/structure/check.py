#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the structure of the source tree: includes between modules, file sizes, places of files.

Usage: check.py [--graph] ROOT
Prints one line per violation, "PATH[:LINE]: WHAT", and exits 1 if there is one.
  --graph  prints the includes between folders instead: "partial/save -> partial/select partial/store"
"""

import os
import re
import sys

from rules import (
    FENCED, LIMITED, MODULES, OUTPUTS, PARSE, PARSERS, PATH_CALL, PATH_CALLERS, STAND_INS, SUBMODULES, TOP_LEVEL,
)

SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".in", ".py", ".sh", ".sbatch"}
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".in"}
FILE_LINES_MAX = 500
MAIN_LINES_MAX = 120
COLUMNS_MAX = 100
FOLDER_FILES_MAX = 25  # source files of lib/ directly in one folder

LICENCE = "SPDX-License-Identifier: Apache-2.0"  # in a comment, first in every source file

COMMENT_OR_TEXT = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#[ \t]*include[^\n]*|"(?:\\.|[^"\\\n])*"', re.S | re.M
)
CONTRACT = re.compile(r"^[ \t]*///(?!<).*\S.*?\s(\\(?:error|param|pre|returns)\b)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.M)


def allowed(name, arrows):
    """Modules that `name` may include, itself among them."""
    found = {name}
    waiting = [name]
    while waiting:
        for other in arrows[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def source_files(root):
    """Relative paths of all files, in a fixed order; no outputs, caches or links to folders."""
    for folder, folders, names in os.walk(root):
        at_top = os.path.samefile(folder, root)
        folders[:] = sorted(
            name
            for name in folders
            if name != "__pycache__"
            and not (at_top and (name in OUTPUTS or (name.startswith(".") and name != ".ci")))
        )
        for name in sorted(names):
            if not name.endswith(".pyc"):
                yield os.path.relpath(os.path.join(folder, name), root)


def without_comments(text):
    """Drops comments but keeps lines, strings and include lines where they are."""

    def keep(match):
        piece = match.group()
        return "\n" * piece.count("\n") if piece.startswith(("//", "/*")) else piece

    return COMMENT_OR_TEXT.sub(keep, text)


def includes_of(text):
    """(line, path, quoted) of every include directive."""
    text = without_comments(text)
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, match.group(1) or match.group(2), match.group(1) is not None


def folder_of(path):
    """The parent folder of a relative path, with "/" on every system."""
    return os.path.dirname(path).replace(os.sep, "/")


def module_of(path):
    """The module of lib/ that a relative path belongs to, None outside lib/."""
    parts = path.split(os.sep)
    return parts[1] if parts[0] == "lib" and len(parts) > 2 else None


def submodule_of(path):
    """The submodule that a path "module/submodule/file" belongs to, "" for the module itself."""
    return "/".join(path.split("/")[1:-1])


def full_name(module, submodule):
    return f"{module}/{submodule}" if submodule else module


def check_submodule(module, path, included):
    """The error in an include from one submodule of a module to another, or None."""
    submodules = SUBMODULES.get(module, {"": []})
    source, target = submodule_of(path), submodule_of(included)
    for each in (source, target):
        if each not in submodules:
            return f"{full_name(module, each)} is not a submodule that this check knows"
    if target not in allowed(source, submodules):
        return (
            f"lib/{full_name(module, source)} may not include {included}: no arrow leads from "
            f"{full_name(module, source)} to {full_name(module, target)}"
        )
    return None


def is_inside(folder, others):
    """Returns whether a folder is one of the others, or inside one of them."""
    return any(f"{folder}/".startswith(f"{other}/") for other in others)


def check_limited(path, included):
    """The error in an include of a folder that LIMITED keeps to certain folders, or None."""
    folder = folder_of(path).removeprefix("lib/")
    for limited, homes in LIMITED.items():
        if is_inside(os.path.dirname(included), [limited]) and not is_inside(folder, homes):
            return f"lib/{folder} may not include {included}: only {', '.join(homes)} may"
    return None


def is_project_header(root, included):
    exists = os.path.isfile(os.path.join(root, "lib", included))
    return exists or os.path.isfile(os.path.join(root, "lib", included + ".in"))


def is_helper_header(root, path, included):
    """Commands and tests share headers of their own: in the same folder, or below apps/ or tests/."""
    top = path.split(os.sep)[0]
    if top not in ("apps", "tests") or ".." in included:
        return False
    folders = (os.path.dirname(path), top)
    return any(os.path.isfile(os.path.join(root, folder, included)) for folder in folders)


def check_private(path, included):
    """The error in including a header that is private to its folder, or None."""
    if not included.endswith("_internal.h"):
        return None
    home = os.path.dirname(included)
    folder = folder_of(path)
    if folder == f"lib/{home}":
        return None
    for kind in ("tests/unit/", "tests/property/"):
        tested = folder.removeprefix(kind)
        if folder.startswith(kind) and is_inside(home, [tested]):
            return None
    return f"{included} is private to lib/{home}"


def check_include(root, path, included, quoted):
    """The error in one include directive of the file at `path`, or None."""
    module = module_of(path)
    for pattern, home in FENCED:
        if path.replace(os.sep, "/").startswith(STAND_INS.get(home, ())):
            continue
        if pattern.fullmatch(included) and not (home and is_inside(folder_of(path), [f"lib/{home}"])):
            return f"{included} may be included " + (f"in lib/{home} only" if home else "nowhere")
    if not is_project_header(root, included):
        if not quoted:
            return None
        if is_helper_header(root, path, included):
            return None
        return f'"{included}" is not a header of lib/ (written "module/file.h")'
    target = included.split("/")[0]
    if target not in MODULES:
        return f"{included}: {target} is not a module that this check knows"
    if module is not None and module in MODULES and target not in allowed(module, MODULES):
        return f"lib/{module} may not include {included}: no arrow leads from {module} to {target}"
    if module == target:
        wrong = check_submodule(module, path.replace(os.sep, "/").removeprefix("lib/"), included)
        if wrong:
            return wrong
    if module is not None:
        wrong = check_limited(path, included)
        if wrong:
            return wrong
    return check_private(path, included)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def is_source(path, text):
    return os.path.splitext(path)[1] in SOURCE_SUFFIXES or text.startswith("#!")


def check_comments(path, text):
    """Comments that the formatter does not fix: see CommentPragmas in .clang-format."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("//"):
            continue
        if len(line) > COLUMNS_MAX:
            yield f"{path}:{number}: a comment of {len(line)} columns, at most {COLUMNS_MAX} are allowed"
        around = lines[number - 2 : number - 1] + lines[number : number + 1]
        glued = CONTRACT.match(line)
        if glued and any(other.lstrip().startswith("///") for other in around):
            yield f"{path}:{number}: {glued.group(1)} does not begin its line of the comment"


def check_path_calls(path, text):
    """Calls that open, make, rename or remove what a path names, outside lib/support/os."""
    name = path.replace(os.sep, "/")
    if name.startswith("lib/support/os/") or not name.startswith(("lib/", "apps/")) or name in PATH_CALLERS:
        return
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        found = PATH_CALL.search(re.sub(r'"(?:\\.|[^"\\])*"', '""', line))
        if found:
            call = found.group().split("(")[0].removeprefix("::")
            yield f"{path}:{number}: {call}: paths are opened in lib/support/os only (support/os/directory.h)"


def check_top_level(root):
    for name in sorted(os.listdir(root)):
        if not name.startswith(".") and name not in TOP_LEVEL | OUTPUTS:
            yield f"{name}: not one of the entries that the top level holds"


def check_file(root, path):
    text = read(root, path)
    if not is_source(path, text):
        return
    line_count = len(text.splitlines())
    if line_count > FILE_LINES_MAX:
        yield f"{path}: {line_count} lines, at most {FILE_LINES_MAX} are allowed"
    parts = path.split(os.sep)
    if parts[0] == "apps" and parts[-1] == "main.cc" and line_count > MAIN_LINES_MAX:
        yield f"{path}: {line_count} lines, at most {MAIN_LINES_MAX} are allowed in a main"
    if os.path.splitext(path)[1] not in CPP_SUFFIXES:
        return
    if module_of(path) is not None and module_of(path) not in MODULES:
        yield f"{path}: {module_of(path)} is not a module that this check knows"
    yield from check_comments(path, text)
    yield from check_path_calls(path, text)
    if parts[0] in ("apps", "lib") and path.replace(os.sep, "/") not in PARSERS:
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            if PARSE.search(line):
                yield f"{path}:{number}: texts from outside are parsed by support/json/json.h only"
    for line, included, quoted in includes_of(text):
        wrong = check_include(root, path, included, quoted)
        if wrong:
            yield f"{path}:{line}: {wrong}"


def check_folders(root):
    """Folders of lib/ that hold too many files to be looked through."""
    counts = {}
    for path in source_files(root):
        if module_of(path) is not None and os.path.splitext(path)[1] in CPP_SUFFIXES:
            folder = os.path.dirname(path)
            counts[folder] = counts.get(folder, 0) + 1
    for folder, count in sorted(counts.items()):
        if count > FOLDER_FILES_MAX:
            yield f"{folder}: {count} source files, at most {FOLDER_FILES_MAX} are allowed"


def check_leads(root):
    """Each folder of lib/ has one header to read first: it begins with "// lib/FOLDER: "."""
    leads = {}
    for path in source_files(root):
        if module_of(path) is not None and path.endswith(".h"):
            folder = folder_of(path)
            found = leads.setdefault(folder, [])
            if read(root, path).removeprefix(f"// {LICENCE}\n").startswith(f"// {folder}: "):
                found.append(os.path.basename(path))
    for folder, found in sorted(leads.items()):
        if len(found) != 1:
            names = ", ".join(found) if found else "none"
            yield f'{folder}: one header begins with "// {folder}: ", to be read first; found {names}'


def check_tree(root):
    """All violations of the tree at `root`, one line each."""
    found = list(check_top_level(root))
    for path in source_files(root):
        found.extend(check_file(root, path))
    found.extend(check_folders(root))
    found.extend(check_leads(root))
    return found


def graph_of(root):
    """Lines "FOLDER -> FOLDER..." for every folder of lib/ with sources: what its files include."""
    edges = {}
    for path in source_files(root):
        if module_of(path) is None or os.path.splitext(path)[1] not in CPP_SUFFIXES:
            continue
        folder = folder_of(path).removeprefix("lib/")
        found = edges.setdefault(folder, set())
        for _, included, _ in includes_of(read(root, path)):
            if is_project_header(root, included) and os.path.dirname(included) != folder:
                found.add(os.path.dirname(included))
    return [f"{folder} -> {' '.join(sorted(edges[folder]))}".rstrip(" ->") for folder in sorted(edges)]


def main():
    arguments = sys.argv[1:]
    graph = arguments[:1] == ["--graph"]
    if graph:
        arguments = arguments[1:]
    if len(arguments) != 1 or not os.path.isdir(os.path.join(arguments[0], "lib")):
        print("usage: check.py [--graph] ROOT (a folder that holds lib/)", file=sys.stderr)
        return 2
    if graph:
        print("\n".join(graph_of(arguments[0])))
        return 0
    found = check_tree(arguments[0])
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
