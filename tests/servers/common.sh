# Shared by the server scripts: where state lives, free ports, stopping by pid file.
# Sourced, never run.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# One directory per checkout, so that two working copies never stop each other's servers.
servers_dir=${TIERCKPT_SERVERS_DIR:-${TMPDIR:-/tmp}/tierckpt-servers-$(id -u)-$(printf %s "$repo" | cksum | cut -d' ' -f1)}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

random_hex() {
  python3 -c "import secrets; print(secrets.token_hex($1))"
}

wait_http() { # URL SECONDS: any HTTP answer counts, an error status included
  local deadline=$((SECONDS + $2))
  until curl --silent --output /dev/null --max-time 2 "$1"; do
    if ((SECONDS >= deadline)); then
      echo "no HTTP answer from $1 after $2 s" >&2
      return 1
    fi
    sleep 0.2
  done
}

# Is the process still there, and still ours? A pid that was reused by a stranger must not be killed:
# every server we start has its state directory on its command line.
is_ours() { # PID DIR
  [[ -r /proc/$1/cmdline ]] && tr '\0' ' ' <"/proc/$1/cmdline" | grep --quiet --fixed-strings -- "$2"
}

stop_by_pid_file() { # FILE DIR
  local pid
  pid=$(tr -d ' \n' <"$1")
  [[ $pid =~ ^[0-9]+$ ]] || return 0
  is_ours "$pid" "$2" || return 0
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 50); do
    is_ours "$pid" "$2" || return 0
    sleep 0.1
  done
  kill -9 "$pid" 2>/dev/null || true
}

stop_all_in() { # DIR: every server whose pid file is in DIR/run, then DIR itself
  [[ -d $1 ]] || return 0
  local file
  for file in "$1"/run/*.pid; do
    [[ -e $file ]] && stop_by_pid_file "$file" "$1"
  done
  rm -rf "$1"
  rmdir --ignore-fail-on-non-empty "$servers_dir"
}
