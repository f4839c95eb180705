#!/usr/bin/env bash
# Slurm Epilog (slurm.conf: Epilog=/etc/slurm/epilog.d/tierckpt.sh), as root on each node after a job: prints undrained
# checkpoints. The prolog's agent keeps draining; the node may take its next job.
# An example to adapt; it was not run on a cluster.
set -uo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

root=/local/nvme/tierckpt/${SLURM_JOB_USER:-}
[[ -n ${SLURM_JOB_USER:-} && -d $root ]] || exit 0
status=$(runuser --user "$SLURM_JOB_USER" -- env TIERCKPT_LOCAL_ROOT="$root" /opt/tierckpt/bin/tierckpt status --json) || exit 0
logger --tag tierckpt "job ${SLURM_JOB_ID:-}: $status"
exit 0 # a failed epilog would drain the node in Slurm: undrained data is safe and will be sent
