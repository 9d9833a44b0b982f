{{/* Text of device-config.yaml. */}}
{{- define "hami.deviceConfig" -}}
{{- $file := .Files.Get "files/device-config.yaml" -}}
{{- if (index .Values "device-config").content -}}
{{- (index .Values "device-config").content -}}
{{- else if $file -}}
{{- $file -}}
{{- else -}}
{{- include "hami.generatedDeviceConfig" . -}}
{{- end -}}
{{- end -}}

{{- define "hami.generatedDeviceConfig" -}}
{{- $v := .Values -}}
{{- $overwriteEnv := toString $v.scheduler.overwriteEnv -}}
nvidia:
  resourceCountName: {{ $v.resourceName }}
  resourceMemoryName: {{ $v.resourceMem }}
  resourceMemoryPercentageName: {{ $v.resourceMemPercentage }}
  resourceCoreName: {{ $v.resourceCores }}
  resourcePriorityName: {{ $v.resourcePriority }}
  overwriteEnv: {{ $overwriteEnv }}
  defaultMemory: 0
  defaultCores: 0
  defaultGPUNum: 1
  preConfiguredDeviceMemory: {{ int64 $v.devicePlugin.preConfiguredDeviceMemory }}
  memoryFactor: 1
  deviceSplitCount: {{ int64 $v.devicePlugin.deviceSplitCount }}
  deviceMemoryScaling: {{ $v.devicePlugin.deviceMemoryScaling }}
  deviceCoreScaling: {{ $v.devicePlugin.deviceCoreScaling }}
  enableNumaTopology: {{ $v.devicePlugin.enableNumaTopology }}
  gpuCorePolicy: {{ $v.devices.nvidia.gpuCorePolicy }}
  libCudaLogLevel: {{ $v.devices.nvidia.libCudaLogLevel }}
  runtimeClassName: {{ $v.devicePlugin.runtimeClassName | quote }}
  migProfileAllowlist:
    - models: [A30]
      profiles: [1g.6gb, 2g.12gb, 4g.24gb]
    - models: [A100-SXM4-40GB, A100-40GB-PCIe, A100-PCIE-40GB]
      profiles: [1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb]
    - models: [A100-SXM4-80GB, A100-80GB-PCIe, A100-PCIE-80GB, A100 80GB PCIe]
      profiles: [1g.10gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.79gb]
    - models: [H100-PCIE-80GB, H100-SXM5-80GB, H100 80GB HBM3, H100 PCIe]
      profiles: [1g.10gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb]
    - models: [H100-PCIE-94GB, H100-SXM5-94GB, H100 NVL]
      profiles: [1g.12gb, 2g.24gb, 3g.47gb, 4g.47gb, 7g.94gb]
    # before H20, which is part of these names
    - models: [H200 NVL, H200-SXM5, NVIDIA H200]
      profiles: [1g.18gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb]
    - models: [H20, H100 on GH200]
      profiles: [1g.12gb, 2g.24gb, 3g.48gb, 4g.48gb, 7g.96gb]
    - models: [B200]
      profiles: [1g.23gb, 2g.45gb, 3g.90gb, 4g.90gb, 7g.180gb]
    - models: [RTX PRO 6000 Blackwell Server Edition]
      profiles: [1g.24gb, 2g.48gb, 4g.96gb]
cambricon:
  resourceCountName: {{ $v.mluResourceName }}
  resourceMemoryName: {{ $v.mluResourceMem }}
  resourceCoreName: {{ $v.mluResourceCores }}
  allowUnsupported: {{ $v.devices.cambricon.allowUnsupported }}
hygon:
  resourceCountName: {{ $v.dcuResourceName }}
  resourceMemoryName: {{ $v.dcuResourceMem }}
  resourceCoreName: {{ $v.dcuResourceCores }}
  memoryFactor: 1
  allowUnsupported: {{ $v.devices.hygon.allowUnsupported }}
