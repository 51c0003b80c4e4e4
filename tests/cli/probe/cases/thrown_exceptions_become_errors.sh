# SPDX-License-Identifier: Apache-2.0
for kind in memory error int; do
  probe in out --throw "$kind" --json=report.json
  echo "exit $?"
  grep -E '"(name|message)": "[^rw]' report.json
done
