{{- define "run.podTemplate" -}}
metadata:
  labels:
    {{- include "run.labels" . | nindent 4 }}
  {{- with include "run.podAnnotations" . | trim }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  {{- if .Values.network.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  restartPolicy: Never
  automountServiceAccountToken: {{ ne .Values.bucket.name "" }}
  terminationGracePeriodSeconds: {{ int .Values.gracePeriodSeconds }}
  {{- if eq .Values.controller "job" }}
  subdomain: {{ .Release.Name }}
  {{- end }}
  {{- with .Values.priorityClass }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.serviceAccount }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.excludeNodes }}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchFields:
          {{- range . }}
          - {key: metadata.name, operator: NotIn, values: [{{ . | quote }}]}
          {{- end }}
  {{- end }}
  tolerations:
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: {{ int .Values.lostNodeSeconds }}}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: {{ int .Values.lostNodeSeconds }}}
  {{- with include "run.podSecurity" . | trim }}
  securityContext:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .Values.network.sidecar }}
  initContainers:
  - name: {{ .name }}
    image: {{ .image | quote }}
    restartPolicy: Always
    command: {{ .command | toJson }}
    {{- with .environment }}
    env:
    {{- range $name, $value := . }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
    {{- end }}
    {{- with .resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      capabilities: {add: {{ .capabilities | toJson }}}
    {{- with .hostPaths }}
    volumeMounts:
    {{- range . }}
    - {name: {{ .name }}, mountPath: {{ .mountPath | quote }}}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- $claims := include "run.claims" . | trim }}
  {{- with $claims }}
  resourceClaims:
  {{- . | nindent 2 }}
  {{- end }}
  containers:
  - name: train
    image: {{ .Values.image | quote }}
    {{- with .Values.imagePullPolicy }}
    imagePullPolicy: {{ . }}
    {{- end }}
    command: ["/bin/sh", "/etc/drillyard/start.sh"]
    args: {{ .Values.command | toJson }}
    {{- with .Values.workingDir }}
    workingDir: {{ . | quote }}
    {{- end }}
    env:
    - {name: NNODES, value: {{ int .Values.nodes | quote }}}
    - {name: NPROC_PER_NODE, value: {{ int .Values.processesPerNode | quote }}}
    - name: NODE_RANK
      valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    {{- if eq .Values.controller "jobset" }}
    - {name: MASTER_ADDR, value: {{ printf "%s-w-0-0.%s" .Release.Name .Release.Name | quote }}}
    - name: DRILLYARD_SUBMISSION
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}}
    - name: DRILLYARD_LAUNCH_ROUND
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    - {name: DRILLYARD_RESTARTED_BY, value: jobset}
    {{- else }}
    - {name: MASTER_ADDR, value: {{ printf "%s-0.%s" .Release.Name .Release.Name | quote }}}
    - name: DRILLYARD_SUBMISSION
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    - {name: DRILLYARD_LAUNCH_ROUND, value: "0"}
    {{- end }}
    - {name: MASTER_PORT, value: {{ int .Values.masterPort | quote }}}
    - {name: DRILLYARD_EXIT_RECORD, value: /dev/termination-log}
    - {name: DRILLYARD_STOP_SECONDS, value: {{ int .Values.gracePeriodSeconds | quote }}}
    {{- range $name, $value := .Values.environment }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
    {{- range $name, $from := .Values.secrets }}
    - name: {{ $name }}
      valueFrom: {secretKeyRef: {name: {{ $from.secret | quote }}, key: {{ $from.key | quote }}}}
    {{- end }}
    {{- if or .Values.resources $claims }}
    resources:
      {{- with .Values.resources }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- if $claims }}
      claims:
      {{- range fromYamlArray $claims }}
      - {name: {{ .name }}}
      {{- end }}
      {{- end }}
    {{- end }}
    {{- with include "run.security" . | trim }}
    securityContext:
      {{- . | nindent 6 }}
    {{- end }}
    terminationMessagePath: /dev/termination-log
    terminationMessagePolicy: FallbackToLogsOnError
    volumeMounts:
    - {name: files, mountPath: /etc/drillyard, readOnly: true}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- range .Values.hostPaths }}
    - {name: {{ .name }}, mountPath: {{ .mountPath | quote }}, readOnly: {{ .readOnly }}}
    {{- end }}
    {{- with .Values.volumeClaim }}
    {{- if .name }}
    - {name: storage, mountPath: {{ .mountPath | quote }}}
    {{- end }}
    {{- end }}
    {{- with .Values.bucket }}
    {{- if .name }}
    - {name: bucket, mountPath: {{ .mountPath | quote }}}
    {{- end }}
    {{- end }}
  volumes:
  - name: files
    configMap:
      name: {{ include "run.configMap" . }}
      items:
      - {key: start.sh, path: start.sh}
      {{- if .Values.networkScript }}
      - {key: network.sh, path: network.sh}
      {{- end }}
      {{- range $number, $path := keys .Values.files | sortAlpha }}
      - {key: file-{{ $number }}, path: {{ $path | quote }}, mode: {{ int (index $.Values.files $path).mode }}}
      {{- end }}
  - name: shared-memory
    emptyDir:
      medium: Memory
      {{- with .Values.sharedMemory }}
      sizeLimit: {{ . | quote }}
      {{- end }}
  {{- $paths := dict }}
  {{- range concat .Values.hostPaths (dig "hostPaths" list .Values.network.sidecar) }}
  {{- $_ := set $paths .name .hostPath }}
  {{- end }}
  {{- range $name, $path := $paths }}
  - {name: {{ $name }}, hostPath: {path: {{ $path | quote }}}}
  {{- end }}
  {{- with .Values.volumeClaim }}
  {{- if .name }}
  - {name: storage, persistentVolumeClaim: {claimName: {{ .name | quote }}}}
  {{- end }}
  {{- end }}
  {{- with .Values.bucket }}
  {{- if .name }}
  - name: bucket
    csi:
      driver: gcsfuse.csi.storage.gke.io
      volumeAttributes:
        bucketName: {{ .name | quote }}
        mountOptions: {{ include "run.mountOptions" $ | quote }}
        {{- if $.Values.network.hostNetwork }}
        hostNetworkPodKSA: "true"
        {{- end }}
  {{- end }}
  {{- end }}
{{- end }}
