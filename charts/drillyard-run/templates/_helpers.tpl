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
