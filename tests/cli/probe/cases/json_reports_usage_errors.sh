# SPDX-License-Identifier: Apache-2.0
probe --json --threads=0 in out | grep -vE '"(argv|threads|memory_bytes)"'
echo "exit ${PIPESTATUS[0]}"
probe in --json=report.json --no-such-flag
echo "exit $?"
grep -E '"(exit_code|name|message)"' report.json
