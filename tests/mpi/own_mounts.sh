#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# own_mounts.sh [RANK:PLACE=FOLDER...] -- COMMAND...
# Runs a command on a rank that sees other disks than the rest: on rank RANK, FOLDER is mounted at PLACE.
# The mounts are this process's own and end with it.
set -euo pipefail

if [[ -z ${OWN_MOUNTS:-} ]]; then
  OWN_MOUNTS=1 exec unshare --mount --propagation private "$0" "$@"
fi
own=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-}}
if [[ -z $own ]]; then
  echo "own_mounts.sh: the launcher tells no rank" >&2
  exit 2
fi
while [[ $1 != -- ]]; do
  rank=${1%%:*} mount=${1#*:}
  if [[ $rank == "$own" ]]; then
    mount --bind "${mount#*=}" "${mount%%=*}"
  fi
  shift
done
shift
exec "$@"
