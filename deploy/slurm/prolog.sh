#!/usr/bin/env bash
# Slurm Prolog (slurm.conf: Prolog=/etc/slurm/prolog.d/tierckpt.sh), as root on each node before a job: its user gets a
# directory on the node's SSD that survives the job, and an agent outside of the job's cgroup that goes on draining.
# An example: adapt it, it was not run on a cluster.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

root=/local/nvme/tierckpt/$SLURM_JOB_USER
install --directory --owner="$SLURM_JOB_USER" --mode=0700 "$root"
# One unit for each user; a second job of theirs finds it running. It leaves when nothing is left to drain. A failed prolog
# would drain the node, and without this agent the job starts one of its own.
systemctl is-active --quiet "tierckpt-$SLURM_JOB_UID" || systemd-run --quiet --collect --unit="tierckpt-$SLURM_JOB_UID" \
  --uid="$SLURM_JOB_UID" --setenv=TIERCKPT_LOCAL_ROOT="$root" --property=EnvironmentFile=-/etc/tierckpt.env \
  /opt/tierckpt/bin/tierckpt agent --leave-when-idle ||
  logger --tag tierckpt "job $SLURM_JOB_ID: no agent was started for $SLURM_JOB_USER" || true