metax:
  resourceCountName: metax-tech.com/gpu
  resourceVCountName: {{ $v.metaxResourceName }}
  resourceVMemoryName: {{ $v.metaxResourceMem }}
  resourceVCoreName: {{ $v.metaxResourceCore }}
  sgpuTopologyAware: {{ toString $v.metaxsGPUTopologyAware }}
enflame:
  resourceNameGCU: enflame.com/gcu
  resourceNameDRSGCU: {{ $v.enflameResourceNameDRSGCU }}
  resourceNameGCUMemory: {{ $v.enflameResourceNameGCUMemory }}
  resourceNameGCUCore: {{ $v.enflameResourceNameGCUCore }}
mthreads:
  resourceCountName: mthreads.com/vgpu
  resourceMemoryName: mthreads.com/sgpu-memory
  resourceCoreName: mthreads.com/sgpu-core
iluvatars:
  {{- range list "MR-V100" "MR-V50" "BI-V150" "BI-V100" }}
  - chipName: {{ . }}
    commonWord: {{ . }}
    resourceCountName: iluvatar.ai/{{ . }}-vgpu
    resourceMemoryName: iluvatar.ai/{{ . }}.vMem
    resourceCoreName: iluvatar.ai/{{ . }}.vCore
    allowUnsupported: {{ $v.devices.iluvatar.allowUnsupported }}
  {{- end }}
kunlun:
  resourceCountName: {{ $v.kunlunResourceName }}
  resourceVCountName: {{ $v.kunlunResourceVCountName }}
  resourceVMemoryName: {{ $v.kunlunResourceVMemoryName }}
awsneuron:
  resourceCountName: aws.amazon.com/neuron
  resourceCoreName: aws.amazon.com/neuroncore
amd:
  resourceCountName: amd.com/gpu
  resourceMemoryName: amd.com/gpumem
  resourceCoreName: amd.com/gpucores
  allowUnsupported: {{ $v.devices.amd.allowUnsupported }}
vastai:
  resourceCountName: {{ $v.vastaiResourceName }}
biren:
  resourceCountName: {{ $v.birenResourceName }}
vnpus:
  hamiVnpuCore: {{ $v.devices.ascend.hamiVnpuCore }}
  allowUnsupported: {{ $v.devices.ascend.allowUnsupported }}
  configs:
    {{- range include "hami.ascendChips" . | fromYamlArray }}
    - chipName: {{ .chip | quote }}
      commonWord: {{ .word }}
      resourceName: huawei.com/{{ .word }}
      resourceMemoryName: huawei.com/{{ .word }}-memory
      resourceCoreName: huawei.com/{{ .word }}-core
      memoryAllocatable: {{ int .allocatable }}
      memoryCapacity: {{ int .capacity }}
      {{- with .factor }}
      memoryFactor: {{ int . }}
      {{- end }}
      aiCore: {{ int .aiCore }}
      {{- with .aiCPU }}
      aiCPU: {{ int . }}
      {{- end }}
      {{- with .superPod }}
      superPod: {{ . }}
      {{- end }}
      runtimeClassName: {{ $v.devices.ascend.runtimeClassName | quote }}
      overwriteEnv: {{ $overwriteEnv }}
      templates:
        {{- range .templates }}
        - name: {{ index . 0 }}
          memory: {{ int (index . 1) }}
          aiCore: {{ int (index . 2) }}
          {{- if gt (len .) 3 }}
          aiCPU: {{ int (index . 3) }}
          {{- end }}
        {{- end }}
    {{- end }}
{{- end -}}

