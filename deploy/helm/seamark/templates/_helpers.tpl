{{/* Labels that select the pods of one part: list $ "gateway". */}}
{{- define "seamark.selector" -}}
app.kubernetes.io/name: seamark-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* Labels of an object: list $ "gateway". */}}
{{- define "seamark.labels" -}}
{{ include "seamark.selector" . }}
app.kubernetes.io/part-of: seamark
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* The part whose pods have a gateway. */}}
{{- define "seamark.front" -}}
{{ if eq .Values.mode "sidecar" }}worker{{ else }}gateway{{ end }}
{{- end }}

{{/* The gateway's port with /metrics, by its name. An endpoint picker looks for /metrics where it sends requests, so a sidecar
has no port of its own for pages; unless there are API keys, which that page would ask for, too. */}}
{{- define "seamark.pages" -}}
{{ if and (eq .Values.mode "sidecar") (not .Values.gateway.settings.api_keys) }}http{{ else }}pages{{ end }}
{{- end }}

{{/* One of Seamark's own images: list $ "gateway". */}}
{{- define "seamark.image" -}}
{{- $images := (index . 0).Values.images -}}
{{ with $images.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index $images (index . 1) }}{{ with $images.tag }}:{{ . }}{{ end }}
{{- end }}

{{/* The URL of each pod of a part, with commas: list $ "worker" replicas. */}}
{{- define "seamark.urls" -}}
{{- $release := (index . 0).Release.Name }}
{{- $part := index . 1 }}
{{- $urls := list }}
{{- range until (int (index . 2)) }}
{{- $urls = append $urls (printf "http://%s-%s-%d.%s-%s:8000" $release $part . $release $part) }}
{{- end }}
{{- join "," $urls }}
{{- end }}

{{/* What prometheus.io/scrape says of a port; nothing if the operator scrapes: list $ "8081". */}}
{{- define "seamark.scrape" -}}
{{- if not (index . 0).Values.serviceMonitor.enabled }}
annotations:
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ index . 1 | quote }}
{{- end }}
{{- end }}

{{/* The gateway's container, in either mode. Settings are a map, so that those of the user replace the chart's.
The limit of gateway.resources has room for these bodies beside tables of 256 MiB. */}}
{{- define "seamark.gateway" -}}
{{- $settings := dict "host" "0.0.0.0" "port" 8080 "max_bodies_bytes" 268435456 }}
{{- $pages := eq (include "seamark.pages" .) "pages" }}
{{- if $pages }}
{{- $_ := set $settings "admin_host" "0.0.0.0" }}
{{- $_ := set $settings "admin_port" 8081 }}
{{- end }}
{{- if eq .Values.mode "sidecar" }}
{{- $_ := set $settings "sidecar" true }}
{{- $_ := set $settings "worker" "http://127.0.0.1:8000" }}
{{- else }}
{{- if .Values.redis.url }}
{{- $_ := set $settings "redis" .Values.redis.url }}
{{- else if .Values.redis.enabled }}
{{- $_ := set $settings "redis" (printf "redis://%s-redis:6379/0" .Release.Name) }}
{{- end }}
{{- if and .Values.worker.enabled (eq .Values.gateway.discovery "dns") }}
{{- $_ := set $settings "workers_dns" (printf "%s-worker.%s.svc:8000" .Release.Name .Release.Namespace) }}
{{- else if .Values.worker.enabled }}
{{- $_ := set $settings "worker" (include "seamark.urls" (list . "worker" .Values.worker.replicas)) }}
{{- end }}
{{- if .Values.prefill.replicas }}
{{- $_ := set $settings "prefill_worker" (include "seamark.urls" (list . "prefill" .Values.prefill.replicas)) }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.gateway.settings }}
{{- $_ := set $settings $name $value }}
{{- end -}}
name: gateway
image: {{ include "seamark.image" (list . "gateway") }}
imagePullPolicy: {{ .Values.images.pullPolicy }}
env:
  {{- range $name, $value := $settings }}
  {{- if kindIs "slice" $value }}
  {{- $value = join "," $value }}
  {{- else if kindIs "float64" $value }}
  {{- /* Helm reads every number as a float, and would print 268435456 as 2.68435456e+08. */}}
  {{- if eq $value (floor $value) }}{{ $value = int64 $value }}{{ end }}
  {{- end }}
  - {name: SEAMARK_{{ upper $name }}, value: {{ toString $value | quote }}}
  {{- end }}
  {{- with .Values.gateway.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: http
    containerPort: 8080
  {{- if $pages }}
  # /metrics, /ui and /seamark/*: `kubectl port-forward` shows them.
  - name: pages
    containerPort: 8081
  {{- end }}
resources:
  {{- toYaml .Values.gateway.resources | nindent 2 }}
securityContext:
  runAsNonRoot: true
  {{- if .Values.userIds }}
  runAsUser: 65532
  runAsGroup: 65532
  {{- end }}
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
# Ready: it has a worker. Alive: it answers. A pod that is to end says 503 on /ready and serves on for stop_delay, so it
# needs no preStop.
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.gateway.secret }}
  - {name: secret, mountPath: /etc/seamark, readOnly: true}
  {{- end }}
{{- end }}

{{/* The volumes of that container. */}}
{{- define "seamark.gatewayVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- with .Values.gateway.secret }}
- name: secret
  # The gateway runs as a user of its own, and root owns the files.
  secret: {secretName: {{ . }}, defaultMode: 0444}
{{- end }}
{{- end }}
