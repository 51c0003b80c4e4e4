# SPDX-License-Identifier: Apache-2.0
SHARDWRIGHT_THREADS=many probe in out
SHARDWRIGHT_MEMORY=4 probe in out
# A flag outranks the environment, which is then not even looked at.
SHARDWRIGHT_THREADS=many SHARDWRIGHT_MEMORY=4 probe in out --threads 1 --memory 1GiB
