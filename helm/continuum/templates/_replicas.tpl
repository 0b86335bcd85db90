{{/* Bounds that are not given are the number of replicas; zero is a bound like any other. */}}
{{- define "continuum.minReplicas" -}}
{{- ternary .replicas .minReplicas (kindIs "invalid" .minReplicas) -}}
{{- end -}}

{{- define "continuum.maxReplicas" -}}
{{- ternary .replicas .maxReplicas (kindIs "invalid" .maxReplicas) -}}
{{- end -}}

{{- define "continuum.replicas" -}}
replicas: {{ .replicas }}
minReplicas: {{ include "continuum.minReplicas" . }}
maxReplicas: {{ include "continuum.maxReplicas" . }}
{{- end -}}
