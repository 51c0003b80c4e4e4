#!/usr/bin/env bash
# Starts and stops the agent that keeps partial expert checkpoints (pec-save agent) on this node.
#   scripts/slurm/pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...]
#   scripts/slurm/pec-agent.sh stop SOCKET
# start returns when the agent answers; one that answers already is left as it is, so that a job that
# is put back into the queue on the same node finds its snapshots again, and several tasks of a node
# may call it at once. FLAGs are those of pec-save agent; --listen HOST:PORT and --peer HOST:PORT need
# a key (pec-save keygen), which SHARDWRIGHT_AGENT_KEY names, or --key FILE. The agent's process id is
# in SOCKET.pid; what it says is added to SOCKET.log. stop returns when the newest snapshot is in the
# store and the agent has ended, or with another code than 0; a signal ends the wait, and the agent
# goes on saving.
# Exit codes: those of pec-save, with stop of the agent's last save; 1 when the agent does not come
# up, 6 when another store's agent answers.
set -euo pipefail

usage() {
  echo "usage: pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...] | stop SOCKET" >&2
  exit 2
}

# ask: sets pid and theirs to the process that answers at the socket and to the store that it saves
# into, both from one answer; fails where none answers. SOCKET.pid says nothing: it may be of an agent
# that is gone, whose number another process has by now.
ask() {
  local answer
  answer=$(pec-save status "unix:$socket" -q --json 2>/dev/null) || return 1
  answer=$(python3 -c 'import json, sys
result = json.load(sys.stdin)["result"]
print(int(result["pid"]), result["store"])' <<<"$answer" 2>/dev/null) || {
    echo "pec-agent: the agent at $socket does not say which process it is and where it saves" >&2
    exit 1
  }
  pid=${answer%% *} theirs=${answer#* }
}

# keep: ends a start with the agent that has answered, unless it saves into another store.
keep() {
  # As it was given to the agent, in the folder where that was started.
  [[ $theirs == /* ]] || theirs=/proc/$pid/cwd/$theirs
  if [[ $(realpath -m -- "$theirs") != "$(realpath -m -- "$store")" ]]; then
    echo "pec-agent: the agent at $socket saves into $theirs, not into $store" >&2
    exit 6
  fi
  echo "$pid" >"$socket.pid"
  exit 0
}

# ended PID: whether the process is gone, or waits for a parent that does not ask.
ended() {
  [[ ! -e /proc/$1 || $(cut -d ' ' -f 3 "/proc/$1/stat" 2>/dev/null) == Z ]]
}

[[ $# -ge 2 ]] || usage
verb=$1 socket=$2
case $verb in
  start) [[ $# -ge 4 ]] || usage ;;
  stop) [[ $# -eq 2 ]] || usage ;;
  *) usage ;;
esac

# One start or stop at a time. The agent does not inherit it.
exec {turn}>>"$socket.turn"
flock "$turn"

if [[ $verb == start ]]; then
  checkpoint=$3 store=$4
  if ask; then
    keep
  fi
  said=$(stat -c %s "$socket.log" 2>/dev/null || echo 0)
  # Not a child of the job step: a training that is killed does not take it along.
  setsid nohup pec-save agent "$checkpoint" "$store" --listen "unix:$socket" "${@:5}" \
    {turn}>&- </dev/null >>"$socket.log" 2>&1 &
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
  echo "pec-agent: the agent does not answer at $socket:" >&2
  tail -c "+$((said + 1))" "$socket.log" >&2
  exit 1
fi

if ! ask; then
  echo "pec-agent: no agent at $socket" >&2
  exit 3
fi
code=0
pec-save tell "unix:$socket" stop -q >/dev/null || code=$?
if [[ $code -ne 0 ]]; then
  echo "pec-agent: the agent at $socket has not said that all is in the store; it says in $socket.log:" >&2
  tail -n 20 "$socket.log" >&2
  exit "$code"
fi
until ended "$pid"; do
  sleep 0.1
done
rm -f "$socket.pid"
