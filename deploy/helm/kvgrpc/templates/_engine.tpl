{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* What an engine's pod needs to meet the server. The patch for engines and the test pods are made of these. */}}
{{- define "kvgrpc.engine.env" -}}
{{- $connection := printf "%s-connection" (include "kvgrpc.fullname" .) -}}
{{- if eq .Values.discovery "socket" -}}
- name: KVGRPC_SOCKET
  valueFrom:
    configMapKeyRef: {name: {{ $connection }}, key: KVGRPC_SOCKET}
{{- else if eq .Values.discovery "service" -}}
- name: KVGRPC_ADDRESS
  valueFrom:
    configMapKeyRef: {name: {{ $connection }}, key: KVGRPC_ADDRESS}
{{- else -}}
- name: KVGRPC_NODE_IP
  valueFrom:
    fieldRef: {fieldPath: status.hostIP}
- name: KVGRPC_NODE_PORT
  valueFrom:
    configMapKeyRef: {name: {{ $connection }}, key: KVGRPC_NODE_PORT}
- name: KVGRPC_ADDRESS
  value: $(KVGRPC_NODE_IP):$(KVGRPC_NODE_PORT)
{{- end -}}
{{- $secrets := printf "%s/client" (include "kvgrpc.secrets" .) -}}
{{- if .Values.tls.secretName }}
- name: KVGRPC_CA_FILE
  value: {{ $secrets }}-tls/ca.crt
{{- with .Values.tls.serverName }}
- name: KVGRPC_SERVER_NAME
  value: {{ . | quote }}
{{- end }}
{{- if .Values.tls.clientCertificates }}
- name: KVGRPC_CERT_FILE
  value: {{ $secrets }}-tls/tls.crt
- name: KVGRPC_KEY_FILE
  value: {{ $secrets }}-tls/tls.key
{{- end }}
{{- end }}
{{- if .Values.access.tokenSecretName }}
- name: KVGRPC_TOKEN_FILE
  value: {{ $secrets }}-token/token
{{- end }}
{{- end -}}

{{- define "kvgrpc.engine.volumeMounts" -}}
{{- if eq .Values.discovery "socket" -}}
- name: kvgrpc-socket
  mountPath: {{ include "kvgrpc.socketFolder" . }}
  readOnly: true
{{ end -}}
- name: kvgrpc-shm
  mountPath: /dev/shm
{{- $secrets := printf "%s/client" (include "kvgrpc.secrets" .) -}}
{{- if .Values.tls.secretName }}
- name: kvgrpc-client-tls
  mountPath: {{ $secrets }}-tls
  readOnly: true
{{- end }}
{{- if .Values.access.tokenSecretName }}
- name: kvgrpc-client-token
  mountPath: {{ $secrets }}-token
  readOnly: true
{{- end }}
{{- end -}}

{{/* The folder is created where it is missing, so that an engine never waits for the cache. */}}
{{- define "kvgrpc.engine.volumes" -}}
{{- if eq .Values.mode "sidecar" -}}
- name: kvgrpc-socket
  emptyDir: {}
- name: kvgrpc-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.engine.sharedMemory }}
{{- else -}}
{{- if eq .Values.discovery "socket" -}}
- name: kvgrpc-socket
  hostPath:
    path: {{ include "kvgrpc.socketHostPath" . }}
    type: DirectoryOrCreate
{{ end -}}
- name: kvgrpc-shm
  hostPath:
    path: {{ .Values.sharedMemoryHostPath }}
    type: Directory
{{- end -}}
{{- if .Values.tls.secretName }}
- name: kvgrpc-client-tls
  secret:
    secretName: {{ .Values.tls.clientSecretName | default .Values.tls.secretName | quote }}
    items:
      - {key: ca.crt, path: ca.crt}
      {{- if .Values.tls.clientCertificates }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
{{- end }}
{{- with .Values.access.tokenSecretName }}
- name: kvgrpc-client-token
  secret:
    secretName: {{ . | quote }}
    items: [{key: token, path: token}]
{{- end }}
{{- if and (eq .Values.mode "sidecar") .Values.cards.enabled }}
- name: kvgrpc-kernels
  emptyDir: {}
{{- end }}
{{- if eq .Values.mode "sidecar" }}
{{- with include "kvgrpc.server.secretVolumes" . }}
{{ . | trim }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the pod as a whole needs: the server's group, and outside its own pod the server's host name. */}}
{{- define "kvgrpc.engine.pod" -}}
{{- if ne .Values.mode "sidecar" -}}
hostname: {{ include "kvgrpc.hostname" . | quote }}
{{ else if .Values.cards.enabled -}}
shareProcessNamespace: true
{{ end -}}
securityContext:
  supplementalGroups: [{{ int .Values.socket.group }}]
{{- end -}}

{{/* The server beside an engine. It has neither a start-up nor a readiness probe: a cache never keeps an engine from
     starting or from being asked. */}}
{{- define "kvgrpc.sidecar.container" -}}
{{ include "kvgrpc.server.container" . }}
restartPolicy: Always
livenessProbe:
  {{- include "kvgrpc.probe" (dict "root" . "name" "liveness") | nindent 2 }}
  initialDelaySeconds: {{ include "kvgrpc.startupSeconds" . }}
  periodSeconds: {{ include "kvgrpc.probeSeconds" . }}
  failureThreshold: 3
{{- end -}}

{{/* A strategic merge patch of a Deployment, StatefulSet or DaemonSet of engines. */}}
{{- define "kvgrpc.engine.patch" -}}
spec:
  template:
    spec:
      {{- include "kvgrpc.engine.pod" . | nindent 6 }}
      {{- if eq .Values.mode "sidecar" }}
      initContainers:
        -
          {{- include "kvgrpc.sidecar.container" . | nindent 10 }}
      {{- end }}
      containers:
        - name: {{ .Values.engine.container | quote }}
          env:
            {{- include "kvgrpc.engine.env" . | nindent 12 }}
          volumeMounts:
            {{- include "kvgrpc.engine.volumeMounts" . | nindent 12 }}
      volumes:
        {{- include "kvgrpc.engine.volumes" . | nindent 8 }}
{{- end -}}
