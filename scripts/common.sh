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
  sed -n '2,/^[^#]/{/^# \{0,1\}/s///p}' "$0"
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
