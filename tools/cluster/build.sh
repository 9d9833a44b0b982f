#!/bin/bash
# Builds a real Kubernetes, etcd, containerd and helm from their Go modules.   usage: build.sh OUTDIR
# Needs Go >= 1.26. Skips what OUTDIR already has; versions are part of OUTDIR's stamp files. About 15 minutes on two cores.
set -euo pipefail
. "$(dirname "$0")/env.sh"
OUT=$(mkdir -p "$1/.build" && readlink -f "$1"); WORK=$OUT/.build
K8S=$K8S_VERSION ETCD=$ETCD_VERSION CTD=$CONTAINERD_VERSION HELM=$HELM_VERSION
exec 9> "$OUT/.lock"; flock 9    # two builds at once would only be slower
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod
have() { [ -e "$OUT/.$1-$2" ]; }
built() { rm -f "$OUT/.$1-"*; touch "$OUT/.$1-$2"; echo "built $1 $2" >&2; }
building() { # name version minutes
  command -v go > /dev/null || { echo "build: needs Go 1.26 or newer in PATH to build $1" >&2; exit 1; }
  echo "build: $1 $2 (about $3 minutes on two cores)" >&2
}
# shows that a long build goes on: go names each package that it compiles, each download and each error
progress() { awk -v what="$1" '/^go: downloading/ { next } /[ :]/ { print; next } ++n % 200 == 0 { print "build: " what ": " n " packages compiled" } { fflush() }' >&2; }
module() { mkdir -p "$WORK/$1"; cat > "$WORK/$1/go.mod"; rm -f "$WORK/$1/go.sum"; }   # go.mod from standard input

if ! have kubernetes "$K8S"; then
  building kubernetes "$K8S" 11
  # k8s.io/kubernetes requires its staging modules at v0.0.0, which nobody serves: each is replaced by its published version.
  staging="api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap code-generator
    component-base component-helpers controller-manager cri-api cri-client csi-translation-lib dynamic-resource-allocation endpointslice
    externaljwt kms kube-aggregator kube-controller-manager kube-proxy kube-scheduler kubectl kubelet metrics mount-utils
    pod-security-admission"
  minor=${K8S#1.}; minor=${minor%%.*}
  [ "$minor" -ge 36 ] && staging="$staging streaming cri-streaming"
  { printf 'module hami.local/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n' "$K8S"
    for m in $staging; do printf '\tk8s.io/%s => k8s.io/%s v0.%s\n' "$m" "$m" "${K8S#1.}"; done
    # named by go.mod, imported by nothing that is built here, and not served in every version: empty modules stand in
    for m in sample-apiserver sample-cli-plugin sample-controller; do
      mkdir -p "$WORK/kubernetes/stub/$m"; printf 'module k8s.io/%s\n\ngo 1.26.0\n' "$m" > "$WORK/kubernetes/stub/$m/go.mod"
      printf '\tk8s.io/%s => ./stub/%s\n' "$m" "$m"
    done; echo ')'; } | module kubernetes; cd "$WORK/kubernetes"
  ld="-s -w"
  for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    ld="$ld -X $p.gitVersion=v$K8S -X $p.gitMajor=1 -X $p.gitMinor=$minor -X $p.gitTreeState=clean -X $p.buildDate=1970-01-01T00:00:00Z"
  done
  c=k8s.io/kubernetes/cmd
  go build -v -p 2 -trimpath -buildvcs=false -tags=selinux,notest,grpcnotrace -ldflags "$ld" -o "$OUT/" \
    $c/kube-apiserver $c/kube-controller-manager $c/kube-scheduler $c/kubelet $c/kubectl 2>&1 | progress kubernetes
  built kubernetes "$K8S"
fi
if ! have etcd "$ETCD"; then
  building etcd "$ETCD" 1
  printf 'module hami.local/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$ETCD" | module etcd; cd "$WORK/etcd"
  go build -v -p 2 -trimpath -buildvcs=false -ldflags "-s -w" -o "$OUT/etcd" go.etcd.io/etcd/server/v3 2>&1 | progress etcd
  built etcd "$ETCD"
fi
if ! have containerd "$CTD"; then
  building containerd "$CTD" 2
  printf 'module hami.local/containerd\n\ngo 1.26.0\n\nrequire github.com/containerd/containerd/v2 v%s\n' "$CTD" | module containerd; cd "$WORK/containerd"
  c=github.com/containerd/containerd/v2
  go build -v -p 2 -trimpath -buildvcs=false -tags "no_btrfs no_devmapper no_zfs no_aufs" -ldflags "-s -w -X $c/version.Version=$CTD" \
    -o "$OUT/" $c/cmd/containerd $c/cmd/containerd-shim-runc-v2 $c/cmd/ctr 2>&1 | progress containerd
  built containerd "$CTD"
fi
if ! have helm "$HELM-kube$HELM_KUBE_MINOR"; then
  building helm "$HELM" 2
  GOFLAGS= GOBIN="$OUT" go install -v -trimpath -ldflags "$(helm_ldflags)" "helm.sh/helm/v3/cmd/helm@v$HELM" 2>&1 | progress helm
  built helm "$HELM-kube$HELM_KUBE_MINOR"
fi
