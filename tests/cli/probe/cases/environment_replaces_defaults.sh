# SPDX-License-Identifier: Apache-2.0
export SHARDWRIGHT_THREADS=3 SHARDWRIGHT_MEMORY=64MiB SHARDWRIGHT_LOG=run.log
probe in out -q --json | grep -E '"(threads|memory_bytes)"'
probe in out -q --json --threads 5 --memory 2M | grep -E '"(threads|memory_bytes)"'
sed -E 's/^[^ ]+ //' run.log
