#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An epilog of Slurm: ends the agents of partial checkpoints (pec-save agent) that a finished job has left on this node.
#   Epilog=/usr/share/shardwright/slurm/epilog.sh      in slurm.conf
# It is for clusters on which Slurm does not kill the processes of a job (proctrack/linuxproc), so that `pec-agent.sh start`
# leaves an agent. Each agent receives SIGTERM, saves its newest snapshot into its store and ends. Agents that still run
# after EPILOG_SECONDS (default 60) are killed. Slurm also runs the epilog when it requeues the job.
# An agent belongs to the job if it runs as the job's user and its environment has the job's SLURM_JOB_ID. The epilog runs
# as root, starts no program of the user, and opens no file of the user. Where several jobs of a user share a node, only the
# agents of this job end. Exit code: always 0, because another one makes Slurm drain the node.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
seconds=${EPILOG_SECONDS:-60}
[[ $seconds =~ ^[0-9]{1,4}$ ]] || seconds=60
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ && ${SLURM_JOB_UID:-} =~ ^[0-9]+$ ]] || exit 0

# agents: prints the process ids of the job's agents. Its user cannot make processes of other users appear here.
agents() {
  local pid words
  for pid in $(pgrep -u "$SLURM_JOB_UID" -x pec-save); do
    mapfile -d '' -t words < <(cat "/proc/$pid/cmdline" 2>/dev/null)
    if [[ ${words[1]:-} == agent ]] && grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "/proc/$pid/environ" 2>/dev/null; then
      echo "$pid"
    fi
  done
}
# signal NAME: sends the signal to all agents of the job.
signal() {
  local pid
  for pid in $(agents); do
    logger -t shardwright-epilog "job $SLURM_JOB_ID: $1 to agent $pid" 2>/dev/null || true
    kill -s "$1" "$pid" 2>/dev/null || true
  done
}

signal TERM
for ((i = 0; i < 10 * seconds; ++i)); do
  [[ -n $(agents) ]] || exit 0
  sleep 0.1
done
signal KILL
exit 0
