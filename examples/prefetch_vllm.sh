#!/usr/bin/env bash
# Bring a model to this node, then serve it.
#
#   examples/prefetch_vllm.sh s3://models/llama-70b /nvme/llama-70b --tensor-parallel-size 8
#
# The server starts only if every file is there. Exit codes of `tierckpt prefetch` that time can mend (3 partial, 7 try
# again later) are tried again for TIERCKPT_PREFETCH_MINUTES; what has arrived is not fetched twice.
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
