#!/usr/bin/env bash
# Azurite, Microsoft's Azure Blob emulator, on 127.0.0.1 for the tests.
#
#   azurite.sh start    stop leftovers, start, print the environment for the tests as `export NAME=VALUE` lines
#   azurite.sh stop     stop what `start` started and remove its state
#
# Needs `azurite-blob`: $TIERCKPT_TEST_AZURITE, or .services/node_modules/.bin, or PATH (npm i azurite).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
dir=$servers_dir/azurite

find_binary() {
  local candidate
  for candidate in "${TIERCKPT_TEST_AZURITE:-}" "$repo/.services/node_modules/.bin/azurite-blob"; do
    if [[ -n $candidate && -x $candidate ]]; then
      echo "$candidate"
      return
    fi
  done
  command -v azurite-blob || { echo "azurite-blob not found: npm i --prefix .services azurite" >&2; return 1; }
}

start() {
  local binary port key
  binary=$(find_binary)
  stop_all_in "$dir"
  mkdir -p "$dir"/{data,run,log}
  port=$(free_port)
  key=$(python3 -c 'import base64, secrets; print(base64.b64encode(secrets.token_bytes(64)).decode())')
  # --disableTelemetry: without it the emulator calls home. nohup and </dev/null: it must outlive this script.
  AZURITE_ACCOUNTS="tierckpttest:$key" nohup "$binary" --disableTelemetry --skipApiVersionCheck --silent \
    --blobHost 127.0.0.1 --blobPort "$port" --location "$dir/data" >"$dir/log/azurite.log" 2>&1 </dev/null &
  echo $! >"$dir/run/azurite.pid"
  if ! wait_http "http://127.0.0.1:$port/" 60; then
    tail -n 30 "$dir/log/azurite.log" >&2
    stop_all_in "$dir"
    return 1
  fi
  echo "export TIERCKPT_TEST_AZURE_ENDPOINT=http://127.0.0.1:$port/tierckpttest"
  echo "export TIERCKPT_TEST_AZURE_ACCOUNT=tierckpttest"
  echo "export TIERCKPT_TEST_AZURE_KEY=$key"
}

case ${1:-} in
  start) start ;;
  stop) stop_all_in "$dir" ;;
  *) echo "use: $0 start|stop" >&2; exit 2 ;;
esac
