# SPDX-License-Identifier: Apache-2.0
probe in out -q --warn odd --note seen
echo "-- default" >&2
probe in out --warn odd --warn odd --note seen
echo "-- twice verbose" >&2
probe in out -vv --note seen
probe in out -q -v
