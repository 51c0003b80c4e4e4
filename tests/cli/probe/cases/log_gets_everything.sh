# SPDX-License-Identifier: Apache-2.0
probe in out -q --log-file 'log-{rank}' --warn odd --note seen
sed -E 's/^[^ ]+ //' log-0
probe in out --log-file no/log
echo "exit $?"
probe in out -q --log-file /dev/full --json | grep 'log file is incomplete'
