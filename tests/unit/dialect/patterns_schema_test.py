"""Holds patterns/*.json against docs/patterns.schema.json, and the schema against broken files."""

import json
import pathlib
import sys

try:
    import jsonschema
except ImportError:
    print("skipped: python3-jsonschema is not installed")
    sys.exit(77)

root = pathlib.Path(sys.argv[1])
schema = json.loads((root / "docs/patterns.schema.json").read_text())
validator = jsonschema.validators.validator_for(schema)(schema)
validator.check_schema(schema)

files = sorted((root / "patterns").glob("*.json"))
assert len(files) >= 8, files
failed = 0
for file in files:
    for error in validator.iter_errors(json.loads(file.read_text())):
        print(f"{file}: {list(error.path)}: {error.message}")
        failed += 1

rule = {"match": "a", "split": "dim", "dim": 0}
for broken in [
    {"rules": []},
    {"family": "f"},
    {"family": "f", "rules": [], "more": 1},
    {"family": "f", "rules": [{"match": "a", "split": "half"}]},
    {"family": "f", "rules": [{"match": "a", "split": "dim"}]},
    {"family": "f", "rules": [{**rule, "dim": 64}]},
    {"family": "f", "rules": [{**rule, "split": "replicated"}]},
    {"family": "f", "rules": [{**rule, "granule": [8]}]},
    {"family": "f", "rules": [{**rule, "split": "sub"}]},
    {"family": "f", "rules": [{**rule, "split": "sub", "sizes": [1], "ratio": [1]}]},
]:
    if validator.is_valid(broken):
        print(f"the schema lets pass: {broken}")
        failed += 1
sys.exit(1 if failed else 0)
