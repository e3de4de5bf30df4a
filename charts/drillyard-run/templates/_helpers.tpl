{{- define "run.labels" -}}
app.kubernetes.io/name: drillyard-run
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- range $name, $value := .Values.labels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "run.queueLabels" -}}
{{- with .Values.queue }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- with .Values.kueuePriorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- if gt (int .Values.maxRunSeconds) 0 }}
kueue.x-k8s.io/max-exec-time-seconds: {{ int .Values.maxRunSeconds | quote }}
{{- end }}
{{- end }}

{{- define "run.annotations" -}}
{{- range $name, $value := .Values.annotations }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- if gt (int .Values.provisioning.maxRunSeconds) 0 }}
provreq.kueue.x-k8s.io/maxRunDurationSeconds: {{ int .Values.provisioning.maxRunSeconds | quote }}
{{- end }}
{{- end }}

{{- define "run.fileData" -}}
start.sh: {{ .Files.Get "files/start.sh" | quote }}
{{- with .Values.networkScript }}
network.sh: {{ . | quote }}
{{- end }}
{{- range $number, $path := keys .Values.files | sortAlpha }}
file-{{ $number }}: {{ (index $.Values.files $path).content | quote }}
{{- end }}
{{- end }}

{{- define "run.configMap" -}}
{{ .Release.Name }}-{{ include "run.fileData" . | sha256sum | trunc 10 }}
{{- end }}

{{- define "run.jobSpec" -}}
backoffLimit: 0
podReplacementPolicy: Failed
completionMode: Indexed
parallelism: {{ int .Values.nodes }}
completions: {{ int .Values.nodes }}
{{- if and (eq .Values.controller "job") (gt (int .Values.maxRunSeconds) 0) (not .Values.queue) }}
activeDeadlineSeconds: {{ int .Values.maxRunSeconds }}
{{- end }}
podFailurePolicy:
  rules:
  - action: FailJob
    onPodConditions: [{type: DisruptionTarget, status: "True"}]
  - action: FailJob
    onExitCodes: {containerName: train, operator: In, values: [85]}
  - action: FailJob
    onExitCodes: {containerName: train, operator: In, values: [2]}
  - action: FailJob
    onExitCodes: {containerName: train, operator: In, values: [126, 127]}
template:
{{ include "run.podTemplate" . | indent 2 }}
{{- end }}

{{- /* Annotations of the pod template. Kueue reads those of provisioning on the JobSet alone. */ -}}
{{- define "run.podAnnotations" -}}
{{- if ne .Values.topology.mode "none" }}
kueue.x-k8s.io/podset-{{ .Values.topology.mode }}-topology: {{ .Values.topology.level | quote }}
{{- end }}
{{- if .Values.bucket.name }}
gke-gcsfuse/volumes: "true"
{{- range $name, $limit := .Values.bucket.sidecarLimits }}
gke-gcsfuse/{{ $name }}-limit: {{ $limit | quote }}
{{- end }}
{{- end }}
{{- with .Values.network.interfaces }}
networking.gke.io/default-interface: {{ (first .).interfaceName | quote }}
networking.gke.io/interfaces: {{ . | toJson | quote }}
{{- end }}
{{- with .Values.network.sidecar }}
{{- if .devices }}
devices.gke.io/container.{{ .name }}: |
  {{- range .devices }}
  - path: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Not empty where the pods use their node beyond what the Pod Security level restricted allows. */ -}}
{{- define "run.hostAccess" -}}
{{- if or .Values.hostPaths .Values.capabilities .Values.privileged .Values.network.hostNetwork .Values.network.sidecar }}true{{ end }}
{{- end }}

{{- /* Options of Cloud Storage FUSE: files belong to the pods' user and group, who could not write them else. */ -}}
{{- define "run.mountOptions" -}}
{{- $user := int .Values.securityContext.runAsUser }}
{{- $group := int .Values.securityContext.fsGroup }}
{{- $own := list }}
{{- if gt $user 0 }}
{{- $own = concat $own (list (printf "uid=%d" $user) (printf "gid=%d" (default $user $group))) }}
{{- else if gt $group 0 }}
{{- $own = append $own (printf "gid=%d" $group) }}
{{- end }}
{{- if gt $group 0 }}
{{- $own = concat $own (list "file-mode=664" "dir-mode=775") }}
{{- end }}
{{- $given := splitList "," .Values.bucket.mountOptions | compact }}
{{- $names := list }}
{{- range $given }}
{{- $names = append $names (regexFind "^[^=:]+" .) }}
{{- end }}
{{- range $own }}
{{- if not (has (regexFind "^[^=:]+" .) $names) }}
{{- $given = append $given . }}
{{- end }}
{{- end }}
{{- join "," $given }}
{{- end }}

{{- /* The pods' claims on devices. */ -}}
{{- define "run.claims" -}}
{{- if .Values.network.deviceClaim }}
- {name: network, resourceClaimTemplateName: {{ .Release.Name }}-network}
{{- end }}
{{- if .Values.network.computeDomainNodes }}
- {name: compute-domain, resourceClaimTemplateName: {{ .Release.Name }}-compute-domain}
{{- end }}
{{- end }}

{{- define "run.podSecurity" -}}
{{- if not (include "run.hostAccess" .) }}
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- if gt (int .Values.securityContext.runAsUser) 0 }}
runAsNonRoot: true
runAsUser: {{ int .Values.securityContext.runAsUser }}
{{- end }}
{{- if gt (int .Values.securityContext.fsGroup) 0 }}
fsGroup: {{ int .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end }}

{{- /* Of the run's container. */ -}}
{{- define "run.security" -}}
{{- if .Values.privileged }}
privileged: true
{{- else if not (include "run.hostAccess" .) }}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- else if .Values.capabilities }}
capabilities: {add: {{ .Values.capabilities | toJson }}}
{{- end }}
{{- end }}
