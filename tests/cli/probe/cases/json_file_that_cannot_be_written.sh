# SPDX-License-Identifier: Apache-2.0
probe in out --json=no/report.json
echo "exit $?"
mkdir folder
probe in out --json=folder
echo "exit $?"
probe in out -q --json=/dev/full
echo "exit $?"
