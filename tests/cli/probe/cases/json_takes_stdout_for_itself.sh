# SPDX-License-Identifier: Apache-2.0
probe --json in out --threads 2 --memory 1GiB --name a --name b --pack --ratio 0.25 --warn odd
