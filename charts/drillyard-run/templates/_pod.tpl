{{- define "run.podTemplate" -}}
metadata:
  labels:
    {{- include "run.labels" . | nindent 4 }}
  {{- if or (ne .Values.topology.mode "none") .Values.bucket.name }}
  annotations:
    {{- if ne .Values.topology.mode "none" }}
    kueue.x-k8s.io/podset-{{ .Values.topology.mode }}-topology: {{ .Values.topology.level | quote }}
    {{- end }}
    {{- if .Values.bucket.name }}
    gke-gcsfuse/volumes: "true"
    {{- end }}
  {{- end }}
spec:
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
  tolerations:
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: {{ int .Values.lostNodeSeconds }}}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: {{ int .Values.lostNodeSeconds }}}
  securityContext:
    seccompProfile: {type: RuntimeDefault}
    {{- if gt (int .Values.securityContext.runAsUser) 0 }}
    runAsNonRoot: true
    runAsUser: {{ int .Values.securityContext.runAsUser }}
    {{- end }}
    {{- if gt (int .Values.securityContext.fsGroup) 0 }}
    fsGroup: {{ int .Values.securityContext.fsGroup }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  containers:
  - name: train
    image: {{ .Values.image | quote }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
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
    {{- range $name, $value := .Values.environment }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
    {{- range $name, $from := .Values.secrets }}
    - name: {{ $name }}
      valueFrom: {secretKeyRef: {name: {{ $from.secret | quote }}, key: {{ $from.key | quote }}}}
    {{- end }}
    {{- with .Values.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
    terminationMessagePath: /dev/termination-log
    volumeMounts:
    - {name: files, mountPath: /etc/drillyard, readOnly: true}
    - {name: shared-memory, mountPath: /dev/shm}
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
        mountOptions: {{ .mountOptions | quote }}
  {{- end }}
  {{- end }}
{{- end }}
