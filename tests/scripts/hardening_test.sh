#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that programs and plugins were built with the hardening flags: no table of functions that can be overwritten, and
# guards on the stack.
# Usage: hardening_test.sh FILE...
set -euo pipefail

command -v readelf >/dev/null || { echo "skipped: no readelf" && exit 77; }
failures=0
# expect FILE WORD WHAT: WORD is in the readelf output that is on stdin.
expect() {
  grep -q -- "$2" || { echo "FAILED: $1: $3" && failures=$((failures + 1)); }
}
[[ $# -gt 0 ]]
for file; do
  expect "$file" GNU_RELRO "no read-only relocations" < <(readelf -lW "$file")
  expect "$file" 'Flags: .*NOW' "symbols are bound late" < <(readelf -dW "$file")
  expect "$file" __stack_chk_fail "no stack protector" < <(readelf -sW "$file")
done
[[ $failures -eq 0 ]]
