#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A wheel takes half an hour to build: missing tools are named at once, before anything is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin"
for tool in basename bash cat dirname git g++ gcc mkdir perl sed sort strip; do
  ln -s "$(command -v "$tool")" "$scratch/bin/$tool"
done
for script in "scripts/wheel/tools" "scripts/package wheel"; do
  code=0
  # shellcheck disable=SC2086  # A script and its argument.
  said=$(PATH=$scratch/bin SHARDWRIGHT_PEERS=$scratch/none SHARDWRIGHT_WHEEL=$scratch/wheel $script 2>&1) || code=$?
  if [[ $code -ne 2 ]]; then
    echo "$script: exit code $code instead of 2: $said"
    exit 1
  fi
  for word in apt-get dpkg-source make nasm "the trainers' environment" "apt-get install apt dpkg-dev" scripts/peers; do
    [[ $said == *"$word"* ]] || { echo "$script: does not name $word: $said" && exit 1; }
  done
  if [[ -e $scratch/wheel ]]; then
    echo "$script: has begun to build"
    exit 1
  fi
done
