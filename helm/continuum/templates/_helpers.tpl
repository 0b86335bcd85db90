{{/* Names and labels. Every object of a release is found by app.kubernetes.io/instance; Ray pods and what selects them carry
app.kubernetes.io/component too. KubeRay generates the names of clusters and pods, so nothing here selects by name. */}}

{{- define "continuum.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* A RayService name may have 47 characters: KubeRay appends to it to name clusters and services. */}}
{{- define "continuum.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name (include "continuum.name" .)) (contains (include "continuum.name" .) .Release.Name) -}}
{{- end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "continuum.serveService" -}}
{{- include "continuum.fullname" . }}-serve-svc
{{- end -}}

{{- define "continuum.redisName" -}}
{{- include "continuum.fullname" . }}-redis
{{- end -}}

{{- define "continuum.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: continuum
{{- end -}}

{{- define "continuum.labels" -}}
{{ include "continuum.selectorLabels" . }}
app.kubernetes.io/name: {{ include "continuum.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The Ray pods of this release, old and new cluster alike during an upgrade. */}}
{{- define "continuum.raySelector" -}}
matchLabels:
  {{- include "continuum.selectorLabels" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, engine, tools]}
{{- end -}}

{{- define "continuum.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.override | default dict) -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}

{{/* Head pods and the others have their own account: KubeRay gives the head's account the right to change pods when
autoscaling is on, and no pod that runs tools may have it. */}}
{{- define "continuum.headServiceAccount" -}}
{{- .Values.serviceAccount.headName | default (printf "%s-head" (include "continuum.fullname" .)) -}}
{{- end -}}

{{- define "continuum.workerServiceAccount" -}}
{{- .Values.serviceAccount.workerName | default (printf "%s-worker" (include "continuum.fullname" .)) -}}
{{- end -}}

{{/* --- the store --- */}}

{{- define "continuum.redisHost" -}}
{{- if .Values.redis.enabled -}}
{{ include "continuum.redisName" . }}.{{ .Release.Namespace }}.svc
{{- else -}}
{{ required "externalRedis.host: give the address of a Redis server, or set redis.enabled=true" .Values.externalRedis.host }}
{{- end -}}
{{- end -}}

{{- define "continuum.redisPort" -}}
{{- if .Values.redis.enabled -}}6379{{- else -}}{{ .Values.externalRedis.port }}{{- end -}}
{{- end -}}

{{/* The Secret with the store's password, as YAML; empty where the store asks for none. */}}
{{- define "continuum.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{- if .Values.redis.auth.enabled -}}
name: {{ required "redis.auth.existingSecret: name a Secret with the store's password, or set redis.auth.enabled=false" .Values.redis.auth.existingSecret | quote }}
key: {{ .Values.redis.auth.key | quote }}
{{- end -}}
{{- else if .Values.externalRedis.existingSecret -}}
name: {{ .Values.externalRedis.existingSecret | quote }}
key: {{ .Values.externalRedis.key | quote }}
{{- end -}}
{{- end -}}

{{/* "true" where tools run in pods of their own (settings.tools.sandbox: kubernetes), and tool pods therefore call the API server. */}}
{{- define "continuum.claimsPods" -}}
{{- if eq (dig "tools" "sandbox" "" .Values.settings) "kubernetes" }}true{{ end -}}
{{- end -}}
