#!/usr/bin/env bash
# A real S3 server for the tests: one Ceph monitor, one in-memory OSD and a RADOS Gateway on 127.0.0.1, as this user.
#
#   rgw.sh start    stop leftovers, start, print the environment for the tests as `export NAME=VALUE` lines
#   rgw.sh stop     stop what `start` started and remove its state
#
# Needs: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-common curl
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
dir=$servers_dir/rgw

write_config() { # HTTP_PORT MON_PORT MON_PORT_V1
  cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$2,v1:127.0.0.1:$3]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
# The gateway hangs while connecting when these are "none".
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = $dir/keyring
run dir = $dir/run
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
log file = $dir/log/\$name.log
mon data = $dir/mon
osd data = $dir/osd
rgw data = $dir/rgw
# One copy on one OSD, placement groups few: a test server, not a cluster.
crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 10000
mon data avail crit = 1
mon data avail warn = 2
osd class load list = *
osd class default list = *
# Objects live in memory; bounded, in large pages.
osd objectstore = memstore
memstore device bytes = 6442450944
memstore page set = true
memstore page size = 1048576
rgw frontends = beast endpoint=127.0.0.1:$1
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
# Deleted and overwritten data is freed at once instead of after two hours.
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
CONF
}

start_monitor() {
  ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  monmaptool -c "$dir/ceph.conf" --create --clobber --fsid "$(sed -n 's/^fsid = //p' "$dir/ceph.conf")" \
    --addv a "[v2:127.0.0.1:$1,v1:127.0.0.1:$2]" "$dir/monmap"
  ceph-mon -c "$dir/ceph.conf" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
  ceph-mon -c "$dir/ceph.conf" -i a
}

start_osd() {
  local uuid key
  uuid=$(cat /proc/sys/kernel/random/uuid)
  key=$(ceph-authtool --gen-print-key)
  printf '{"cephx_secret": "%s"}' "$key" | timeout 60 ceph -c "$dir/ceph.conf" osd new "$uuid" 0 -i -
  ceph-authtool --create-keyring "$dir/osd/keyring" --name osd.0 --add-key "$key"
  ceph-osd -c "$dir/ceph.conf" -i 0 --mkfs --osd-uuid "$uuid" --keyring "$dir/osd/keyring"
  ceph-osd -c "$dir/ceph.conf" -i 0 --keyring "$dir/osd/keyring"
}

start_gateway() { # HTTP_PORT ACCESS_KEY SECRET_KEY
  radosgw -c "$dir/ceph.conf" -n client.admin --keyring "$dir/keyring"
  wait_http "http://127.0.0.1:$1/" 90
  timeout 60 radosgw-admin -c "$dir/ceph.conf" user create --uid=tester --display-name=tester \
    --access-key="$2" --secret-key="$3" --max-buckets=0
}

start_all() {
  write_config "$1" "$2" "$3"
  start_monitor "$2" "$3"
  start_osd
  start_gateway "$1" "$4" "$5"
}

start() {
  stop_all_in "$dir"
  mkdir -p "$dir"/{mon,osd,rgw,run,log}
  local http_port access_key secret_key
  http_port=$(free_port)
  access_key=TEST$(random_hex 8)
  secret_key=$(random_hex 20)
  # Daemons keep the descriptors they start with: all output goes to a file, or $(rgw.sh start) would never return.
  # Run as a separate step, not as a condition, so that `set -e` still stops at the first command that fails.
  trap 'echo "RGW did not start; end of its log:" >&2; tail -n 30 "$dir/log/start.log" >&2; stop_all_in "$dir"' ERR
  set -o errtrace
  start_all "$http_port" "$(free_port)" "$(free_port)" "$access_key" "$secret_key" >"$dir/log/start.log" 2>&1 </dev/null
  trap - ERR
  echo "export TIERCKPT_TEST_S3_ENDPOINT=http://127.0.0.1:$http_port"
  echo "export TIERCKPT_TEST_S3_ACCESS_KEY=$access_key"
  echo "export TIERCKPT_TEST_S3_SECRET_KEY=$secret_key"
}

case ${1:-} in
  start) start ;;
  stop) stop_all_in "$dir" ;;
  *) echo "use: $0 start|stop" >&2; exit 2 ;;
esac
