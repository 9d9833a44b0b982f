#!/bin/bash
# etcd, API server, controller manager, scheduler and kubelet. Runs inside the node, containerd being up:
# node.sh exec control-plane.sh start | stop | restart-kubelet
# Reads APISERVER_ARGS and KCM_ARGS; writes KUBE_HOME/node.conf (kubeconfig for the inside).
set -euo pipefail
. "$(dirname "$0")/env.sh"
H=$KUBE_HOME; C=$H/cluster; P=$C/pki; B=$KUBE_BIN; IP=$NODE_IP
start() { local n=$1; shift; setsid "$@" >> "$C/$n.log" 2>&1 < /dev/null & echo $! > "$C/$n.pid"; }
kubeconfig() { # file token server
  cat > "$1" <<Y
apiVersion: v1
kind: Config
clusters: [{name: hami, cluster: {server: "$3", certificate-authority: $P/ca.crt}}]
users: [{name: hami, user: {token: "$2"}}]
contexts: [{name: hami, context: {cluster: hami, user: hami}}]
current-context: hami
Y
  chmod 600 "$1"
}
wait_for() { # what, program, command...
  local what=$1 name=$2 waited=0; shift 2
  until "$@" > /dev/null 2>&1; do
    kill -0 "$(cat "$C/$name.pid")" 2>/dev/null || { echo "$name ended; last lines of its log:" >&2; tail -5 "$C/$name.log" >&2; exit 1; }
    [ $((waited += 1)) -lt 900 ] || { echo "$what: not within 180 s; last lines of $name's log:" >&2; tail -5 "$C/$name.log" >&2; exit 1; }
    sleep 0.2
  done
}
kubelet() { start kubelet "$B/kubelet" --config="$C/kubelet.yaml" --kubeconfig="$C/kubelet.conf" --hostname-override="$NODE_NAME" --node-ip="$IP" --v=2; }
ready() { "$B/kubectl" --kubeconfig "$H/node.conf" get node "$NODE_NAME" | grep -qw Ready; }
stop_program() { # name: ends it and waits until it is gone
  [ -e "$C/$1.pid" ] || return 0
  local pid; pid=$(cat "$C/$1.pid"); rm "$C/$1.pid"
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 150); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
}

