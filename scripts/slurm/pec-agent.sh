#!/usr/bin/env bash
# Starts and stops the agent that keeps partial expert checkpoints (pec-save --agent) on this node.
#   scripts/slurm/pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...]
#   scripts/slurm/pec-agent.sh stop SOCKET
# start returns when the agent answers; one that answers already is left as it is, so that a job that
# is put back into the queue on the same node finds its snapshots again. FLAGs are those of pec-save.
# What the agent says goes to SOCKET.log. stop returns when the newest snapshot is in the store and the
# agent has ended.
# Exit codes: those of pec-save; 1 when the agent does not come up or its last save failed.
set -euo pipefail

usage() {
  echo "usage: pec-agent.sh start SOCKET CHECKPOINT STORE [FLAG...] | stop SOCKET" >&2
  exit 2
}

answers() {
  pec-save "unix:$1" --status -q >/dev/null 2>&1
}

# ended PID: whether the process is gone, or waits for a parent that does not ask.
ended() {
  [[ ! -e /proc/$1 || $(cut -d ' ' -f 3 "/proc/$1/stat" 2>/dev/null) == Z ]]
}

[[ $# -ge 2 ]] || usage
verb=$1 socket=$2
case $verb in
  start)
    [[ $# -ge 4 ]] || usage
    checkpoint=$3 store=$4
    if answers "$socket"; then
      exit 0
    fi
    # Not a child of the job step: a training that is killed does not take it along.
    setsid nohup pec-save "$checkpoint" "$store" --agent --listen "unix:$socket" "${@:5}" \
      </dev/null >"$socket.log" 2>&1 &
    pid=$!
    echo "$pid" >"$socket.pid"
    for ((i = 0; i < 300; ++i)); do
      if answers "$socket"; then
        exit 0
      fi
      if ended "$pid"; then
        break
      fi
      sleep 0.1
    done
    echo "pec-agent: the agent does not answer at $socket:" >&2
    cat "$socket.log" >&2
    exit 1
    ;;
  stop)
    [[ $# -eq 2 ]] || usage
    if ! answers "$socket"; then
      echo "pec-agent: no agent at $socket" >&2
      exit 3
    fi
    pid=$(<"$socket.pid")
    pec-save "unix:$socket" --tell stop -q >/dev/null
    while ! ended "$pid"; do
      sleep 0.1
    done
    rm -f "$socket.pid"
    if ! tail -n 1 "$socket.log" | grep -q 'done:'; then
      cat "$socket.log" >&2
      exit 1
    fi
    ;;
  *) usage ;;
esac
