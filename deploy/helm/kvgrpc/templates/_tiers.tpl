{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Tiers that servers of many machines share: what the server is told of them, and how it is let in. */}}
{{- define "kvgrpc.tiers.args" -}}
{{- with .Values.mooncake.master }}
- --mooncake-master={{ . }}
{{- end }}
{{- with .Values.valkey.url }}
- --valkey-url={{ . }}
- --valkey-ttl-ms={{ mul $.Values.valkey.ttlSeconds 1000 }}
{{- end }}
{{- if .Values.valkey.caSecretName }}
- --valkey-ca={{ include "kvgrpc.secrets" . }}/valkey-ca/ca.crt
{{- end }}
{{- with .Values.objectStore.url }}
- --object-store-url={{ . }}
{{- end }}
{{- with .Values.versionsUrl }}
- --versions-url={{ . }}
{{- end }}
{{- end -}}

{{/* The object store, and the Valkey, that the server logs in to: as a tier, or for versions. */}}
{{- define "kvgrpc.tiers.storeUrl" -}}
{{- .Values.objectStore.url | default (regexFind "^(s3|gs|az)://.*" .Values.versionsUrl) -}}
{{- end -}}
{{- define "kvgrpc.tiers.valkeyUrl" -}}
{{- .Values.valkey.url | default (regexFind "^(valkeys?|rediss?)://.*" .Values.versionsUrl) -}}
{{- end -}}

{{/* Names are those that the program and its clients of stores read. */}}
{{- define "kvgrpc.tiers.env" -}}
{{- with .Values.valkey.secretName }}
{{ include "kvgrpc.tiers.secret" (list . "VALKEY_PASSWORD" false) }}
{{ include "kvgrpc.tiers.secret" (list . "VALKEY_USERNAME" true) }}
{{- end }}
{{- $o := .Values.objectStore -}}
{{- $url := include "kvgrpc.tiers.storeUrl" . -}}
{{- with $o.secretName }}
{{- if hasPrefix "s3://" $url }}
{{ include "kvgrpc.tiers.secret" (list . "AWS_ACCESS_KEY_ID" false) }}
{{ include "kvgrpc.tiers.secret" (list . "AWS_SECRET_ACCESS_KEY" false) }}
{{ include "kvgrpc.tiers.secret" (list . "AWS_SESSION_TOKEN" true) }}
{{- else if hasPrefix "gs://" $url }}
{{ include "kvgrpc.tiers.secret" (list . "GOOGLE_SERVICE_ACCOUNT_KEY" false) }}
{{- else }}
{{ include "kvgrpc.tiers.secret" (list . "AZURE_STORAGE_ACCOUNT_KEY" false) }}
{{- end }}
{{- end }}
{{- with $o.account }}
- name: AZURE_STORAGE_ACCOUNT_NAME
  value: {{ . | quote }}
{{- end }}
{{- with $o.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with $o.endpoint }}
- name: AWS_ENDPOINT
  value: {{ . | quote }}
{{- if hasPrefix "http://" . }}
- name: AWS_ALLOW_HTTP
  value: "true"
{{- end }}
{{- end }}
{{- if $o.caSecretName }}
- name: SSL_CERT_FILE
  value: {{ include "kvgrpc.secrets" . }}/objectstore-ca/ca.crt
{{- end }}
{{- end -}}

{{/* One variable out of a Secret. Arguments: (list SECRET NAME OPTIONAL) */}}
{{- define "kvgrpc.tiers.secret" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef: {name: {{ index . 0 | quote }}, key: {{ index . 1 }}{{ if index . 2 }}, optional: true{{ end }}}
{{- end -}}

{{- define "kvgrpc.tiers.volumeMounts" -}}
{{- range $name, $tier := dict "valkey" .Values.valkey "objectstore" .Values.objectStore }}
{{- if $tier.caSecretName }}
- name: kvgrpc-{{ $name }}-ca
  mountPath: {{ include "kvgrpc.secrets" $ }}/{{ $name }}-ca
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvgrpc.tiers.volumes" -}}
{{- range $name, $tier := dict "valkey" .Values.valkey "objectstore" .Values.objectStore }}
{{- with $tier.caSecretName }}
- name: kvgrpc-{{ $name }}-ca
  secret:
    secretName: {{ . | quote }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
{{- end -}}

{{/* Whether something outlives the pod that is written behind stores. */}}
{{- define "kvgrpc.writesBehind" -}}
{{- if or .Values.disk.size .Values.mooncake.master .Values.valkey.url .Values.objectStore.url -}}true{{- end -}}
{{- end -}}

{{- define "kvgrpc.tiers.validate" -}}
{{- $k := .Values.valkey -}}
{{- $o := .Values.objectStore -}}
{{- $versions := .Values.versionsUrl -}}
{{- $valkey := include "kvgrpc.tiers.valkeyUrl" . -}}
{{- $store := include "kvgrpc.tiers.storeUrl" . -}}
{{- $lasts := or .Values.disk.size $k.url $o.url -}}
{{- if and .Values.mooncake.master (not (or $lasts $versions)) -}}
{{- fail "mooncake.master: a Mooncake Store keeps no versions of spaces, without which what was cleared is found again; set versionsUrl (or objectStore.url or valkey.url)" -}}
{{- end -}}
{{- if and $versions (not (or $lasts .Values.mooncake.master)) -}}
{{- fail "versionsUrl is about what lies in lower tiers, and there is none; set mooncake.master or another, or empty it" -}}
{{- end -}}
{{- if and $versions (or $o.url (and $k.url (ne $versions $store))) -}}
{{- fail "versionsUrl: versions lie in objectStore.url or valkey.url already; empty it" -}}
{{- end -}}
{{- if and (not $valkey) (or $k.secretName $k.caSecretName) -}}
{{- fail "valkey.secretName and valkey.caSecretName have no effect without valkey.url; set it, or empty them" -}}
{{- end -}}
{{- if and $k.caSecretName (not (regexMatch "^(valkeys|rediss)://" $valkey)) -}}
{{- fail (printf "valkey.caSecretName is for TLS, and %s is without; write valkeys:// or rediss://, or empty valkey.caSecretName" $valkey) -}}
{{- end -}}
{{- if and (not $store) (or $o.secretName $o.caSecretName $o.endpoint $o.region $o.account $o.insecure) -}}
{{- fail "objectStore.secretName, caSecretName, endpoint, region, account and insecure have no effect without objectStore.url; set it, or empty them" -}}
{{- end -}}
{{- if and (or $o.endpoint $o.region) (not (hasPrefix "s3://" $store)) -}}
{{- fail (printf "objectStore.endpoint and objectStore.region are for s3://, and %s is not; empty them" $store) -}}
{{- end -}}
{{- if ne (hasPrefix "az://" $store) (ne $o.account "") -}}
{{- fail "objectStore.account is the storage account of an az:// URL; set both, or none" -}}
{{- end -}}
{{- if and (hasPrefix "http://" $o.endpoint) (not $o.insecure) -}}
{{- fail (printf "objectStore.endpoint=%s is without TLS: whoever is on the way can read KV data and change it. Write https://, or set objectStore.insecure=true if the network is trusted" $o.endpoint) -}}
{{- end -}}
{{- if and $o.insecure (not (hasPrefix "http://" $o.endpoint)) -}}
{{- fail "objectStore.insecure has no effect without an objectStore.endpoint that begins with http://; set it false" -}}
{{- end -}}
{{- if and $o.caSecretName $o.insecure -}}
{{- fail "objectStore.caSecretName is for TLS, and objectStore.insecure is without; set one of them" -}}
{{- end -}}
{{- end -}}
