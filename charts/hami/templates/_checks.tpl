{{/* Combinations that cannot work, and what this version does not have: refused in words, before anything is applied. */}}
{{- define "hami.check" -}}
{{- $v := .Values -}}
{{- $s := $v.scheduler -}}
{{- $p := $v.devicePlugin -}}

{{- $images := dict "scheduler.extender" $s.extender.image "devicePlugin" $p.image "devicePlugin.monitor" $p.monitor.image -}}
{{- if $v.dashboard.enabled }}{{ $_ := set $images "dashboard" $v.dashboard.image }}{{ end -}}
{{- range $key, $image := $images -}}
{{- $tag := toString ($image.tag | default "") | trim | default ($v.global.imageTag | default "") -}}
{{- if not $tag }}{{ fail (printf "%s.image has no tag: set global.imageTag or %s.image.tag" $key $key) }}{{ end -}}
{{- if and (hasSuffix "projecthami/hami" $image.repository) (regexMatch "^v?2\\." $tag) -}}
{{- fail (printf "%s.image is %s:%s, an image of HAMi's, whose programs do not know this chart's arguments: set global.imageTag (or %s.image) to an image built from this project" $key $image.repository $tag $key) -}}
{{- end -}}
{{- end -}}

{{- if gt (len (include "hami.fullname" .)) 41 -}}
{{- fail (printf "the name %q is longer than 41 characters, so that names of Services made from it would be longer than the 63 that Kubernetes allows; set fullnameOverride" (include "hami.fullname" .)) -}}
{{- end -}}

{{- if and $v.dashboard.enabled (ne $v.dashboard.service.type "ClusterIP") (ne $v.dashboard.auth.mode "kubernetes") -}}
{{- fail (printf "dashboard.service.type=%s with dashboard.auth.mode=%s would show every pod to whoever reaches a node: set dashboard.auth.mode=kubernetes, or leave the type ClusterIP" $v.dashboard.service.type $v.dashboard.auth.mode) -}}
{{- end -}}

{{- range $old, $new := dict "imageTag" "scheduler.kubeScheduler.image.tag" -}}
{{- if hasKey $s.kubeScheduler $old }}{{ fail (printf "scheduler.kubeScheduler.%s was renamed: use %s" $old $new) }}{{ end -}}
{{- end -}}
{{- if hasKey $p "monitorctrPath" }}{{ fail "devicePlugin.monitorctrPath was renamed, and no longer needs to be set: global.gpuHookPath decides" }}{{ end -}}
{{- if $v.podSecurityPolicy.enabled }}{{ fail "podSecurityPolicy.enabled: Kubernetes has no PodSecurityPolicy any more (since 1.25); remove this value" }}{{ end -}}

{{- if and $s.leaderElect (not $s.kubeScheduler.enabled) (gt (int $s.replicas) 1) -}}
{{- fail (printf "scheduler.replicas is %d, but with scheduler.kubeScheduler.enabled=false nobody holds the Lease by which replicas elect a leader: set scheduler.replicas=1" (int $s.replicas)) -}}
{{- end -}}
{{- if and $s.kubeScheduler.enabled (lt (include "hami.kubeSchedulerMinor" . | int) 23) -}}
{{- fail (printf "kube-scheduler %s: versions before 1.23 are not supported; set scheduler.kubeScheduler.image.tag" (include "hami.kubeSchedulerTag" .)) -}}
{{- end -}}
{{- if not (include "hami.schedulerMetricsPort" .) -}}
{{- fail (printf "scheduler.metricsBindAddress is %q, which does not end in a port" $s.metricsBindAddress) -}}
{{- end -}}
{{- if and $s.kubeScheduler.enabled $s.remoteExtender -}}
{{- fail "scheduler.remoteExtender=true lets other hosts bind pods, and is only for a kube-scheduler outside the pod: set scheduler.kubeScheduler.enabled=false, or leave it false" -}}
{{- end -}}

