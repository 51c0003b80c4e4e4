#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs, starts and stops the agent that keeps partial expert checkpoints (pec-save agent) on this node.
#   srun --overlap --ntasks-per-node=1 scripts/slurm/pec-agent.sh run SOCKET CHECKPOINT STORE [FLAG...] &
#   scripts/slurm/pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...]
#   scripts/slurm/pec-agent.sh stop SOCKET
# run is the agent itself, for a job step of its own under Slurm: it ends with the newest snapshot in the store when the
# step receives SIGTERM (scancel, a requeue and the time limit send it KillWait seconds before SIGKILL). stop ends it
# before that. start leaves an agent that outlives its caller; where Slurm ends all processes of a job step with the
# step (proctrack/cgroup) it exits with code 9.
# start returns when the agent answers; one that answers already is left as it is, so that a job that
# is put back into the queue on the same node finds its snapshots again, and several tasks of a node
# may call it at once. FLAGs are those of pec-save agent; --listen HOST:PORT and --peer HOST:PORT need
# a key (pec-save keygen), which SHARDWRIGHT_AGENT_KEY names, or --key FILE. The agent's process id is
# in SOCKET.pid; its messages are appended to SOCKET.log. These files, and the lock SOCKET.turn, must be regular files of
# this user: the script rejects links and files of other users with these names. stop returns when the newest snapshot
# is in the store and the agent has ended, or with another code than 0; a signal ends the wait, and the agent keeps
# saving.
# Exit codes: those of pec-save, with stop of the agent's last save; 1 when the agent does not come
# up, 9 where it would not outlive the step, 6 when another store's agent answers or a name belongs to another user.
set -euo pipefail
# One rank of a training may call this: no command here waits for the others.
export SHARDWRIGHT_MPI=none

usage() {
  echo "usage: pec-agent.sh run|start SOCKET CHECKPOINT STORE [FLAG...] | stop SOCKET" >&2
  exit 2
}

# ask: sets pid and theirs to the process that answers at the socket and to the store that it saves
# into, both from one answer; fails where none answers. SOCKET.pid alone proves nothing: its agent may
# be gone, and another process may have its number by now.
ask() {
  local answer text
  answer=$(pec-save status "unix:$name" -q --json 2>/dev/null) || return 1
  # A line for each member of the result, and no text in JSON holds a line end.
  pid=$(sed -n 's/^    "pid": \([1-9][0-9]\{0,9\}\),\{0,1\}$/\1/p' <<<"$answer")
  text=$(sed -n 's/^    "store": "\(.*\)",\{0,1\}$/\1/p' <<<"$answer")
  # printf knows the escapes of a JSON text.
  printf -v theirs %b "$text"
  if [[ -z $pid || -z $theirs ]]; then
    echo "pec-agent: the agent at $socket does not report its process and its store" >&2
    exit 1
  fi
}

