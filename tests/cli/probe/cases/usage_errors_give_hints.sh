# SPDX-License-Identifier: Apache-2.0
probe in out --treads 4
probe in out --no-such-thing
probe in out --seed 1
probe in out --threads
probe in out --threads=
probe in out --threads 0
probe in out --threads 1 --threads 2
probe in out --memory 4
probe in out --memory 4X
probe in out --verify sum
probe in out --force=yes
probe in out --mode sideways
probe in out --ratio 1.5
probe in out --ratio nan
probe in out --units -3
probe in out more
probe in
probe
probe "" out
probe in out --mode slow
probe in out -z
