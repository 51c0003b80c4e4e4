# SPDX-License-Identifier: Apache-2.0
for code in 0 1 2 3 4 5 6 7 8 9 10 75; do
  probe in out -q --fail "$code"
  echo "$code: $?"
done
