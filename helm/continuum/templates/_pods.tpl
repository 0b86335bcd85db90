{{/* The pod template that head, engine and tool groups share. Called with
    root       the chart's own context
    component  head | engine | tools: the value of app.kubernetes.io/component
    group      the group's values, defaults merged in
    account    ServiceAccount name
    apiToken   whether the pod may talk to the API server (the head when the autoscaler needs it, tool pods that claim pods)

Every group runs as a plain user with a read-only root, no capability and no way to gain one. Only tool pods differ, and only as
far as sandboxes need it: see continuum.podSecurity. */}}
{{- define "continuum.podTemplate" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $cpu := printf "%v" $group.resources.cpu -}}
metadata:
  labels:
    {{- include "continuum.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with mergeOverwrite (deepCopy $root.Values.commonLabels) $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: {{ .apiToken }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $group.terminationGracePeriodSeconds }}
  {{- include "continuum.podSecurity" . | trim | nindent 2 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "continuum.image" (dict "root" $root "override" $group.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- include "continuum.containerSecurity" . | nindent 6 }}
      env:
        {{- include "continuum.env" . | trim | nindent 8 }}
      ports:
        {{- if eq .component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: 8000}
      {{- include "continuum.probes" . | nindent 6 }}
      resources:
        {{- range $kind := list "requests" "limits" }}
        {{ $kind }}:
          cpu: {{ $cpu | quote }}
          memory: {{ $group.resources.memory }}
          {{- with $group.resources.ephemeralStorage }}
          ephemeral-storage: {{ . }}
          {{- end }}
          {{- with $group.gpus }}
          {{ $group.gpuResource }}: {{ . | quote }}
          {{- end }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/ray}
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: /models}
        {{- with $group.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ $group.scratchSize }}
    - name: home
      emptyDir:
        sizeLimit: {{ $group.scratchSize }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $group.shmSize }}
    - name: models
      {{- if and (eq .component "engine") $root.Values.modelCache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ $root.Values.modelCache.existingClaim }}
      {{- else if and (eq .component "engine") $root.Values.modelCache.hostPath }}
      hostPath:
        path: {{ $root.Values.modelCache.hostPath }}
        type: Directory
      {{- else }}
      emptyDir:
        sizeLimit: {{ ternary $root.Values.modelCache.size "1Gi" (eq .component "engine") }}
      {{- end }}
    {{- with $group.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Tool pods build sandboxes with bubblewrap: they need to make user namespaces, mount inside them, and (unless
`procMount` stays Default) see a /proc without masks. `hostUsers: false` maps the pod itself into a user namespace, so none of that
is a right over the node. All other pods get the runtime's default profile. */}}
{{- define "continuum.podSecurity" -}}
{{- $sandbox := .root.Values.toolWorkers.sandbox -}}
{{- if and (eq .component "tools") $sandbox.userNamespace }}
hostUsers: false
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "continuum.containerSecurity" -}}
{{- $sandbox := .root.Values.toolWorkers.sandbox -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
  {{- if eq .component "tools" }}
  {{- if ne $sandbox.procMount "Default" }}
  procMount: {{ $sandbox.procMount }}
  {{- end }}
  seccompProfile:
    {{- toYaml $sandbox.seccompProfile | nindent 4 }}
  {{- with $sandbox.appArmorProfile }}
  appArmorProfile:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Ray wants the same environment on every node. Secrets come by reference and reach only the pods that use them. */}}
{{- define "continuum.env" -}}
{{- $values := .root.Values -}}
# Always explicit: Ray's default depends on its version.
- {name: RAY_AUTH_MODE, value: {{ $values.ray.authMode | quote }}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: DO_NOT_TRACK, value: "1"}
- {name: HOME, value: /home/ray}
- {name: HF_HOME, value: /models/huggingface}
- {name: CONTINUUM_CACHE, value: /models/continuum}
{{- if $values.modelCache.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if $values.serve.haProxy }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
{{- end }}
{{- with include "continuum.redisSecret" .root }}
# settings.store.redis_url names it.
- name: CONTINUUM_STORE_PASSWORD
  valueFrom:
    secretKeyRef:
      {{- . | nindent 6 }}
{{- end }}
{{- if and $values.huggingFace.existingSecret (eq .component "engine") }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $values.huggingFace.existingSecret }}
      key: {{ $values.huggingFace.key }}
{{- end }}
{{- with mergeOverwrite (deepCopy $values.ray.env) .group.env }}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- with $values.ray.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* KubeRay would inject probes that call wget; these need nothing in the image. The node's agent answers for the raylet (and on
the head for GCS). A worker is ready when its Serve proxy is: that proxy starts with the node's first Serve replica. */}}
{{- define "continuum.probes" -}}
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 30
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .root.Values.ray.livenessFailureThreshold }}
readinessProbe:
  {{- if eq .component "head" }}
  httpGet: {path: /api/healthz, port: 52365}
  {{- else }}
  httpGet: {path: /-/healthz, port: 8000}
  {{- end }}
  initialDelaySeconds: 10
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ternary 10 2 (eq .component "head") }}
{{- end -}}
