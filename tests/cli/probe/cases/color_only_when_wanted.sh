# SPDX-License-Identifier: Apache-2.0
probe in out --warn odd --color always 2>&1 >/dev/null | grep -c $'\e'
NO_COLOR=1 probe in out --warn odd --color always 2>&1 >/dev/null | grep -c $'\e'
probe in out --warn odd 2>&1 >/dev/null | grep -c $'\e'