case ${1:-} in
start)
  mkdir -p "$P" "$C/etcd" /var/log/pods /var/log/containers
  openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=cluster-ca -keyout "$P/ca.key" -out "$P/ca.crt" 2>/dev/null
  openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=front-proxy-ca -keyout "$P/front-proxy-ca.key" -out "$P/front-proxy-ca.crt" 2>/dev/null
  openssl req -newkey rsa:2048 -nodes -subj /CN=kube-apiserver -keyout "$P/apiserver.key" -out "$P/apiserver.csr" 2>/dev/null
  openssl x509 -req -in "$P/apiserver.csr" -CA "$P/ca.crt" -CAkey "$P/ca.key" -CAcreateserial -days 365 -out "$P/apiserver.crt" \
    -extfile <(echo "subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:$IP,IP:10.96.0.1") 2>/dev/null
  openssl genrsa -out "$P/sa.key" 2048 2>/dev/null; openssl rsa -in "$P/sa.key" -pubout -out "$P/sa.pub" 2>/dev/null
  token() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }
  admin=$(token); kcm=$(token); sched=$(token); node=$(token)
  printf '%s\n' "$admin,admin,admin,\"system:masters\"" "$kcm,system:kube-controller-manager,kcm" \
    "$sched,system:kube-scheduler,sched" "$node,system:node:$NODE_NAME,node,\"system:nodes\"" > "$P/tokens.csv"
  chmod 600 "$P/tokens.csv"
  kubeconfig "$H/node.conf" "$admin" "https://$IP"
  kubeconfig "$C/kcm.conf" "$kcm" "https://$IP"; kubeconfig "$C/scheduler.conf" "$sched" "https://$IP"; kubeconfig "$C/kubelet.conf" "$node" "https://$IP"
  start etcd "$B/etcd" --data-dir "$C/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
    --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
  # who wrote what, for bench/burst.py; of nodes with the content, which tells a node lock from other annotations
  printf '%s\n' "apiVersion: audit.k8s.io/v1" "kind: Policy" "omitStages: [RequestReceived]" "omitManagedFields: true" "rules:" \
    '- {level: None, resources: [{group: "", resources: [events]}, {group: events.k8s.io}, {group: coordination.k8s.io}]}' \
    '- {level: Request, verbs: [patch, update], resources: [{group: "", resources: [nodes]}]}' \
    '- {level: Metadata, verbs: [create, update, patch, delete], resources: [{group: "", resources: [pods, pods/*, nodes]}]}' \
    "- {level: None}" > "$C/audit.yaml"
  # no kube-proxy: the API server reaches webhook Services by their endpoints
  start apiserver "$B/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --advertise-address="$IP" --secure-port=443 \
    --tls-cert-file="$P/apiserver.crt" --tls-private-key-file="$P/apiserver.key" --client-ca-file="$P/ca.crt" --service-cluster-ip-range=10.96.0.0/16 \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$P/sa.pub" --service-account-signing-key-file="$P/sa.key" \
    --token-auth-file="$P/tokens.csv" --authorization-mode=Node,RBAC --allow-privileged=true --enable-aggregator-routing=true \
    --requestheader-client-ca-file="$P/front-proxy-ca.crt" --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
    --audit-policy-file="$C/audit.yaml" --audit-log-path="$C/audit.log" --audit-log-mode=batch --audit-log-maxsize=200 --audit-log-maxbackup=1 \
    --kubelet-preferred-address-types=InternalIP ${APISERVER_ARGS:-}
  wait_for "API server ready" apiserver curl -skf -H "Authorization: Bearer $admin" https://127.0.0.1/readyz
  start kcm "$B/kube-controller-manager" --kubeconfig="$C/kcm.conf" --leader-elect=false --use-service-account-credentials=true \
    --service-account-private-key-file="$P/sa.key" --root-ca-file="$P/ca.crt" \
    --authentication-kubeconfig="$C/kcm.conf" --authorization-kubeconfig="$C/kcm.conf" ${KCM_ARGS:-}
  printf '%s\n' "apiVersion: kubescheduler.config.k8s.io/v1" "kind: KubeSchedulerConfiguration" "leaderElection: {leaderElect: false}" \
    "clientConnection: {kubeconfig: $C/scheduler.conf}" > "$C/scheduler.yaml"
  # its ports lie beside the defaults: HAMi's own kube-scheduler may use the node's network
  start scheduler "$B/kube-scheduler" --config="$C/scheduler.yaml" --secure-port=10269 \
    --authentication-kubeconfig="$C/scheduler.conf" --authorization-kubeconfig="$C/scheduler.conf"
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "/sys/fs/cgroup/$CGROUP"
    for c in cpu cpuset io memory pids hugetlb; do echo "+$c" > /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null || true; done
  else
    for h in /sys/fs/cgroup/*/; do mkdir -p "$h$CGROUP"; done
    # a new cpuset has no processors; its parents' are given to it
    for f in cpus mems; do cat "/sys/fs/cgroup/cpuset/cpuset.$f" > "/sys/fs/cgroup/cpuset/$CGROUP/cpuset.$f" 2>/dev/null || true; done
  fi
  cat > "$C/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$H/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP
failCgroupV1: false
enforceNodeAllocatable: []
failSwapOn: false
oomScoreAdj: 0
resolvConf: /etc/resolv.conf
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
maxPods: 250
registryPullQPS: 0
syncFrequency: 5s
nodeStatusUpdateFrequency: 1s
Y
  kubelet
  wait_for "node ready" kubelet ready
  wait_for "default service account" kcm "$B/kubectl" --kubeconfig "$H/node.conf" -n default get serviceaccount default ;;
stop)
  for n in kubelet scheduler kcm apiserver etcd; do stop_program $n; done ;;
restart-kubelet)
  stop_program kubelet; kubelet; wait_for "node ready" kubelet ready ;;
*) echo "usage: control-plane.sh start | stop | restart-kubelet" >&2; exit 2 ;;
esac
