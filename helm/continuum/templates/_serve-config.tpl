{{/* What the operator set, completed by what only the chart knows: where the store is, and one tool actor for each tool pod.
Returns YAML. */}}
{{- define "continuum.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $user := "" -}}
{{- if not .Values.redis.enabled }}{{- $user = .Values.externalRedis.username -}}{{- end -}}
{{- $credentials := ternary (printf "%s:${CONTINUUM_STORE_PASSWORD}@" $user) "" (ne (include "continuum.redisSecret" .) "") -}}
{{- $scheme := ternary "rediss" "redis" (and (not .Values.redis.enabled) .Values.externalRedis.tls) -}}
{{- $database := ternary 0 .Values.externalRedis.database .Values.redis.enabled -}}
{{- $url := printf "%s://%s%s:%s/%v" $scheme $credentials (include "continuum.redisHost" .) (include "continuum.redisPort" .) $database -}}
{{- $_ := set $settings "store" (dict "redis_url" $url) -}}
{{- $replicas := $settings.replicas | default dict -}}
{{- if and .Values.toolWorkers.enabled (not (hasKey $replicas "tools")) -}}
{{- $replicas = merge (dict "tools" (int .Values.toolWorkers.replicas)) $replicas -}}
{{- $_ := set $settings "replicas" $replicas -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Tool actors go to the tool pods and nowhere else, evenly; engines without a GPU to hold them keep off the tool pods. Each asks
for a resource that only its own pods offer. The options of a deployment in a Serve config replace those of the code, so what the
settings ask for is said again. */}}
{{- define "continuum.deployments" -}}
{{- $settings := fromYaml (include "continuum.settings" .) -}}
{{- $deployments := deepCopy .Values.serve.deployments -}}
{{- if .Values.toolWorkers.enabled -}}
{{- $replicas := $settings.replicas -}}
{{- $perPod := divf $replicas.tools (max 1 (int .Values.toolWorkers.replicas)) | ceil | int -}}
{{- $actor := dict "num_cpus" (dig "service_cpus" 0.1 $replicas) "resources" (dict "continuum_tools" 1) -}}
{{- $tools := dict "ray_actor_options" $actor "max_replicas_per_node" $perPod -}}
{{- $_ := set $deployments "ToolActor" (mergeOverwrite $tools ($deployments.ToolActor | default dict)) -}}
{{- if eq (dig "engine" "device" "cpu" $settings) "cpu" -}}
{{- $actor := dict "num_cpus" (dig "engine_cpus" 0.5 $replicas) "resources" (dict "continuum_engine" 1) -}}
{{- with $replicas.engine_memory_gib }}{{ $_ := set $actor "memory" (mulf . 1073741824 | int64) }}{{ end -}}
{{- $_ := set $deployments "EngineReplica" (mergeOverwrite (dict "ray_actor_options" $actor) ($deployments.EngineReplica | default dict)) -}}
{{- end -}}
{{- end -}}
{{- range $name := keys $deployments | sortAlpha }}
- {{ merge (dict "name" $name) (get $deployments $name) | toYaml | nindent 2 | trim }}
{{- end -}}
{{- end -}}

{{- define "continuum.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  request_timeout_s: {{ .Values.serve.requestTimeoutSeconds }}
logging_config:
  encoding: JSON
applications:
  - name: continuum
    route_prefix: /
    import_path: deployments.app:build_app
    args:
      {{- include "continuum.settings" . | nindent 6 }}
    {{- with include "continuum.deployments" . | trim }}
    deployments:
      {{- . | nindent 6 }}
    {{- end }}
{{- end -}}
