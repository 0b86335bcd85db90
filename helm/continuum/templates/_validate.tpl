{{/* What a schema cannot say: values that do not fit each other. Each message names the values to change. */}}
{{- define "continuum.validate" -}}
{{- $root := . -}}
{{- $settings := .Values.settings -}}
{{- if and .Values.redis.enabled .Values.externalRedis.host -}}
{{- fail "externalRedis.host is set while redis.enabled is true: choose one store" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.apiServer) -}}
{{- /* An empty list of peers would mean everywhere. */ -}}
{{- fail "networkPolicy.apiServer: the autoscaler needs the API server; say where its endpoints are" -}}
{{- end -}}
{{- if include "continuum.claimsPods" . -}}
{{- if not (dig "tools" "kubernetes" "namespace" "" $settings) -}}
{{- fail "settings.tools.kubernetes: sandbox kubernetes needs a namespace and a warm_pool" -}}
{{- end -}}
{{- if eq $settings.tools.kubernetes.namespace .Release.Namespace -}}
{{- fail "settings.tools.kubernetes.namespace: sandboxes get a namespace of their own; in this one the platform could run commands in its own pods" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.apiServer) -}}
{{- fail "networkPolicy.apiServer: tool pods claim their sandboxes at the API server; say where its endpoints are" -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) .Values.networkPolicy.enabled (not .Values.externalRedis.networkPeers) -}}
{{- fail "externalRedis.networkPeers: with networkPolicy, say where the store is found" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway" -}}
{{- end -}}
{{- if and .Values.modelCache.existingClaim .Values.modelCache.hostPath -}}
{{- fail "modelCache: name a claim or a hostPath, not both" -}}
{{- end -}}

{{- $device := dig "engine" "device" "cpu" $settings -}}
{{- $tensorParallel := dig "engine" "tensor_parallel_size" 1 $settings | int -}}
{{- $engines := dig "replicas" "engine" 1 $settings | int -}}
{{- $slots := 0 -}}
{{- $gpus := 0 -}}
{{- $largest := 0 -}}
{{- $names := list -}}
{{- range .Values.engineWorkers -}}
{{- $group := mergeOverwrite (deepCopy $root.Values.engineWorkerDefaults) (deepCopy .) -}}
{{- if has $group.name $names }}{{ fail (printf "engineWorkers: two groups are named %s" $group.name) }}{{ end -}}
{{- $names = append $names $group.name -}}
{{- if not (and (le (include "continuum.minReplicas" $group | int) (int $group.replicas)) (le (int $group.replicas) (include "continuum.maxReplicas" $group | int))) }}{{ fail (printf "engineWorkers %s: minReplicas <= replicas <= maxReplicas" $group.name) }}{{ end -}}
{{- $pods := int (ternary (include "continuum.maxReplicas" $group) (toString $group.replicas) $root.Values.autoscaling.enabled) -}}
{{- $gpus = add $gpus (mul $pods (int $group.gpus)) -}}
{{- $slots = add $slots (mul $pods (div (int $group.gpus) $tensorParallel)) -}}
{{- $largest = max $largest (int $group.gpus) -}}
{{- end -}}
{{- if and (eq $device "cpu") (gt $gpus 0) -}}
{{- fail (printf "settings.engine.device is cpu, but engineWorkers ask for %d GPUs: set settings.engine.device=gpu" (int $gpus)) -}}
{{- end -}}
{{- if eq $device "gpu" -}}
{{- if gt $tensorParallel $largest -}}
{{- fail (printf "settings.engine.tensor_parallel_size is %d, but no engine pod has more than %d GPUs: raise engineWorkers[].gpus" $tensorParallel $largest) -}}
{{- end -}}
{{- if gt $engines (int $slots) -}}
{{- fail (printf "settings.replicas.engine=%d with tensor_parallel_size=%d does not fit: engineWorkers have room for %d engines" $engines $tensorParallel (int $slots)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
