#!/bin/bash
# Prints the path of helm, built from its Go module into the cache where it is not there yet (about a minute, once).
# usage: helm.sh            HAMI_HELM names another helm; HELM_VERSION and HAMI_CACHE as in tools/cluster/env.sh
set -euo pipefail
. "$(dirname "$0")/cluster/env.sh"
if [ -n "${HAMI_HELM:-}" ]; then
  [ -x "$HAMI_HELM" ] || { echo "helm: HAMI_HELM=$HAMI_HELM is no program" >&2; exit 1; }
  echo "$HAMI_HELM"; exit
fi
OUT=$HAMI_CACHE/helm-$HELM_VERSION-kube$HELM_KUBE_MINOR
if [ -x "$OUT/helm" ]; then echo "$OUT/helm"; exit; fi
if [ -e "$KUBE_BIN/.helm-$HELM_VERSION-kube$HELM_KUBE_MINOR" ]; then echo "$KUBE_BIN/helm"; exit; fi
command -v go > /dev/null || {
  echo "helm: needs helm to render the chart. Put Go 1.26 or newer in PATH to build $HELM_VERSION, or set HAMI_HELM to a helm 3" >&2
  exit 1
}
echo "helm: building $HELM_VERSION (about a minute)" >&2
mkdir -p "$OUT.part"
GOFLAGS='' CGO_ENABLED=0 GOTOOLCHAIN=local GOBIN="$OUT.part" go install -trimpath -ldflags "$(helm_ldflags)" \
  "helm.sh/helm/v3/cmd/helm@v$HELM_VERSION" >&2
mkdir -p "$OUT"; mv "$OUT.part/helm" "$OUT/helm"; rmdir "$OUT.part"
echo "$OUT/helm"
