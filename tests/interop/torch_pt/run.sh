#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a test script with the Python that has torch; 77 (skipped) without one.
set -euo pipefail
peers=${SHARDWRIGHT_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/shardwright/peers}
if [[ ! -x $peers/bin/python ]]; then
  echo "skipped: no Python with torch in $peers (scripts/peers makes one)"
  exit 77
fi
exec "$peers/bin/python" "$@"
