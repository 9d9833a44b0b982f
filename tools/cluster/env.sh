# Where the test cluster keeps its things; sourced by the scripts beside it. Each may be set from outside.
: "${K8S_VERSION:=1.36.3}" "${ETCD_VERSION:=3.6.16}" "${CONTAINERD_VERSION:=2.4.2}" "${HELM_VERSION:=3.21.4}"
: "${HAMI_CACHE:=${XDG_CACHE_HOME:-$HOME/.cache}/hami}"   # programs and image layers, kept over `down`
: "${KUBE_BIN:=$HAMI_CACHE/kube-$K8S_VERSION}"            # programs that build.sh makes
: "${KUBE_HOME:=/var/lib/hami-cluster}"                   # state of the running cluster, removed by `down`
: "${NODE_NAME:=node1}" "${NODE_IP:=10.77.0.1}"           # the address exists only in the node's own network
: "${HELM_KUBE_MINOR:=36}"      # Kubernetes that helm assumes without a cluster: that of its client-go, as in its releases; else 1.20
helm_ldflags() { # arguments of the Go linker that helm's own build gives
  local h=helm.sh/helm/v3 p flags="-s -w -X helm.sh/helm/v3/internal/version.version=v$HELM_VERSION"
  for p in pkg/lint/rules pkg/chartutil; do flags="$flags -X $h/$p.k8sVersionMajor=1 -X $h/$p.k8sVersionMinor=$HELM_KUBE_MINOR"; done
  echo "$flags"
}
export K8S_VERSION ETCD_VERSION CONTAINERD_VERSION HELM_VERSION HAMI_CACHE KUBE_BIN KUBE_HOME NODE_NAME NODE_IP
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CGROUP=$(basename "$KUBE_HOME")                           # cgroup below which the pods live
DRIVER=$KUBE_HOME/driver                                  # the simulated driver's libraries
CARDS=$KUBE_HOME/cards                                    # and its state, the same path in node and containers
export HERE CGROUP DRIVER CARDS PATH=$KUBE_BIN:$PATH
