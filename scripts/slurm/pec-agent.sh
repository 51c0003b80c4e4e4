#!/usr/bin/env bash
# Starts and stops the agent that keeps partial expert checkpoints (pec-save --agent) on this node.
#   scripts/slurm/pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...]
#   scripts/slurm/pec-agent.sh stop SOCKET
# start returns when the agent answers; one that answers already is left as it is, so that a job that
# is put back into the queue on the same node finds its snapshots again, and several tasks of a node
# may call it at once. FLAGs are those of pec-save. The agent's process id is in SOCKET.pid; what it
# says is added to SOCKET.log. stop returns when the newest snapshot is in the store and the agent has
# ended, or with another code than 0; a signal ends the wait, and the agent goes on saving.
# Exit codes: those of pec-save, with stop of the agent's last save; 1 when the agent does not come
# up, 6 when another store's agent answers.
set -euo pipefail

usage() {
  echo "usage: pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...] | stop SOCKET" >&2
  exit 2
}

# agent_pid: the process that answers at the socket; fails where none does. A file may be of an agent
# that is gone, whose number another process has by now.
agent_pid() {
  pec-save "unix:$socket" --status -q --json 2>/dev/null | sed -n 's/^ *"pid": *\([0-9]\+\).*/\1/p' | grep .
}

# keep PID: ends a start with the agent that answers, unless it saves into another store.
keep() {
  local theirs
  theirs=$(pec-save "unix:$socket" --status -q --json 2>/dev/null |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["result"]["store"])') || theirs=$(realpath -m -- "$store")
  # As it was given to the agent, in the folder where that was started.
  [[ $theirs == /* ]] || theirs=/proc/$1/cwd/$theirs
  if [[ $(realpath -m -- "$theirs") != "$(realpath -m -- "$store")" ]]; then
    echo "pec-agent: the agent at $socket saves into $theirs, not into $store" >&2
    exit 6
  fi
  echo "$1" >"$socket.pid"
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
  if pid=$(agent_pid); then
    keep "$pid"
  fi
  said=$(stat -c %s "$socket.log" 2>/dev/null || echo 0)
  # Not a child of the job step: a training that is killed does not take it along.
  setsid nohup pec-save "$checkpoint" "$store" --agent --listen "unix:$socket" "${@:5}" \
    {turn}>&- </dev/null >>"$socket.log" 2>&1 &
  child=$!
  for ((i = 0; i < 300; ++i)); do
    if pid=$(agent_pid); then
      keep "$pid"
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

if ! pid=$(agent_pid); then
  echo "pec-agent: no agent at $socket" >&2
  exit 3
fi
code=0
pec-save "unix:$socket" --tell stop -q >/dev/null || code=$?
if [[ $code -ne 0 ]]; then
  echo "pec-agent: the agent at $socket has not said that all is in the store; it says in $socket.log:" >&2
  tail -n 20 "$socket.log" >&2
  exit "$code"
fi
until ended "$pid"; do
  sleep 0.1
done
rm -f "$socket.pid"
