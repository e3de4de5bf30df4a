{{- define "cluster.labels" -}}
app.kubernetes.io/name: drillyard-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The version of Kueue's objects that this cluster has: v1beta2 since 0.15, v1beta1 before. */ -}}
{{- define "cluster.kueue" -}}
{{- if .Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2/Topology" -}}
kueue.x-k8s.io/v1beta2
{{- else if .Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1/Topology" -}}
kueue.x-k8s.io/v1beta1
{{- else if .Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1" -}}
{{- fail "pools: this cluster's Kueue is older than 0.14: it has no Topology of kueue.x-k8s.io/v1beta1; install Kueue 0.14 or later" }}
{{- else -}}
{{- fail "pools: this cluster has no Kueue (kueue.x-k8s.io): helm install kueue oci://registry.k8s.io/kueue/charts/kueue --namespace kueue-system --create-namespace, or leave pools empty" }}
{{- end }}
{{- end }}

{{- /* A DaemonSet's part that all of ours share. Argument: name, accelerators, architecture. */ -}}
{{- define "cluster.nodePod" -}}
priorityClassName: system-node-critical
hostNetwork: true
hostPID: true
tolerations:
- operator: Exists
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions:
        - {key: cloud.google.com/gke-accelerator, operator: In, values: {{ .accelerators | toJson }}}
        {{- with .architecture }}
        - {key: kubernetes.io/arch, operator: In, values: [{{ . }}]}
        {{- end }}
{{- end }}

{{- /* The installer's name: Google's, so that a cluster with both is refused. */ -}}
{{- define "cluster.installerName" -}}
{{- $name := get (dict "tcpx" "nccl-tcpx-installer" "tcpxo" "nccl-tcpxo-installer" "gib" "nccl-rdma-installer") .stack -}}
{{- if eq (.architecture | default "amd64") "arm64" }}{{ $name }}-arm64{{ else }}{{ $name }}{{ end }}
{{- end }}
