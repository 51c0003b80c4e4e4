# SPDX-License-Identifier: Apache-2.0
probe --help > help.txt
status=$?
head -n 5 help.txt
tail -n 2 help.txt
awk 'length > 100 { print "too long: " $0 }' help.txt
# Help is given whatever else is wrong.
probe --no-such-flag --help | cmp - help.txt && rm help.txt
exit "$status"
