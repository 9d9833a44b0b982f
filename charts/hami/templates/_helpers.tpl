{{- define "hami.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "hami.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride | default (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) -}}
{{- $full | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "hami.namespace" -}}{{ .Values.namespaceOverride | default .Release.Namespace }}{{- end -}}
{{- define "hami.scheduler" -}}{{ include "hami.fullname" . }}-scheduler{{- end -}}
{{- define "hami.devicePlugin" -}}{{ include "hami.fullname" . }}-device-plugin{{- end -}}
{{- define "hami.dashboard" -}}{{ include "hami.fullname" . }}-dashboard{{- end -}}
{{- define "hami.mock" -}}{{ include "hami.fullname" . }}-mock-device-plugin{{- end -}}
{{- define "hami.tlsSecret" -}}{{ include "hami.scheduler" . }}-tls{{- end -}}
{{- define "hami.webhookConfiguration" -}}{{ include "hami.fullname" . }}-webhook{{- end -}}
{{- define "hami.webhookService" -}}{{ include "hami.scheduler" . }}-webhook{{- end -}}
{{- define "hami.admission" -}}{{ include "hami.fullname" . }}-admission{{- end -}}

{{- define "hami.selectorLabels" -}}
app.kubernetes.io/name: {{ include "hami.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "hami.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "hami.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Metadata of a namespaced object. Call with a list: context, name, component ("" for none). */}}
{{- define "hami.metadata" -}}
{{- $ := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ include "hami.namespace" $ }}
labels:
  {{- include "hami.labels" $ | nindent 2 }}
  {{- with index . 2 }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{/* The same for an object without namespace. */}}
{{- define "hami.clusterMetadata" -}}
{{- $ := index . 0 -}}
name: {{ index . 1 }}
labels:
  {{- include "hami.labels" $ | nindent 2 }}
  {{- with index . 2 }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{/* Call with a list: context, image values, fallback tag. */}}
{{- define "hami.image" -}}
{{- $ := index . 0 -}}{{- $image := index . 1 -}}
{{- $registry := $.Values.global.imageRegistry | default $image.registry -}}
{{- $tag := toString ($image.tag | default "") | trim | default (index . 2) -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ $image.repository }}:{{ $tag -}}
{{- end -}}

{{/* Call with a list: context, then image values. */}}
{{- define "hami.pullSecrets" -}}
{{- $ := index . 0 -}}
{{- $names := $.Values.global.imagePullSecrets | default list -}}
{{- range rest . }}{{ $names = concat $names (.pullSecrets | default list) }}{{ end -}}
{{- with $names | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Environment of a map or of a list of entries. */}}
{{- define "hami.env" -}}
{{- if kindIs "map" . }}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ toString $value | quote }}
{{- end }}
{{- else if . }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "hami.clusterMinor" -}}
{{- regexReplaceAll "^v?1\\.([0-9]+).*$" .Capabilities.KubeVersion.Version "${1}" -}}
{{- end -}}

{{- define "hami.kubeSchedulerTag" -}}
{{- toString (.Values.scheduler.kubeScheduler.image.tag | default "") | trim | default (regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version) | default (printf "v1.%s.0" (include "hami.clusterMinor" .)) -}}
{{- end -}}

{{/* Minor version of kube-scheduler itself: of its tag, where the tag is a version. */}}
{{- define "hami.kubeSchedulerMinor" -}}
{{- $tag := include "hami.kubeSchedulerTag" . -}}
{{- if regexMatch "^v?1\\.[0-9]+" $tag -}}
{{- regexReplaceAll "^v?1\\.([0-9]+).*$" $tag "${1}" -}}
{{- else -}}
{{- include "hami.clusterMinor" . -}}
{{- end -}}
{{- end -}}

