#!/usr/bin/env bash
# Prefetch a model to this node, then serve it.
#
#   examples/prefetch_vllm.sh s3://models/llama-70b /nvme/llama-70b --tensor-parallel-size 8
#
# The server starts only if every file is present. Exit codes 3 (partial) and 7 (try again later) of `tierckpt prefetch`
# are retried for TIERCKPT_PREFETCH_MINUTES; fetched files are not fetched again.
set -euo pipefail

uri=${1:?usage: prefetch_vllm.sh URI DIRECTORY [vllm options]}
directory=${2:?usage: prefetch_vllm.sh URI DIRECTORY [vllm options]}
shift 2
deadline=$((SECONDS + 60 * ${TIERCKPT_PREFETCH_MINUTES:-30}))

until tierckpt prefetch "$uri" --to "$directory"; do
  code=$?
  if [[ $code -ne 3 && $code -ne 7 ]] || ((SECONDS >= deadline)); then
    exit "$code"
  fi
  sleep 10
done

exec vllm serve "$directory" "$@"
