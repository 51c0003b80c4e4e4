#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# For a training script, after each checkpoint and on one rank: hands the checkpoint that `latest`
# names to partial expert checkpointing.
#   scripts/slurm/pec-save-hook.sh SOCKET CHECKPOINT STORE [FLAG...]
# With an agent at SOCKET (pec-agent.sh) it returns as soon as the snapshot is in memory; the agent
# saves it while training continues. Without one it saves into STORE itself. FLAGs are those of pec-save.
# SOCKET is a socket file, which needs no key.
# Exit codes: those of pec-save.
set -euo pipefail
# One rank of a training calls this: no command here waits for the others.
export SHARDWRIGHT_MPI=none

if [[ $# -lt 3 ]]; then
  echo "usage: pec-save-hook.sh SOCKET CHECKPOINT STORE [FLAG...]" >&2
  exit 2
fi
socket=$1 checkpoint=$2 store=$3
if pec-save status "unix:$socket" -q >/dev/null 2>&1; then
  exec pec-save tell "unix:$socket" snapshot -q >/dev/null
fi
echo "pec-save-hook: no agent at $socket: saving into $store" >&2
exec pec-save "$checkpoint" "$store" --take-over -q "${@:4}" >/dev/null