{{/* "true" when replicas elect a leader: the sidecar holds the Lease, so without it nobody can. */}}
{{- define "hami.electing" -}}
{{- if and .Values.scheduler.leaderElect .Values.scheduler.kubeScheduler.enabled }}true{{ end -}}
{{- end -}}
{{- define "hami.replicas" -}}
{{- if include "hami.electing" . }}{{ int64 .Values.scheduler.replicas }}{{ else }}1{{ end -}}
{{- end -}}

{{/* none, certManager, patch or self. */}}
{{- define "hami.tls" -}}
{{- if not .Values.scheduler.admissionWebhook.enabled -}}none
{{- else if .Values.scheduler.certManager.enabled -}}certManager
{{- else if .Values.scheduler.patch.enabled -}}patch
{{- else -}}self
{{- end -}}
{{- end -}}

{{/* Names and addresses of the webhook, comma-separated. The first must fit into a certificate's common name. */}}
{{- define "hami.tlsHosts" -}}
{{- $names := list "127.0.0.1" -}}
{{- $url := .Values.scheduler.admissionWebhook.customURL -}}
{{- if and $url.enabled (ne $url.host "127.0.0.1") }}{{ $names = append $names $url.host }}{{ end -}}
{{- $ns := include "hami.namespace" . -}}
{{- range list (include "hami.scheduler" .) (include "hami.webhookService" .) -}}
{{- $names = concat $names (list (printf "%s.%s.svc" . $ns) (printf "%s.%s.svc.cluster.local" . $ns)) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{- define "hami.extenderPort" -}}
{{- .Values.scheduler.service.httpTargetPort | default (.Values.scheduler.admissionWebhook.enabled | ternary 8443 80) -}}
{{- end -}}
{{- define "hami.extenderPortName" -}}{{ .Values.scheduler.admissionWebhook.enabled | ternary "https" "http" }}{{- end -}}
{{- define "hami.schedulerMetricsPort" -}}{{ regexFind "[0-9]+$" .Values.scheduler.metricsBindAddress }}{{- end -}}

{{/* Folders of the host. */}}
{{- define "hami.hookPath" -}}{{ .Values.global.gpuHookPath | trimSuffix "/" }}{{- end -}}
{{- define "hami.libPath" -}}{{ include "hami.hookPath" . }}/vgpu{{- end -}}
{{- define "hami.ctrPath" -}}{{ include "hami.hookPath" . }}/vgpu/containers{{- end -}}

{{/* securityContext of the plugin. With the broker it makes the mount point in /tmp/vgpulock immutable, so that no container can remove it. */}}
{{/* Whether the device plugin itself serves /metrics, on 9396. */}}
{{- define "hami.pluginMetrics" -}}
{{- if or .Values.devicePlugin.metrics.enabled .Values.devicePlugin.hostPIDBroker.enabled }}true{{ end -}}
{{- end -}}

{{- define "hami.devicePluginSecurity" -}}
{{- $p := .Values.devicePlugin -}}
{{- $context := deepCopy $p.securityContext -}}
{{- if and (include "hami.makesInstances" .) (not (hasKey $context "privileged")) -}}
{{- $context = dict "runAsUser" 0 "privileged" true "readOnlyRootFilesystem" ($context.readOnlyRootFilesystem | default false) -}}
{{- end -}}
{{- if and $p.hostPIDBroker.enabled (not $context.privileged) -}}
{{- $capabilities := $context.capabilities | default dict -}}
{{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "LINUX_IMMUTABLE" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Whether a node of the chart's own node configuration makes MIG instances: only a privileged plugin can. */}}
{{- define "hami.makesInstances" -}}
{{- if not .Values.devicePlugin.nodeConfiguration.externalConfigName -}}
{{- range index (fromJson .Values.devicePlugin.nodeConfiguration.config) "nodeconfig" -}}
{{- if eq (index . "operatingmode" | default "") "mig" }}true{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes 1.30 and newer have ValidatingAdmissionPolicy in v1. */}}
{{- define "hami.allocationPolicy" -}}
{{- if and .Values.allocationPolicy.enabled (ge (include "hami.clusterMinor" . | int) 30) }}true{{ end -}}
{{- end -}}