{{/* Chips are matched by name in this order: 910B4-1 stands before 910B4. */}}
{{- define "hami.ascendChips" -}}
- {chip: 910A, word: Ascend910A, allocatable: 32768, capacity: 32768, factor: 1, aiCore: 30, templates: [[vir02, 2184, 2], [vir04, 4369, 4], [vir08, 8738, 8], [vir16, 17476, 16]]}
- {chip: 910B2, word: Ascend910B2, allocatable: 65536, capacity: 65536, factor: 1, aiCore: 24, aiCPU: 6, templates: [[vir03_1c_8g, 8192, 3, 1], [vir06_1c_16g, 16384, 6, 1], [vir12_3c_32g, 32768, 12, 3]]}
- {chip: 910B3, word: Ascend910B3, allocatable: 65536, capacity: 65536, factor: 1, aiCore: 20, aiCPU: 7, templates: [[vir05_1c_16g, 16384, 5, 1], [vir10_3c_32g, 32768, 10, 3]]}
- {chip: 910B4-1, word: Ascend910B4-1, allocatable: 65536, capacity: 65536, factor: 1, aiCore: 20, aiCPU: 7, templates: [[vir05_1c_16g, 16384, 5, 1], [vir10_3c_32g, 32768, 10, 3]]}
- {chip: 910B4, word: Ascend910B4, allocatable: 32768, capacity: 32768, factor: 1, aiCore: 20, aiCPU: 7, templates: [[vir05_1c_8g, 8192, 5, 1], [vir10_3c_16g, 16384, 10, 3]]}
- {chip: 310P3, word: Ascend310P, allocatable: 21527, capacity: 24576, factor: 1, aiCore: 8, aiCPU: 7, templates: [[vir01, 3072, 1, 1], [vir02, 6144, 2, 2], [vir04, 12288, 4, 4]]}
- {chip: Ascend910, word: Ascend910C, allocatable: 65536, capacity: 65536, aiCore: 20, aiCPU: 7, superPod: true, templates: [[vir05_1c_16g, 16384, 5, 1], [vir10_3c_32g, 32768, 10, 3]]}
{{- end -}}

{{/* The device configuration as an object, whatever its text comes from. */}}
{{- define "hami.parsedDeviceConfig" -}}
{{- $parsed := include "hami.deviceConfig" . | fromYaml -}}
{{- with index $parsed "Error" }}{{ fail (printf "device-config.content is not a YAML mapping: %s" .) }}{{ end -}}
{{- toYaml $parsed -}}
{{- end -}}

{{/*
Every resource name of every enabled section, once, as a list of {name, ignored}. kube-scheduler itself counts what the
node really has: memory and cores of Cambricon, Mthreads and Iluvatar.
*/}}
{{- define "hami.managedResources" -}}
{{- $config := include "hami.parsedDeviceConfig" . | fromYaml -}}
{{- $devices := .Values.devices -}}
{{- $names := list -}}{{- $counted := list -}}
{{- $triple := list "resourceCountName" "resourceMemoryName" "resourceCoreName" -}}
{{- $real := list "resourceMemoryName" "resourceCoreName" -}}
{{- $ascend := $config.vnpus | default dict -}}
{{- if kindIs "map" $ascend }}{{ $ascend = $ascend.configs | default list }}{{ end -}}
{{- $sections := list
  (list true (list $config.nvidia) (append $triple "resourceMemoryPercentageName" | concat (list "resourcePriorityName")) list list)
  (list true (list $config.cambricon) $triple $real list)
  (list true (list $config.hygon) $triple list list)
  (list true (list $config.metax) (list "resourceCountName" "resourceVCountName" "resourceVCoreName" "resourceVMemoryName") list list)
  (list $devices.ascend.enabled $ascend (list "resourceName" "resourceMemoryName" "resourceCoreName") list $devices.ascend.customresources)
  (list $devices.mthreads.enabled (list $config.mthreads) $triple $real $devices.mthreads.customresources)
  (list $devices.enflame.enabled (list $config.enflame) (list "resourceNameDRSGCU" "resourceNameGCUMemory" "resourceNameGCUCore" "resourceNameGCU" "resourceNameVGCU" "resourceNameVGCUPercentage") list $devices.enflame.customresources)
  (list $devices.kunlun.enabled (list $config.kunlun) (list "resourceCountName" "resourceVCountName" "resourceVMemoryName") list $devices.kunlun.customresources)
  (list true (list $config.awsneuron) (list "resourceCountName" "resourceCoreName") list $devices.awsneuron.customresources)
  (list $devices.iluvatar.enabled ($config.iluvatars | default list) $triple $real $devices.iluvatar.customresources)
  (list $devices.vastai.enabled (list $config.vastai) (list "resourceCountName") list $devices.vastai.customresources)
  (list $devices.biren.enabled (list $config.biren) (list "resourceCountName") list (concat $devices.biren.customresources (dig "sviResourceNames" (list "birentech.com/1-2-gpu" "birentech.com/1-4-gpu") ($config.biren | default dict))))
  (list true (list $config.amd) $triple list $devices.amd.customresources)
  (list true ($config.profiles | default list) $triple list list)
-}}
{{- range $section := $sections -}}
{{- if index $section 0 -}}
{{- range $item := index $section 1 -}}
{{- $item := $item | default dict -}}
{{- range $key := index $section 2 -}}
{{- with index $item $key -}}
{{- $names = append $names . -}}
{{- if has $key (index $section 3) }}{{ $counted = append $counted . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names = concat $names (index $section 4) -}}
{{- end -}}
{{- end -}}
{{- range $names | uniq }}
- name: {{ . }}
  ignoredByScheduler: {{ not (has . $counted) }}
{{- end }}
{{- end -}}

