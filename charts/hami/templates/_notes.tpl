{{- define "hami.notes" -}}
HAMi is installed in namespace {{ include "hami.namespace" . }}. A pod asks for a share of a GPU with

  resources:
    limits:
      {{ .Values.resourceName }}: 1          # cards
      {{ .Values.resourceMem }}: 3000    # MiB of each
{{- if .Values.devicePlugin.enabled }}

Nodes with GPUs need the label{{ range $k, $v := .Values.devicePlugin.nvidiaNodeSelector }} {{ $k }}={{ $v }}{{ end }}. Then check:
{{- else }}

Check:
{{- end }}

  kubectl -n {{ include "hami.namespace" . }} get pods -l app.kubernetes.io/instance={{ .Release.Name }}
  kubectl get node NODE -o jsonpath='{.status.allocatable.{{ .Values.resourceName | replace "." "\\." }}}'
  kubectl get node NODE -o jsonpath='{.metadata.annotations.hami\.io/node-nvidia-register}'
  {{- if .Values.scheduler.admissionWebhook.enabled }}
  kubectl get mutatingwebhookconfiguration {{ include "hami.webhookConfiguration" . }} -o jsonpath='{.webhooks[0].clientConfig.caBundle}' | head -c 20
  {{- end }}
  {{- if include "hami.electing" . }}
  kubectl -n {{ include "hami.namespace" . }} get lease {{ .Values.schedulerName }}
  {{- end }}
{{- if .Values.dashboard.enabled }}

The web page: kubectl -n {{ include "hami.namespace" . }} port-forward service/{{ include "hami.dashboard" . }} {{ .Values.dashboard.service.port }}, then http://127.0.0.1:{{ .Values.dashboard.service.port }}/
{{- if eq .Values.dashboard.auth.mode "none" }}
WARNING: dashboard.auth.mode=none: whoever reaches its Service, every pod of the cluster included, sees names and amounts of all GPU pods.
{{- else if eq .Values.dashboard.auth.mode "header" }}
WARNING: dashboard.auth.mode=header: whoever reaches its Service past the proxy can name himself. Let only the proxy in: networkPolicy.enabled
and dashboard.allowedFrom.
{{- end }}
{{- end }}
{{- if lt (include "hami.clusterMinor" . | int) 30 }}

WARNING: this Kubernetes ({{ .Capabilities.KubeVersion.Version }}) has no ValidatingAdmissionPolicy (1.30 and newer have it). Whoever may create pods
with the label hami.io/webhook=ignore, or may edit pods, can forge or change allocations. Restrict both, or upgrade.
{{- else if not .Values.allocationPolicy.enabled }}

WARNING: allocationPolicy.enabled=false: whoever may create or edit pods can forge or change allocations.
{{- end }}
{{- if not .Values.scheduler.admissionWebhook.enabled }}

WARNING: without the webhook, pods must set schedulerName: {{ .Values.schedulerName }} themselves, and the extender answers in plain HTTP.
{{- end }}
{{- if eq (include "hami.replicas" .) "1" }}

One replica of the scheduler runs. With scheduler.replicas=2 the webhook and scheduling outlive the loss of a node.
{{- end }}
{{- if not .Values.scheduler.kubeScheduler.enabled }}

WARNING: scheduler.kubeScheduler.enabled=false: pods are scheduled only by a kube-scheduler of yours that calls this extender
({{ if .Values.scheduler.remoteExtender }}scheduler.remoteExtender=true: whoever reaches its port can bind pods{{ else }}from other hosts only with scheduler.remoteExtender=true{{ end }}). See docs/install.md.
{{- end }}
{{- if eq .Values.scheduler.admissionWebhook.privileged "allow-unlimited" }}

WARNING: scheduler.admissionWebhook.privileged=allow-unlimited: privileged containers see whole cards, without limits.
{{- end }}
{{- range $value, $kind := dict "prometheus.enabled" "ServiceMonitor" "prometheus.alerts.enabled" "PrometheusRule" }}
{{- if and (eq $value "prometheus.enabled" | ternary $.Values.prometheus.enabled $.Values.prometheus.alerts.enabled) (not ($.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind))) }}

WARNING: {{ $value }}=true has no effect: the cluster has no {{ $kind }} (Prometheus Operator). Install it, then upgrade this release.
{{- end }}
{{- end }}
{{- if .Values.mockDevicePlugin.enabled }}

The mock device plugin is a separate image of HAMi's, not part of this version.
{{- end }}
{{- if .Values.openshift.enabled }}

openshift.enabled=true has been rendered and checked, but not run on OpenShift.
{{- end }}
{{- end -}}
