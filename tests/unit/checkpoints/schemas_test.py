# SPDX-License-Identifier: Apache-2.0
"""Holds the patterns and maps of the project against their schemas, and the schemas against broken files.

    schemas_test.py ROOT
"""

import json
import pathlib
import sys

try:
    import jsonschema
except ImportError:
    print("skipped: python3-jsonschema is not installed")
    sys.exit(77)

ROOT = pathlib.Path(sys.argv[1])

RULE = {"match": "a", "split": "dim", "dim": 0}
AXES = [{"split": "dim", "dim": 0, "ranks": 2}, {"split": "sub", "dim": 1, "ratio": [1, 1]},
        {"split": "replicated", "ranks": 2}]
MESH = {"match": "a", "split": "mesh", "axes": AXES}
BROKEN_PATTERNS = [
    {"rules": []},
    {"family": "f"},
    {"family": "f", "rules": [], "more": 1},
    {"family": "f", "rules": [{"match": "a", "split": "half"}]},
    {"family": "f", "rules": [{"match": "a", "split": "dim"}]},
    {"family": "f", "rules": [{**RULE, "dim": 64}]},
    {"family": "f", "rules": [{**RULE, "split": "replicated"}]},
    {"family": "f", "rules": [{**RULE, "granule": [8]}]},
    {"family": "f", "rules": [{**RULE, "split": "sub"}]},
    {"family": "f", "rules": [{**RULE, "split": "sub", "sizes": [1], "ratio": [1]}]},
    {"family": "f", "rules": [{**RULE, "ranks": 2}]},
    {"family": "f", "rules": [{**RULE, "axes": AXES}]},
    {"family": "f", "rules": [{**MESH, "axes": AXES[:1]}]},
    {"family": "f", "rules": [{**MESH, "axes": [AXES[0], {"split": "average", "ranks": 2}]}]},
    {"family": "f", "rules": [{**MESH, "axes": [AXES[0], {**AXES[1], "ranks": 0}]}]},
    {"family": "f", "rules": [{**MESH, "axes": [AXES[0], {**AXES[1], "padded": True}]}]},
    {"family": "f", "rules": [{**MESH, "axes": [AXES[0], {**AXES[1], "match": "b"}]}]},
]

SIDES = [{"name": "a"}, {"name": "b"}]
MAP = {"map": "m", "sides": SIDES, "rules": [{"a": "x", "b": {"y": "n"}}]}
BROKEN_MAPS = [
    {**MAP, "map": "M"},
    {**MAP, "more": 1},
    {**MAP, "version": 2},
    {**MAP, "sides": SIDES[:1]},
    {**MAP, "sides": [{"note": "n"}, {"name": "b"}]},
    {**MAP, "rules": []},
    {**MAP, "rules": [{"a": "x"}]},
    {**MAP, "rules": [{"a": "x", "b": 1}]},
    {**MAP, "rules": [{"a": "x", "b": {}}]},
    {**MAP, "rules": [{"a": "x", "b": "y", "stacks": {"s": ["q"]}}]},
    {**MAP, "rules": [{"a": "x", "b": "y", "stacks": {"s": ["q=0", "k"]}}]},
    {**MAP, "relations": ["n"]},
    {**MAP, "sizes": {"n": 1}},
    {**MAP, "sizes": {"n": {"value": 0}}},
]


def problems(schema, folder, least, title, good, broken):
    """The errors in a schema and in the files that follow it; `title` is the key of their name."""
    schema = json.loads((ROOT / schema).read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.check_schema(schema)
    files = sorted((ROOT / folder).glob("*.json"))
    if len(files) < least:
        yield f"{folder}: {len(files)} files, expected {least} or more"
    for file in files:
        parsed = json.loads(file.read_text())
        if title and parsed[title] != file.stem:
            yield f"{file}: calls itself {parsed[title]}"
        for error in validator.iter_errors(parsed):
            yield f"{file}: {list(error.path)}: {error.message}"
    if not validator.is_valid(good):
        yield f"the schema refuses: {good}"
    for one in broken:
        if validator.is_valid(one):
            yield f"the schema lets pass: {one}"


found = [
    *problems("docs/patterns.schema.json", "patterns", 8, None, {"family": "f", "rules": [RULE, MESH]},
              BROKEN_PATTERNS),
    *problems("docs/maps.schema.json", "patterns/maps", 5, "map", MAP, BROKEN_MAPS),
]
print("\n".join(found))
sys.exit(1 if found else 0)
