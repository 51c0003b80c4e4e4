# SPDX-License-Identifier: Apache-2.0
probe in out > /dev/full
echo "exit $?"
probe --help > /dev/full
echo "exit $?"
# A reader that ends early is not a failure.
{ sleep 0.2; probe in out -q; echo "exit $?" >&2; } | true
