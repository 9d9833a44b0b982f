{{/* Combinations that cannot work, and what this version does not have: refused in words, before anything is applied. */}}
{{- define "hami.check" -}}
{{- $v := .Values -}}
{{- $s := $v.scheduler -}}
{{- $p := $v.devicePlugin -}}

{{- range $key, $image := dict "scheduler.extender" $s.extender.image "devicePlugin" $p.image "devicePlugin.monitor" $p.monitor.image -}}
{{- $tag := toString ($image.tag | default "") | trim | default $v.global.imageTag -}}
{{- if and (hasSuffix "projecthami/hami" $image.repository) (regexMatch "^v?2\\." $tag) -}}
{{- fail (printf "%s.image is %s:%s, an image of HAMi's, whose programs do not know this chart's arguments: set global.imageTag (or %s.image) to an image built from this project" $key $image.repository $tag $key) -}}
{{- end -}}
{{- end -}}

{{- if gt (len (include "hami.fullname" .)) 43 -}}
{{- fail (printf "the name %q is longer than 43 characters, so that names of Services made from it would be longer than the 63 that Kubernetes allows; set fullnameOverride" (include "hami.fullname" .)) -}}
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

{{- if not (hasPrefix "/" $v.global.gpuHookPath) }}{{ fail (printf "global.gpuHookPath is %q, but must be an absolute path" $v.global.gpuHookPath) }}{{ end -}}
{{- range list (list "devicePlugin.libPath" $p.libPath (include "hami.libPath" .)) (list "devicePlugin.monitor.ctrPath" $p.monitor.ctrPath (include "hami.ctrPath" .)) -}}
{{- $given := index . 1 | default "" | trimSuffix "/" -}}
{{- if and $given (ne $given (index . 2)) -}}
{{- fail (printf "%s is %q, but global.gpuHookPath %q makes it %q: leave %s empty, or change global.gpuHookPath" (index . 0) $given $v.global.gpuHookPath (index . 2) (index . 0)) -}}
{{- end -}}
{{- end -}}

{{- if $p.hostPIDBroker.enabled -}}
{{- if not $p.hostPID }}{{ fail "devicePlugin.hostPIDBroker.enabled=true needs devicePlugin.hostPID=true" }}{{ end -}}
{{- fail "devicePlugin.hostPIDBroker.enabled=true: the host PID broker is not in this version" -}}
{{- end -}}
{{- if ne $p.migStrategy "none" -}}
{{- fail (printf "devicePlugin.migStrategy=%s: static MIG is not in this version; use none" $p.migStrategy) -}}
{{- end -}}
{{- range splitList "," $p.deviceListStrategy -}}
{{- if not (has (trim .) (list "envvar" "volume-mounts")) -}}
{{- fail (printf "devicePlugin.deviceListStrategy=%s is not in this version; use envvar or volume-mounts" (trim .)) -}}
{{- end -}}
{{- end -}}
{{- if and $p.createRuntimeClass (not $p.runtimeClassName) }}{{ fail "devicePlugin.createRuntimeClass=true needs devicePlugin.runtimeClassName, such as nvidia" }}{{ end -}}
{{- if and $p.enabled (not $p.nodeConfiguration.externalConfigName) -}}
{{- $parsed := fromJson $p.nodeConfiguration.config -}}
{{- with index $parsed "Error" }}{{ fail (printf "devicePlugin.nodeConfiguration.config is not JSON: %s" .) }}{{ end -}}
{{- range index $parsed "nodeconfig" -}}
{{- if eq (index . "operatingmode" | default "") "mig" }}{{ fail (printf "devicePlugin.nodeConfiguration.config: node %q has operatingmode mig, which is not in this version; use hami-core" .name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $v.openshift.selinux.enabled -}}
{{- fail "openshift.selinux.enabled=true: labelling the host's folders is not in this version; do it once per node as docs/install.md says" -}}
{{- end -}}
{{- end -}}
