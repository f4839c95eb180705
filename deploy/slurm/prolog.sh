#!/usr/bin/env bash
# Slurm Prolog (slurm.conf: Prolog=/etc/slurm/prolog.d/tierckpt.sh), as root on each node before a job: gives its user a
# directory on the node's SSD that survives the job, and an agent outside the job's cgroup that keeps draining.
# An example to adapt; it was not run on a cluster.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

root=/local/nvme/tierckpt/$SLURM_JOB_USER
install --directory --owner="$SLURM_JOB_USER" --mode=0700 "$root"
# One unit per user, shared by the user's jobs. It exits when all is drained. A failed prolog would drain the node in
# Slurm; without this agent the job starts its own.
systemctl is-active --quiet "tierckpt-$SLURM_JOB_UID" || systemd-run --quiet --collect --unit="tierckpt-$SLURM_JOB_UID" \
  --uid="$SLURM_JOB_UID" --setenv=TIERCKPT_LOCAL_ROOT="$root" --property=EnvironmentFile=-/etc/tierckpt.env \
  /opt/tierckpt/bin/tierckpt agent --leave-when-idle ||
  logger --tag tierckpt "job $SLURM_JOB_ID: no agent was started for $SLURM_JOB_USER" || true