{{/* Annotations of pods that hold allocations (one a line); only HAMi's own accounts may write them. */}}
{{- define "hami.protectedAnnotations" -}}
{{- $config := include "hami.parsedDeviceConfig" . | fromYaml -}}
{{- $keys := list "hami.io/vgpu-node" "hami.io/vgpu-time" "hami.io/bind-phase" "hami.io/bind-time" "hami.io/vgpu-mig-allocations" "hami.io/allocate-error" "hami.io/amd-cu-allocated" "hami.io/kunlun-allocated" "hami.io/enflame-vgpu-devices-allocated" "hami.io/aws-neuron-devices-allocated" -}}
{{- $families := list "vgpu" "cambricon-mlu" "dcu" "enflame-gcu" "mthreads-vgpu" "metax-gpu" "metax-sgpu" "xpu" "amd" "Vastai" "Biren" -}}
{{- $ascend := $config.vnpus | default dict -}}
{{- if kindIs "map" $ascend }}{{ $ascend = $ascend.configs | default list }}{{ end -}}
{{- range $ascend }}{{ with .commonWord }}{{ $families = append $families . }}{{ if $.Values.devices.ascend.enabled }}{{ $keys = append $keys (printf "huawei.com/%s" .) }}{{ end }}{{ end }}{{ end -}}
{{- range $config.iluvatars | default list }}{{ with .commonWord }}{{ $families = append $families . }}{{ end }}{{ end -}}
{{- range $families }}{{ $keys = concat $keys (list (printf "hami.io/%s-devices-allocated" .) (printf "hami.io/%s-devices-to-allocate" .)) }}{{ end -}}
{{- range $config.profiles | default list }}{{ $keys = concat $keys (list (.allocatedAnnotation | default (printf "hami.io/%s-devices-allocated" .commonWord)) (.toAllocateAnnotation | default (printf "hami.io/%s-devices-to-allocate" .commonWord))) }}{{ end -}}
{{- $keys = concat $keys (list "CAMBRICON_DSMLU_ASSIGNED" "CAMBRICON_DSMLU_ASSIGHED" "CAMBRICON_DSMLU_PROFILE" "mthreads.com/gpu-index" "mthreads.com/predicate-node" "mthreads.com/predicate-time" "metax-tech.com/gpu-devices-allocated" "metax-tech.com/predicate-time" "enflame.com/gcu-assigned" "enflame.com/gcu-assigned-time" "enflame.com/gcu-assigned-index" "enflame.com/gcu-assigned-id" "enflame.com/gcu-assigned-minor" "enflame.com/gcu-request-size" "assigned-containers" "BAIDU_COM_DEVICE_IDX" "iluvatar.ai/gpu-assigned" "iluvatar.ai/predicate-time" "AWS_NEURON_IDS" "NEURON_ALLOC_TIME" "NEURON_ALLOCATED" "aws.amazon.com/predicate-node" "NEURON_RESOURCE_TYPE" "predicate-time") -}}
{{- range $keys | uniq | sortAlpha }}
- {{ . }}
{{- end }}
{{- end -}}
