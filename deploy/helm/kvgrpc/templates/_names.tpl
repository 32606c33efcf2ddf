{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "kvgrpc.name" -}}
{{- default .Chart.Name .Values.nameOverride | replace "." "-" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvgrpc.fullname" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full | replace "." "-" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvgrpc.selector" -}}
app.kubernetes.io/name: {{ include "kvgrpc.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "kvgrpc.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "kvgrpc.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvgrpc.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvgrpc.hostname" -}}
{{- .Values.hostname | default (include "kvgrpc.fullname" .) -}}
{{- end -}}

{{- define "kvgrpc.socketHostPath" -}}
{{- .Values.socket.hostPath | default (printf "/run/%s" (include "kvgrpc.fullname" .)) -}}
{{- end -}}

{{- define "kvgrpc.arenaHostPath" -}}
{{- .Values.arena.hostPath | default (printf "/dev/shm/%s-arena" (include "kvgrpc.fullname" .)) -}}
{{- end -}}

{{- define "kvgrpc.diskHostPath" -}}
{{- .Values.disk.hostPath | default (printf "/var/lib/%s" (include "kvgrpc.fullname" .)) -}}
{{- end -}}

{{- define "kvgrpc.hostPathType" -}}
{{- ternary "DirectoryOrCreate" "Directory" .Values.prepareFolders -}}
{{- end -}}

{{/* Which nodes may run a pod, and how it gets onto them: the same for all that belong to a server. */}}
{{- define "kvgrpc.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The socket in every container: the server's, an engine's, a test's. */}}
{{- define "kvgrpc.socketFolder" -}}/run/kvgrpc{{- end -}}
{{- define "kvgrpc.socketPath" -}}{{ include "kvgrpc.socketFolder" . }}/kvgrpc.sock{{- end -}}

{{/* Where Secrets are mounted. */}}
{{- define "kvgrpc.secrets" -}}/run/secrets/kvgrpc{{- end -}}

{{/* "4Gi" as a number of MiB */}}
{{- define "kvgrpc.mebibytes" -}}
{{- $units := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- mul (regexFind "^[0-9]+" .) (get $units (regexFind "[A-Z]i$" .)) -}}
{{- end -}}

{{/* "500m" or "2" as a number of thousandths */}}
{{- define "kvgrpc.millicores" -}}
{{- if hasSuffix "m" . -}}{{ trimSuffix "m" . | int }}{{- else -}}{{ mulf 1000 (float64 .) | int }}{{- end -}}
{{- end -}}

{{- define "kvgrpc.graceSeconds" -}}
{{- .Values.terminationGracePeriodSeconds | default (add .Values.drainSeconds (ternary .Values.flushSeconds 0 (eq (include "kvgrpc.writesBehind" .) "true")) 10) -}}
{{- end -}}

{{- define "kvgrpc.startupSeconds" -}}
{{- $gibibytes := div (add (include "kvgrpc.mebibytes" .Values.l1.size) 1023) 1024 -}}
{{- .Values.startupSeconds | default (add 60 (mul 2 $gibibytes)) -}}
{{- end -}}

{{- define "kvgrpc.isTcp" -}}
{{- if ne .Values.discovery "socket" -}}true{{- end -}}
{{- end -}}

{{/* A value as text; numbers of a values file are floats, and 1000000 must not become 1e+06. */}}
{{- define "kvgrpc.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}
