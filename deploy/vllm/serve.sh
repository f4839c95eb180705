#!/usr/bin/env bash
# Serve a model while its weights are still being fetched: only configuration and tokenizer are prefetched.
#
#   deploy/vllm/serve.sh s3://models/llama-70b /nvme/llama-70b-config [vllm options]
#
# Needs tierckpt in vLLM's environment (pip install 'tierckpt[cli]'), whose plugin is `--load-format tierckpt`. The weights
# pass through the node cache below TIERCKPT_LOCAL_ROOT, so the next start on this node reads its disk.
# An example to adapt; it was not run with vLLM.
set -euo pipefail

uri=${1:?usage: serve.sh URI DIRECTORY [vllm options]}
directory=${2:?usage: serve.sh URI DIRECTORY [vllm options]}
shift 2

tierckpt prefetch "$uri" --to "$directory" --exclude '*.safetensors' --exclude '*.bin' --exclude '*.pth'
exec vllm serve "$directory" --load-format tierckpt --model-loader-extra-config "{\"uri\": \"$uri\"}" "$@"
