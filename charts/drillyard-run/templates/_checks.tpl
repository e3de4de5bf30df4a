{{- /* What values.schema.json cannot say: values that contradict each other. */ -}}
{{- define "run.checks" -}}
{{- $_ := required "image: missing; name the run's image" .Values.image }}
{{- if not .Values.command }}
{{- fail "command: missing; list the program and its arguments" }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the release's name, %s, becomes host names: lower-case letters, digits and '-', beginning with a letter" .Release.Name) }}
{{- end }}
{{- $longest := sub 63 (len (printf "-w-0-%d-xxxxx" (sub (int .Values.nodes) 1))) }}
{{- if gt (len .Release.Name) (int $longest) }}
{{- fail (printf "the release's name, %s, has more than %d characters: its pods' names would be too long" .Release.Name $longest) }}
{{- end }}
{{- if and .Values.volumeClaim.name .Values.bucket.name }}
{{- fail "volumeClaim and bucket are both given; keep one of them" }}
{{- end }}
{{- if not .Values.queue }}
{{- $isJob := eq .Values.controller "job" }}
{{- $needed := dict "topology.mode" (ne .Values.topology.mode "none") "kueuePriorityClass" .Values.kueuePriorityClass "provisioning.maxRunSeconds" .Values.provisioning.maxRunSeconds "maxRunSeconds" (and .Values.maxRunSeconds (not $isJob)) }}
{{- range $name, $given := $needed }}
{{- if $given }}
{{- fail (printf "%s: only Kueue uses it; name the queue, or remove it" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key := list "environment" "secrets" }}
{{- range $name, $value := get $.Values $key }}
{{- if has $name (include "run.ownVariables" $ | splitList " ") }}
{{- fail (printf "%s: %s is set by the chart for each pod; remove it" $key $name) }}
{{- end }}
{{- if and (eq $key "secrets") (hasKey $.Values.environment $name) }}
{{- fail (printf "%s is in environment and in secrets; keep one of them" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.labels }}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|managed-by)|(.*\\.)?(kueue\\.x-k8s\\.io|jobset\\.sigs\\.k8s\\.io|batch\\.kubernetes\\.io)/.*)$" $name }}
{{- fail (printf "labels: %s is set by the chart or by the run's controllers; remove it" $name) }}
{{- end }}
{{- end }}
{{- if hasKey .Values.annotations "provreq.kueue.x-k8s.io/maxRunDurationSeconds" }}
{{- fail "annotations: provreq.kueue.x-k8s.io/maxRunDurationSeconds is set by the chart; write provisioning.maxRunSeconds" }}
{{- end }}
{{- range $key := list "interfaceName" "network" }}
{{- $seen := dict }}
{{- range $.Values.network.interfaces }}
{{- $value := get . $key }}
{{- if hasKey $seen $value }}
{{- fail (printf "network.interfaces: %s %s is listed twice" $key $value) }}
{{- end }}
{{- $_ := set $seen $value true }}
{{- end }}
{{- end }}
{{- $paths := dict }}
{{- range concat .Values.hostPaths (dig "hostPaths" list .Values.network.sidecar) }}
{{- if has .name (list "files" "shared-memory" "storage" "bucket") }}
{{- fail (printf "hostPaths: %s is the name of a volume of the chart; take another name" .name) }}
{{- end }}
{{- if ne (get $paths .name | default .hostPath) .hostPath }}
{{- fail (printf "hostPaths: %s is both %s and %s" .name (get $paths .name) .hostPath) }}
{{- end }}
{{- $_ := set $paths .name .hostPath }}
{{- end }}
{{- if eq (dig "name" "" .Values.network.sidecar) "train" }}
{{- fail "network.sidecar.name: train is the run's own container; take another name" }}
{{- end }}
{{- include "run.mountChecks" . }}
{{- end }}

{{- /* Variables that the pod template sets. */ -}}
{{- define "run.ownVariables" -}}
NNODES NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT DRILLYARD_SUBMISSION DRILLYARD_LAUNCH_ROUND DRILLYARD_RESTARTED_BY DRILLYARD_EXIT_RECORD DRILLYARD_STOP_SECONDS
{{- end }}

{{- /* No mount may hide another one, nor a file that the pods need. */ -}}
{{- define "run.mountChecks" -}}
{{- $storage := list }}
{{- range list .Values.volumeClaim .Values.bucket }}
{{- if .name }}
{{- $storage = append $storage (clean .mountPath) }}
{{- end }}
{{- end }}
{{- $mounted := $storage }}
{{- range .Values.hostPaths }}
{{- $path := clean .mountPath }}
{{- if has $path $mounted }}
{{- fail (printf "hostPaths: %s is mounted twice; mount %s elsewhere" $path .hostPath) }}
{{- end }}
{{- range $storage }}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" $path)) . }}
{{- fail (printf "hostPaths: %s would be mounted over %s, the run's storage; mount it elsewhere" $path .) }}
{{- end }}
{{- end }}
{{- $mounted = append $mounted $path }}
{{- end }}
{{- range $path := $mounted }}
{{- range $own := list "/etc/drillyard" "/dev/shm" "/dev/termination-log" }}
{{- $inside := hasPrefix (printf "%s/" $own) (printf "%s/" $path) }}
{{- $above := hasPrefix (printf "%s/" (trimSuffix "/" $path)) (printf "%s/" $own) }}
{{- if or $inside $above }}
{{- fail (printf "%s would be mounted over %s, which the chart mounts; mount it elsewhere" $path $own) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
