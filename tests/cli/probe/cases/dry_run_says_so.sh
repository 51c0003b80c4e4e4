# SPDX-License-Identifier: Apache-2.0
probe in out -n --json=report.json
grep -E '"dry_run"|"bytes_written"' report.json
