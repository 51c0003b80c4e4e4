# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Shared by the scripts of this folder, which source it first: strict mode and the source tree as
# the current folder.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

# die MESSAGE: ends the script with a usage or set-up error.
die() {
  echo "$(basename "$0"): error: $1" >&2
  exit 2
}

# Prints the comment that opens the calling script, as its help.
usage() {
  sed -n '2,/^[^#]/{/^# SPDX-/d;/^# \{0,1\}/s///p}' "$0"
}

# git_here ARGS...: git, also in a checkout that belongs to another user (containers).
git_here() {
  git -c safe.directory="$root" "$@"
}

# tracked_sources: our C and C++ files, one per line.
tracked_sources() {
  git_here ls-files -- '*.h' '*.cc' '*.c'
}

# job_count: how many things to do at once.
job_count() {
  echo "${SHARDWRIGHT_JOBS:-$(nproc)}"
}

# peers_folder: where scripts/peers keeps its Python environment; empty for SHARDWRIGHT_PEERS=none.
peers_folder() {
  local folder=${SHARDWRIGHT_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/shardwright/peers}
  if [[ $folder != none ]]; then
    echo "$folder"
  fi
}

# clock SECONDS: "3:05".
clock() {
  printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# watch_build NAME LOG: shows how far the build in LOG is, as a counter on a terminal, otherwise as a
# line every 30 seconds. Runs until it is killed, or the script is gone.
watch_build() {
  local name=$1 log=$2 start=$SECONDS shown=$SECONDS step
  while kill -0 $$ 2>/dev/null; do
    sleep 1
    step=$(grep -o '^\[[0-9]*/[0-9]*\]' "$log" | tail -n 1 | tr -d '[]' || true)
    step=${step:-0/?}
    if [[ -t 1 ]]; then
      printf '\r%s: built %s of %s, %s' "$name" "${step%/*}" "${step#*/}" "$(clock $((SECONDS - start)))"
    elif ((SECONDS - shown >= ${SHARDWRIGHT_PROGRESS_SECONDS:-30})); then
      shown=$SECONDS
      echo "$name: built ${step%/*} of ${step#*/}, $(clock $((SECONDS - start))) so far"
    fi
  done
}

# build_preset NAME PRESET LOG CONFIGURE-ARGUMENT... [-- TARGET...]: configures and builds a preset with
# its output in LOG. Prints at the start how long it may take and the path of the log, and then the
# progress. Prints the errors if it fails.
build_preset() {
  local name=$1 preset=$2 log=$3 code=0 steps watcher start=$SECONDS jobs configure=()
  shift 3
  while [[ $# -gt 0 && $1 != -- ]]; do
    configure+=("$1")
    shift
  done
  jobs=$(job_count)
  local compile=(cmake --build --preset "$preset" --parallel "$jobs")
  [[ $# -le 1 ]] || compile+=(--target "${@:2}")
  mkdir -p "$(dirname "$log")"
  echo "$name: configuring the $preset preset, log in $log"
  cmake --preset "$preset" "${configure[@]}" >"$log" 2>&1 </dev/null || code=$?
  if [[ $code -eq 0 ]]; then
    # The lines of a dry run are numbered "[1/240]". Under its own name Ninja would first want to make build.ninja
    # again, and a dry run ends there.
    cp "build/$preset/build.ninja" "build/$preset/dry-run.ninja"
    steps=$("${compile[@]}" -- -f dry-run.ninja -n 2>/dev/null </dev/null | sed -n 's|^\[[0-9]*/\([0-9]*\)\].*|\1|p' | tail -n 1 || true)
    if [[ ${steps:-0} -gt 0 ]]; then
      # A step takes about 8 seconds of one processor.
      echo "$name: building, $steps steps: about $(((steps * 8 / jobs + 59) / 60)) min with $jobs compilers at once," \
        "less where the compiler cache has them; log in $log"
    fi
    watch_build "$name" "$log" &
    watcher=$!
    "${compile[@]}" >>"$log" 2>&1 </dev/null || code=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [[ ! -t 1 ]] || printf '\r\e[K'
  fi
  if [[ $code -ne 0 ]]; then
    grep -E -A 12 'FAILED:|CMake Error|error:' "$log" | head -n 80 >&2 || true
    echo "$name: the build failed after $(clock $((SECONDS - start))), log in $log" >&2
    return 1
  fi
  [[ ${steps:-0} -eq 0 ]] || echo "$name: built in $(clock $((SECONDS - start)))"
}
