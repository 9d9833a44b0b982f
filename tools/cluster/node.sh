#!/bin/bash
# The "node": network, PIDs, mounts, host name and IPC of its own. Everything started in it dies with it.
# usage: node.sh start | running | exec CMD... | stop
# Inside it "host PIDs" are those of its PID namespace, as on a machine of its own; nothing can leave its network,
# and what pods write to /tmp, /run, /usr/local, /etc/cdi, /var/lib/kubelet or /var/log stays below KUBE_HOME.
set -euo pipefail
. "$(dirname "$0")/env.sh"

running() {
  [ -e "$KUBE_HOME/node.pid" ] && [ "$(readlink "/proc/$(cat "$KUBE_HOME/node.pid")/exe" 2>/dev/null)" = "$KUBE_HOME/pause" ]
}

case ${1:-} in
start)
  ! running || { echo "the node is running already" >&2; exit 1; }
  for folder in tmp local local.work kubelet log; do mkdir -p "$KUBE_HOME/fs/$folder"; done
  chmod 1777 "$KUBE_HOME/fs/tmp"
  mkdir -p /var/lib/kubelet
  [ -x "$KUBE_HOME/pause" ] || gcc -static -Os -s -o "$KUBE_HOME/pause" "$HERE/pause.c"
  rm -f "$KUBE_HOME/node.ready"
  setsid unshare --fork --pid --kill-child=KILL --mount-proc --mount --net --uts --ipc bash -euc '
    hostname "$NODE_NAME"
    ip link set lo up; ip link add node0 type bridge; ip addr add "$NODE_IP/24" dev node0; ip link set node0 up
    ip addr add 10.96.0.1/32 dev node0       # the API server listens on the first service address itself
    F=$KUBE_HOME/fs
    mount -t overlay overlay -o "lowerdir=/usr/local,upperdir=$F/local,workdir=$F/local.work" /usr/local
    # beside cgroups of version 1 nobody here uses version 2, and crun refuses to run beside both
    ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
    rm -rf /usr/local/vgpu                   # what the machine has there: hidden in the node, not removed
    mount --bind "$F/tmp" /tmp; mount --bind "$F/log" /var/log; mount --bind "$F/kubelet" /var/lib/kubelet
    mount -t tmpfs tmpfs /run; mkdir -p /run/lock /run/cdi
    mount -t tmpfs tmpfs /mnt; mkdir /mnt/etc /mnt/etc.work
    mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/etc,workdir=/mnt/etc.work /etc
    for m in /tmp /run /var/lib/kubelet /usr/local; do mount --make-rshared "$m"; done
    echo > "$KUBE_HOME/node.ready"; exec "$KUBE_HOME/pause"' > "$KUBE_HOME/node.log" 2>&1 < /dev/null &
  unshare=$!
  for _ in $(seq 100); do [ -e "$KUBE_HOME/node.ready" ] && break; sleep 0.1; done
  [ -e "$KUBE_HOME/node.ready" ] || { echo "the node did not start:" >&2; cat "$KUBE_HOME/node.log" >&2; exit 1; }
  for _ in $(seq 50); do    # PID 1 of the node is unshare's child; ready is written just before its last exec
    tr -d ' ' < "/proc/$unshare/task/$unshare/children" > "$KUBE_HOME/node.pid"; running && exit 0; sleep 0.1
  done
  echo "the node's first process is gone:" >&2; cat "$KUBE_HOME/node.log" >&2; exit 1 ;;
running)
  running ;;
exec)
  shift
  running || { echo "the cluster is not running: start it with 'make cluster'" >&2; exit 1; }
  exec nsenter -t "$(cat "$KUBE_HOME/node.pid")" -m -u -i -n -p --wd=/ -- "$@" ;;
stop)
  if running; then kill -KILL "$(cat "$KUBE_HOME/node.pid")"; for _ in $(seq 100); do running || break; sleep 0.1; done; fi
  rm -f "$KUBE_HOME/node.pid"
  # cgroups that the pods left: no process lives in them any more
  for h in /sys/fs/cgroup /sys/fs/cgroup/*/; do
    h=${h%/}; find "$h" -mindepth 1 -depth -type d \( -path "$h/$CGROUP" -o -path "$h/$CGROUP/*" \) -exec rmdir {} + 2>/dev/null || true
  done ;;
*) echo "usage: node.sh start | running | exec CMD... | stop" >&2; exit 2 ;;
esac
