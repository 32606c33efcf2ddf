{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* What removes the files of an arena on each node: an init container of the server's pod (arena.remove), or of the
     DaemonSet that a hook runs before the release goes. */}}
{{- define "kvgrpc.arena.remover" -}}
name: arena
image: {{ include "kvgrpc.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [sh, -c, "rm -f /arena/l1 /arena/l1.*"]
resources:
  requests: {cpu: 10m, memory: 16Mi}
  limits: {memory: 64Mi}
securityContext:
  {{- include "kvgrpc.confined" . | nindent 2 }}
volumeMounts:
  - name: kvgrpc-arena
    mountPath: /arena
{{- end -}}

{{- define "kvgrpc.arena.volume" -}}
name: kvgrpc-arena
hostPath:
  path: {{ include "kvgrpc.arenaHostPath" . }}
  type: {{ include "kvgrpc.hostPathType" . }}
{{- end -}}

{{/* Every object of the hook; 63 characters, which a Job's name may have. */}}
{{- define "kvgrpc.arena.name" -}}
{{- include "kvgrpc.fullname" . | trunc 57 | trimSuffix "-" }}-arena
{{- end -}}

{{- define "kvgrpc.arena.selector" -}}
app.kubernetes.io/name: {{ include "kvgrpc.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: arena
{{- end -}}

{{/* Metadata of an object of the hook. Arguments: (dict "root" . "weight" TEXT) */}}
{{- define "kvgrpc.arena.metadata" -}}
name: {{ include "kvgrpc.arena.name" .root }}
labels:
  {{- include "kvgrpc.labels" .root | nindent 2 }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* One step of the hook's Job. The image has no shell, so a step is one command.
     Arguments: (dict "root" . "name" NAME "args" LIST) */}}
{{- define "kvgrpc.arena.step" -}}
name: {{ .name }}
image: {{ .root.Values.arena.kubectlImage }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [kubectl, --namespace={{ .root.Release.Namespace }}]
args:
  {{- toYaml .args | nindent 2 }}
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {memory: 128Mi}
securityContext:
  {{- include "kvgrpc.confined" .root | nindent 2 }}
volumeMounts:
  - name: daemonset
    mountPath: /daemonset
    readOnly: true
{{- end -}}
