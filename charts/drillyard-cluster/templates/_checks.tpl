{{- /* What values.schema.json cannot say: values that contradict each other or the cluster. */ -}}
{{- define "cluster.checks" -}}
{{- $queues := dict }}
{{- $pools := dict }}
{{- range .Values.pools }}
{{- if hasKey $pools .name }}
{{- fail (printf "pools: two are called %s; give each a name of its own" .name) }}
{{- end }}
{{- $_ := set $pools .name true }}
{{- if hasKey $queues .queue }}
{{- fail (printf "pools: %s and %s have the same queue, %s; a queue has one pool" (get $queues .queue) .name .queue) }}
{{- end }}
{{- $_ := set $queues .queue .name }}
{{- if and .topologyLevels (not .nodeLabels) }}
{{- fail (printf "pools: %s has topologyLevels and no nodeLabels; Kueue needs a label of its nodes" .name) }}
{{- end }}
{{- if and .provisioningClass (not (or ($.Capabilities.APIVersions.Has "autoscaling.x-k8s.io/v1/ProvisioningRequest") ($.Capabilities.APIVersions.Has "autoscaling.x-k8s.io/v1beta1/ProvisioningRequest"))) }}
{{- fail (printf "pools: %s has a provisioningClass, and this cluster has no ProvisioningRequest (autoscaling.x-k8s.io), by which nodes are made on request; leave it empty" .name) }}
{{- end }}
{{- end }}
{{- if and .Values.networks (not (and (.Capabilities.APIVersions.Has "networking.gke.io/v1/Network") (.Capabilities.APIVersions.Has "networking.gke.io/v1/GKENetworkParamSet"))) }}
{{- fail "networks: this cluster has no Network and GKENetworkParamSet (networking.gke.io/v1): make it with --enable-multi-networking and Dataplane V2, or leave networks empty" }}
{{- end }}
{{- $seen := dict }}
{{- range .Values.networks }}
{{- $place := printf "%s/%s" .vpc .subnet }}
{{- if hasKey $seen $place }}
{{- fail (printf "networks: %s and %s are both subnet %s; each interface has its own" (get $seen $place) .name $place) }}
{{- end }}
{{- $_ := set $seen $place .name }}
{{- end }}
{{- $installed := dict }}
{{- range .Values.installers }}
{{- $name := include "cluster.installerName" . }}
{{- if hasKey $installed $name }}
{{- fail (printf "installers: %s for %s is listed twice; write all accelerators into one" .stack (.architecture | default "amd64")) }}
{{- end }}
{{- $_ := set $installed $name true }}
{{- if and (ne .stack "gib") (not $.Values.deviceInjector.image) }}
{{- fail (printf "installers: the daemon of %s gets its GPUs from the device injector; set deviceInjector.image" .stack) }}
{{- end }}
{{- end }}
{{- if and .Values.deviceInjector.image (not .Values.deviceInjector.accelerators) }}
{{- fail "deviceInjector.accelerators: missing; list the accelerators of its nodes" }}
{{- end }}
{{- range .Values.users }}
{{- if and (eq .kind "ServiceAccount") (not .namespace) }}
{{- fail (printf "users: %s is a ServiceAccount; name its namespace" .name) }}
{{- end }}
{{- end }}
{{- end }}
