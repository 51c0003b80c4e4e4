# SPDX-License-Identifier: Apache-2.0
probe --json in out | grep -E '"(input|status)"'
probe --json=report.json in --pack out
grep -E '"(input|pack)"' report.json
probe in out -q --json --pack=lz4 | grep '"pack"'
