#!/bin/bash
# A private containerd with CDI on. Runs inside the node: node.sh exec containerd.sh start | stop
# runc, crun and the CNI plugins are Debian's. The default runtime "nvidia" is runc behind simulated-nvidia-runtime, "crun" is crun behind it.
set -euo pipefail
. "$(dirname "$0")/env.sh"
H=$KUBE_HOME
case ${1:-} in
start)
  mkdir -p "$H/cni/net.d" "$H/opt" /etc/cdi /run/cdi
  # without a CNI configuration the node stays NotReady
  cat > "$H/cni/net.d/10-hami.conflist" <<J
{"cniVersion":"0.4.0","name":"hami","plugins":[
 {"type":"bridge","bridge":"pods0","isGateway":true,"ipMasq":false,"hairpinMode":true,
  "ipam":{"type":"host-local","dataDir":"$H/cni/data","ranges":[[{"subnet":"10.88.0.0/22"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
J
  runtime() { # name, program
    cat <<T
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.$1]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.$1.options]
        BinaryName = "$2"
        SystemdCgroup = false
T
  }
  { cat <<T
version = 3
root = "$H/containerd"
state = "$H/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.nri.v1.nri"]
[grpc]
  address = "$H/containerd.sock"
[plugins.'io.containerd.internal.v1.opt']
  path = "$H/opt"
[plugins.'io.containerd.grpc.v1.cri']
  disable_tcp_service = true
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "hami.local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  # where root has no CAP_SYS_RESOURCE no sandbox starts without the next line, with a message that names a pipe
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "$H/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "nvidia"
T
    runtime runc "$(command -v runc)"; runtime nvidia "$H/nvidia-runc"; runtime crun "$H/nvidia-crun"; } > "$H/containerd.toml"
  # the container runtime starts programs without our environment: its settings are written into it
  for r in runc crun; do
    sed -e "s|@DRIVER@|$DRIVER|; s|@CARDS@|$CARDS|; s|@RUNC@|$(command -v $r)|" "$HERE/simulated-nvidia-runtime" > "$H/nvidia-$r"
    chmod 755 "$H/nvidia-$r"
  done
  setsid "$KUBE_BIN/containerd" -c "$H/containerd.toml" > "$H/containerd.log" 2>&1 < /dev/null &
  echo $! > "$H/containerd.pid"
  for _ in $(seq 300); do "$KUBE_BIN/ctr" -a "$H/containerd.sock" version > "$H/containerd.version" 2>/dev/null && exit 0; sleep 0.1; done
  echo "containerd did not answer; last lines of $H/containerd.log:" >&2; tail -5 "$H/containerd.log" >&2; exit 1 ;;
stop)
  kill "$(cat "$H/containerd.pid")"; rm "$H/containerd.pid" ;;
*) echo "usage: containerd.sh start | stop" >&2; exit 2 ;;
esac
