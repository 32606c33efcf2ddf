{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* The server's container, the same in every mode but for its probes and ports. */}}
{{- define "kvgrpc.server.container" -}}
name: kvgrpc
image: {{ include "kvgrpc.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [kvgrpc, serve]
args:
  - --l1-size={{ .Values.l1.size }}B
  {{- if .Values.l1.hugePages }}
  - --huge-pages
  {{- end }}
  {{- if .Values.arena.persist }}
  - --arena-path=/arena/l1
  {{- end }}
  {{- with .Values.disk.size }}
  - --disk-path=/disk
  - --disk-size={{ . }}B
  {{- end }}
  {{- with include "kvgrpc.tiers.args" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- if include "kvgrpc.writesBehind" . }}
  - --flush-ms={{ mul .Values.flushSeconds 1000 }}
  {{- end }}
  - --socket-mode={{ .Values.socket.mode }}
  {{- if include "kvgrpc.socketForGroup" . }}
  - --socket-group={{ int .Values.socket.group }}
  {{- end }}
  {{- range .Values.engine.users }}
  - --allow-uid={{ int . }}
  {{- end }}
  {{- if include "kvgrpc.isTcp" . }}
  - --listen={{ .Values.tcp.host }}:{{ int .Values.tcp.port }}
  {{- if .Values.tls.secretName }}
  - --tls-cert={{ include "kvgrpc.secrets" . }}/tls/tls.crt
  - --tls-key={{ include "kvgrpc.secrets" . }}/tls/tls.key
  {{- if .Values.tls.clientCertificates }}
  - --tls-client-ca={{ include "kvgrpc.secrets" . }}/tls/ca.crt
  {{- end }}
  - --health-listen={{ .Values.tcp.host }}:{{ int .Values.tls.healthPort }}
  {{- else }}
  - --insecure
  {{- end }}
  {{- end }}
  {{- if .Values.access.secretName }}
  - --access={{ include "kvgrpc.secrets" . }}/access/access.json
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - --metrics-listen={{ .Values.tcp.host }}:{{ int .Values.metrics.port }}
  {{- end }}
  {{- with .Values.otlp.endpoint }}
  - --otlp-endpoint={{ . }}
  {{- end }}
  - --drain-ms={{ mul .Values.drainSeconds 1000 }}
  {{- range $flag, $value := .Values.flags }}
  {{- if kindIs "slice" $value }}
  {{- range $value }}
  - {{ printf "--%s=%s" $flag . | quote }}
  {{- end }}
  {{- else if kindIs "bool" $value }}
  - --{{ ternary "" "no-" $value }}{{ $flag }}
  {{- else }}
  - {{ printf "--%s=%s" $flag (include "kvgrpc.text" $value) | quote }}
  {{- end }}
  {{- end }}
env:
  - name: KVGRPC_SOCKET
    value: {{ include "kvgrpc.socketPath" . }}
  {{- if .Values.cards.enabled }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: all
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
  - name: CUPY_CACHE_DIR
    value: /kernels
  {{- end }}
  {{- with include "kvgrpc.tiers.env" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
{{- $hostPort := and (eq .Values.mode "daemonset") (eq .Values.discovery "hostPort") }}
{{- if or (include "kvgrpc.isTcp" .) .Values.metrics.enabled }}
ports:
  {{- if include "kvgrpc.isTcp" . }}
  - name: grpc
    containerPort: {{ int .Values.tcp.port }}
    {{- if $hostPort }}
    hostPort: {{ int .Values.tcp.port }}
    {{- end }}
    protocol: TCP
  {{- if .Values.tls.secretName }}
  - name: health
    containerPort: {{ int .Values.tls.healthPort }}
    protocol: TCP
  {{- end }}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - name: metrics
    containerPort: {{ int .Values.metrics.port }}
    protocol: TCP
  {{- end }}
{{- end }}
resources:
  {{- include "kvgrpc.server.resources" . | nindent 2 }}
securityContext:
  {{- include "kvgrpc.confined" . | nindent 2 }}
volumeMounts:
  - name: kvgrpc-socket
    mountPath: {{ include "kvgrpc.socketFolder" . }}
  - name: kvgrpc-shm
    mountPath: /dev/shm
  {{- if .Values.arena.persist }}
  - name: kvgrpc-arena
    mountPath: /arena
  {{- end }}
  {{- if .Values.disk.size }}
  - name: kvgrpc-disk
    mountPath: /disk
  {{- end }}
  {{- if .Values.cards.enabled }}
  - name: kvgrpc-kernels
    mountPath: /kernels
  {{- end }}
  {{- if .Values.tls.secretName }}
  - name: kvgrpc-tls
    mountPath: {{ include "kvgrpc.secrets" . }}/tls
    readOnly: true
  {{- end }}
  {{- if .Values.access.secretName }}
  - name: kvgrpc-access
    mountPath: {{ include "kvgrpc.secrets" . }}/access
    readOnly: true
  {{- end }}
  {{- with include "kvgrpc.tiers.volumeMounts" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Volumes of Secrets that the server reads, again whenever they change. */}}
{{- define "kvgrpc.server.secretVolumes" -}}
{{- with .Values.tls.secretName -}}
- name: kvgrpc-tls
  secret:
    secretName: {{ . | quote }}
{{ end -}}
{{- with .Values.access.secretName -}}
- name: kvgrpc-access
  secret:
    secretName: {{ . | quote }}
    items: [{key: access.json, path: access.json}]
{{ end -}}
{{- include "kvgrpc.tiers.volumes" . | trim -}}
{{- end -}}

{{/* L1 counts as ordinary memory at the server's start even when it lies in huge pages, so the limit holds it. */}}
{{- define "kvgrpc.server.resources" -}}
{{- $overhead := include "kvgrpc.mebibytes" .Values.resources.memoryOverhead | int64 -}}
{{- $whole := add $overhead (include "kvgrpc.mebibytes" .Values.l1.size) -}}
requests:
  cpu: {{ .Values.resources.cpuRequest | quote }}
  memory: {{ ternary $overhead $whole (ne .Values.l1.hugePages "") }}Mi
  {{- with .Values.l1.hugePages }}
  hugepages-{{ . }}: {{ $.Values.l1.size }}
  {{- end }}
limits:
  {{- with .Values.resources.cpuLimit }}
  cpu: {{ . | quote }}
  {{- end }}
  memory: {{ $whole }}Mi
  {{- with .Values.l1.hugePages }}
  hugepages-{{ . }}: {{ $.Values.l1.size }}
  {{- end }}
{{- end -}}

{{- define "kvgrpc.confined" -}}
runAsNonRoot: true
runAsUser: {{ int .Values.user }}
runAsGroup: {{ int .Values.group }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Asks the health service: natively over TCP, else by the program itself over its socket, which takes a third of a
     second of a core and so is done half as often. Arguments: (dict "root" . "name" NAME) */}}
{{- define "kvgrpc.probe" -}}
{{- if include "kvgrpc.isTcp" .root -}}
grpc:
  port: {{ ternary .root.Values.tls.healthPort .root.Values.tcp.port (ne .root.Values.tls.secretName "") | int }}
  service: {{ .name }}
{{- else -}}
exec:
  command: [kvgrpc, healthcheck, {{ .name }}, --timeout-ms=4000]
{{- end }}
timeoutSeconds: 5
{{- end -}}

{{- define "kvgrpc.probeSeconds" -}}
{{- ternary 10 20 (eq (include "kvgrpc.isTcp" .) "true") -}}
{{- end -}}

{{/* Whether the socket's mode lets its group in. */}}
{{- define "kvgrpc.socketForGroup" -}}
{{- if regexMatch "^0?[0-7][67][0-7]$" .Values.socket.mode -}}true{{- end -}}
{{- end -}}
