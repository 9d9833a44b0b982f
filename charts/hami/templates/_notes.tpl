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
{{- if contains "topology-aware" .Values.scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy }}

WARNING: gpuSchedulerPolicy topology-aware: the device plugin of this version publishes no scores of card pairs, so all pairs count the same.
{{- end }}
{{- if or .Values.devices.ascend.enabled .Values.devices.iluvatar.enabled }}

WARNING: devices.{{ if .Values.devices.ascend.enabled }}ascend{{ else }}iluvatar{{ end }}.enabled=true: this version schedules NVIDIA only. Pods that ask for other vendors' devices get no allocation from it.
{{- end }}
{{- if eq .Values.scheduler.admissionWebhook.privileged "allow-unlimited" }}

WARNING: scheduler.admissionWebhook.privileged=allow-unlimited: privileged containers see whole cards, without limits.
{{- end }}
{{- if .Values.mockDevicePlugin.enabled }}

The mock device plugin is a separate image of HAMi's, not part of this version.
{{- end }}
{{- if .Values.openshift.enabled }}

openshift.enabled=true has been rendered and checked, but not run on OpenShift.
{{- end }}
{{- end -}}