{{/* Probes, Services and NetworkPolicies follow the value; the last of two flags would win over it. */}}
{{- range list
  (list "scheduler.extender.extraArgs" $s.extender.extraArgs "--http_bind" "scheduler.service.httpTargetPort" true)
  (list "scheduler.extender.extraArgs" $s.extender.extraArgs "--metrics-bind-address" "scheduler.metricsBindAddress" true)
  (list "devicePlugin.monitor.extraArgs" $p.monitor.extraArgs "--metrics-bind-address" "devicePlugin.monitor.metricsPort" true)
  (list "devicePlugin.extraArgs" $p.extraArgs "--metrics-bind-address" (ternary "devicePlugin.hostPIDBroker.enabled (port 9396)" "devicePlugin.metrics.enabled (port 9396)" $p.hostPIDBroker.enabled) (include "hami.pluginMetrics" .))
-}}
{{- $key := index . 0 -}}{{- $flag := index . 2 -}}{{- $value := index . 3 -}}{{- $refused := index . 4 -}}
{{- range index . 1 -}}
{{- if and $refused (eq (index (splitList "=" (toString .)) 0) $flag) -}}
{{- fail (printf "%s has %s, but the port is %s, which probes and Services follow: remove it from %s" $key . $value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $p.enabled (include "hami.pluginMetrics" .) (eq (int $p.monitor.metricsPort) 9396) -}}
{{- fail "devicePlugin.monitor.metricsPort is 9396, where the device plugin itself listens with devicePlugin.metrics.enabled or devicePlugin.hostPIDBroker.enabled: choose another port" -}}
{{- end -}}

{{- if not (hasPrefix "/" $v.global.gpuHookPath) }}{{ fail (printf "global.gpuHookPath is %q, but must be an absolute path" $v.global.gpuHookPath) }}{{ end -}}
{{- range list (list "devicePlugin.libPath" $p.libPath (include "hami.libPath" .)) (list "devicePlugin.monitor.ctrPath" $p.monitor.ctrPath (include "hami.ctrPath" .)) -}}
{{- $given := index . 1 | default "" | trimSuffix "/" -}}
{{- if and $given (ne $given (index . 2)) -}}
{{- fail (printf "%s is %q, but global.gpuHookPath %q makes it %q: leave %s empty, or change global.gpuHookPath" (index . 0) $given $v.global.gpuHookPath (index . 2) (index . 0)) -}}
{{- end -}}
{{- end -}}

{{- if and $p.enabled $p.hostPIDBroker.enabled (not $p.hostPID) -}}
{{- fail "devicePlugin.hostPIDBroker requires devicePlugin.hostPID: with devicePlugin.hostPIDBroker.enabled=true and devicePlugin.hostPID=false the broker would see no process of the node; set devicePlugin.hostPID=true" -}}
{{- end -}}
{{- range splitList "," $p.deviceListStrategy -}}
{{- if not (has (trim .) (list "envvar" "volume-mounts" "cdi-annotations" "cdi-cri")) -}}
{{- fail (printf "devicePlugin.deviceListStrategy=%s is unknown; use envvar, volume-mounts, cdi-annotations, cdi-cri or a comma list of them" (trim .)) -}}
{{- end -}}
{{- end -}}
{{- if and $p.createRuntimeClass (not $p.runtimeClassName) }}{{ fail "devicePlugin.createRuntimeClass=true needs devicePlugin.runtimeClassName, such as nvidia" }}{{ end -}}
{{- if and $p.enabled (not $p.nodeConfiguration.externalConfigName) -}}
{{- $parsed := fromJson $p.nodeConfiguration.config -}}
{{- with index $parsed "Error" }}{{ fail (printf "devicePlugin.nodeConfiguration.config is not JSON: %s" .) }}{{ end -}}
{{- range index $parsed "nodeconfig" -}}
{{- if and (eq (index . "operatingmode" | default "") "mig") (ne $p.migStrategy "none") }}{{ fail (printf "devicePlugin.nodeConfiguration.config: node %q has operatingmode mig, which makes MIG instances itself, and devicePlugin.migStrategy=%s offers those that are there: set it to none" .name $p.migStrategy) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $v.openshift.selinux.enabled -}}
{{- fail "openshift.selinux.enabled=true: labelling the host's folders is not in this version; do it once per node as docs/install.md says" -}}
{{- end -}}
{{- end -}}