# keep: ends a start with the agent that has answered, unless it saves into another store.
keep() {
  # As it was given to the agent, in the folder where that was started.
  [[ $theirs == /* ]] || theirs=/proc/$pid/cwd/$theirs
  if [[ $(realpath -m -- "$theirs") != "$store" ]]; then
    echo "pec-agent: the agent at $socket saves into $theirs, not into $store" >&2
    exit 6
  fi
  # In one step, whatever has that name.
  local new
  new=$(mktemp "$name.pid.XXXXXXXX")
  echo "$pid" >"$new"
  chmod 644 "$new"
  mv -fT -- "$new" "$name.pid"
  exit 0
}

# refuse FILE WHY
refuse() {
  echo "pec-agent: $folder/$1: $2: remove it, or use a socket in a folder of your own" >&2
  exit 6
}

# own FILE: makes FILE if it does not exist, and refuses it unless it is a regular file of this user with no other name.
own() {
  local found
  if [[ ! -e $1 && ! -L $1 ]]; then
    # Exclusively: this fails if another process makes it first, which is checked below.
    (set -o noclobber && : >"$1") 2>/dev/null || true
  fi
  found=$(LC_ALL=C stat -c '%F|%h|%u|%U (%u)' -- "$1") || exit 1
  case $found in
    "regular file|1|$user|"* | "regular empty file|1|$user|"*) ;;
    regular*"|$user|"*) refuse "$1" "has another name, by which others may reach it" ;;
    *) refuse "$1" "a ${found%%|*} of user ${found##*|}, not a file of yours" ;;
  esac
}

# opened FILE DESCRIPTOR: refuses FILE if the descriptor is of another file: it was replaced in between.
opened() {
  [[ $(stat -c %d:%i -- "$1") == "$(stat -L -c %d:%i "/proc/self/fd/$2")" ]] || refuse "$1" "was replaced"
}

# ended PID: whether the process is gone, or waits for a parent that does not ask.
ended() {
  [[ ! -e /proc/$1 || $(cut -d ' ' -f 3 "/proc/$1/stat" 2>/dev/null) == Z ]]
}

[[ $# -ge 2 ]] || usage
verb=$1 socket=$2
case $verb in
  run | start) [[ $# -ge 4 ]] || usage ;;
  stop) [[ $# -eq 2 ]] || usage ;;
  *) usage ;;
esac

if [[ $verb == run ]]; then
  exec pec-save agent "$3" "$4" --listen "unix:$socket" --take-over "${@:5}"
fi

store=$(realpath -m -- "${4:-.}")
# All files are named relative to the folder of the socket, which stays the current one.
caller=$PWD name=$(basename -- "$socket")
cd -P -- "$(dirname -- "$socket")" || exit 3
folder=$PWD
# This user as the file system reports it, which on some differs from the effective user.
probe=$(mktemp "$name.user.XXXXXXXX")
user=$(stat -c %u -- "$probe")
rm -f -- "$probe"

# One start or stop at a time. The agent does not inherit it.
own "$name.turn"
exec {turn}<"$name.turn"
opened "$name.turn" "$turn"
flock "$turn"

if [[ $verb == start ]]; then
  if ask; then
    keep
  fi
  # The step's own control group, as proctrack/cgroup makes it: /slurm/uid_1/job_2/step_3.
  if grep -q '/slurm.*/job_[0-9]*/step_' /proc/self/cgroup 2>/dev/null; then
    echo "pec-agent: Slurm kills an agent that is started here when this job step ends, with the snapshots in its memory" \
      "(proctrack/cgroup). Run it as a separate job step:" >&2
    echo "  srun --overlap --ntasks-per-node=1 pec-agent.sh run $2 $3 $4 ${*:5} &" >&2
    exit 9
  fi
  own "$name.log"
  exec {log}>>"$name.log"
  opened "$name.log" "$log"
  said=$(stat -c %s -- "$name.log")
  # Not a child of the job step: a training that is killed does not take it along.
  (cd -- "$caller" && exec setsid nohup pec-save agent "$3" "$4" --listen "unix:$socket" --take-over "${@:5}") \
    {turn}>&- </dev/null >&"$log" 2>&1 {log}>&- &
  child=$!
  for ((i = 0; i < 300; ++i)); do
    if ask; then
      keep
    fi
    if ended "$child"; then
      break
    fi
    sleep 0.1
  done
  echo "pec-agent: the new agent does not answer at $socket; its log:" >&2
  tail -c "+$((said + 1))" -- "$name.log" >&2
  exit 1
fi

if ! ask; then
  echo "pec-agent: no agent at $socket" >&2
  exit 3
fi
code=0
pec-save tell "unix:$name" stop -q >/dev/null || code=$?
if [[ $code -ne 0 ]]; then
  echo "pec-agent: the agent at $socket has not confirmed that the store has all snapshots; end of $socket.log:" >&2
  own "$name.log"
  tail -n 20 -- "$name.log" >&2
  exit "$code"
fi
until ended "$pid"; do
  sleep 0.1
done
rm -f -- "$name.pid"
