{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Values that contradict each other end here, each with a sentence that says what to change. */}}
{{- define "kvgrpc.validate" -}}
{{- $v := .Values -}}
{{- $tcp := include "kvgrpc.isTcp" . -}}
{{- if eq $v.mode "sidecar" -}}
{{- if $tcp -}}
{{- fail (printf "discovery=%s: a sidecar and its engine meet at a socket inside their pod; set discovery=socket, or mode=daemonset" $v.discovery) -}}
{{- end -}}
{{- if $v.arena.persist -}}
{{- fail "arena.persist: a sidecar's memory ends with its pod; set arena.persist=false, or mode=daemonset" -}}
{{- end -}}
{{- if $v.arena.remove -}}
{{- fail "arena.remove: a sidecar has left no file on a node; set arena.remove=false, or mode=daemonset" -}}
{{- end -}}
{{- if $v.disk.size -}}
{{- fail "disk.size: a sidecar's folders end with its pod; empty it, or set mode=daemonset" -}}
{{- end -}}
{{- if $v.networkPolicy.enabled -}}
{{- fail "networkPolicy.enabled: a sidecar has no port, and the pod is the engine's; set networkPolicy.enabled=false, or mode=daemonset" -}}
{{- end -}}
{{- end -}}
{{- $tls := $v.tls.secretName -}}
{{- if and $tcp (not $tls) (not $v.tcp.insecure) -}}
{{- fail (printf "discovery=%s serves without TLS: whoever reaches port %d can read KV data. Set tls.secretName, or discovery=socket, or tcp.insecure=true if the network is trusted" $v.discovery (int $v.tcp.port)) -}}
{{- end -}}
{{- if and $tls (not $tcp) -}}
{{- fail "tls.secretName: a socket has no TLS; set discovery=service or hostPort, or empty it" -}}
{{- end -}}
{{- if and $tls $v.tcp.insecure -}}
{{- fail "tls.secretName and tcp.insecure contradict each other; set tcp.insecure=false, or empty tls.secretName" -}}
{{- end -}}
{{- if and (not $tls) (or $v.tls.clientCertificates $v.tls.clientSecretName $v.tls.serverName) -}}
{{- fail "tls.clientCertificates, tls.clientSecretName and tls.serverName have no effect without tls.secretName; set it, or empty them" -}}
{{- end -}}
{{- if and $v.tls.clientCertificates (not $v.tls.clientSecretName) -}}
{{- fail "tls.clientCertificates: engines would show the server's own certificate; set tls.clientSecretName" -}}
{{- end -}}
{{- if and $tls (or (eq (int $v.tls.healthPort) (int $v.tcp.port)) (and $v.metrics.enabled (eq (int $v.tls.healthPort) (int $v.metrics.port)))) -}}
{{- fail (printf "tls.healthPort=%d is another port, too (tcp.port or metrics.port); change it" (int $v.tls.healthPort)) -}}
{{- end -}}
{{- if and $v.access.tokenSecretName (not $v.access.secretName) -}}
{{- fail "access.tokenSecretName: nobody asks for a token without access.secretName; set it, or empty access.tokenSecretName" -}}
{{- end -}}
{{- if and (eq $v.discovery "service") (not (regexMatch "^[a-z]" (include "kvgrpc.fullname" .))) -}}
{{- fail (printf "the name %s does not begin with a letter, which a Service's must; set fullnameOverride" (include "kvgrpc.fullname" .)) -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $tcp (not $v.networkPolicy.from) -}}
{{- fail "networkPolicy.enabled without networkPolicy.from lets no engine in; list the engines' peers in networkPolicy.from" -}}
{{- end -}}
{{- if and $v.networkPolicy.from (not (and $v.networkPolicy.enabled $tcp)) -}}
{{- fail "networkPolicy.from has no effect: set networkPolicy.enabled=true and discovery=service or hostPort, or empty it" -}}
{{- end -}}
{{- $m := $v.metrics -}}
{{- if and (or $m.podMonitor.enabled $m.rules.enabled $m.dashboard.enabled) (not $m.enabled) -}}
{{- fail "metrics.podMonitor, metrics.rules and metrics.dashboard show what nobody measures; set metrics.enabled=true, or all of them false" -}}
{{- end -}}
{{- if and $m.podMonitor.enabled (eq $v.mode "sidecar") -}}
{{- fail "metrics.podMonitor: a sidecar's pod has the engine's labels, which the chart does not know; set metrics.podMonitor.enabled=false and name the port metrics in a PodMonitor of the engine" -}}
{{- end -}}
{{- if and $m.enabled $tcp (eq (int $m.port) (int $v.tcp.port)) -}}
{{- fail (printf "metrics.port=%d is tcp.port, too; change one of them" (int $m.port)) -}}
{{- end -}}
{{- $n := $v.networkPolicy -}}
{{- if and $n.enabled $m.enabled (not $n.metricsFrom) -}}
{{- fail "networkPolicy.enabled without networkPolicy.metricsFrom lets no Prometheus in; list its peers in networkPolicy.metricsFrom, or set metrics.enabled=false" -}}
{{- end -}}
{{- if and $n.metricsFrom (not (and $n.enabled $m.enabled)) -}}
{{- fail "networkPolicy.metricsFrom has no effect: set networkPolicy.enabled=true and metrics.enabled=true, or empty it" -}}
{{- end -}}
{{- $out := or $v.otlp.endpoint $v.mooncake.master $v.valkey.url $v.objectStore.url $v.versionsUrl -}}
{{- if and $n.enabled $out (not $n.to) -}}
{{- fail "networkPolicy.enabled without networkPolicy.to lets nothing out to otlp.endpoint, mooncake.master, valkey.url, objectStore.url and versionsUrl; list the peers of those that are set (and the DNS server's) in networkPolicy.to" -}}
{{- end -}}
{{- if and $n.to (not (and $n.enabled $out)) -}}
{{- fail "networkPolicy.to has no effect: set networkPolicy.enabled=true and otlp.endpoint, mooncake.master, valkey.url or objectStore.url, or empty it" -}}
{{- end -}}
{{- include "kvgrpc.tiers.validate" . -}}
{{- if and $v.arena.persist $v.arena.remove -}}
{{- fail "arena.persist and arena.remove exclude each other: it is kept, or removed; set one of them" -}}
{{- end -}}
{{- if and $v.arena.keepOnUninstall (not $v.arena.persist) -}}
{{- fail "arena.keepOnUninstall has no effect without arena.persist; set it, or arena.keepOnUninstall=false" -}}
{{- end -}}
{{- if $v.l1.hugePages -}}
{{- if $v.arena.persist -}}
{{- fail "l1.hugePages and arena.persist exclude each other, as --huge-pages and --arena-path do; set one of them" -}}
{{- end -}}
{{- if mod (include "kvgrpc.mebibytes" $v.l1.size) (include "kvgrpc.mebibytes" $v.l1.hugePages) -}}
{{- fail (printf "l1.size=%s is no multiple of l1.hugePages=%s; change l1.size" $v.l1.size $v.l1.hugePages) -}}
{{- end -}}
{{- end -}}
{{- if and $v.cards.enabled (eq (get $v.flags "cards" | toString) "false") -}}
{{- fail "cards.enabled and flags.cards=false contradict each other; set one of them" -}}
{{- end -}}
{{- if and $v.disk.hostPath (not $v.disk.size) -}}
{{- fail "disk.hostPath has no effect without disk.size; set it, or empty disk.hostPath" -}}
{{- end -}}
{{- $end := add (ternary 5 3 (ne $v.otlp.endpoint "")) (ternary 3 0 $v.arena.persist) (ternary $v.flushSeconds 0 (eq (include "kvgrpc.writesBehind" .) "true")) -}}
{{- if and $v.terminationGracePeriodSeconds (lt (int $v.terminationGracePeriodSeconds) (add $end $v.drainSeconds | int)) -}}
{{- fail (printf "terminationGracePeriodSeconds=%d does not hold drainSeconds=%d and the server's end after it (%d seconds); raise it, or leave it 0" (int $v.terminationGracePeriodSeconds) (int $v.drainSeconds) (int $end)) -}}
{{- end -}}
{{- if and $v.engine.users (not (regexMatch "^0?[0-7]([67][0-7]|[0-7][67])$" $v.socket.mode)) -}}
{{- fail (printf "engine.users names other users, but socket.mode=%s keeps them out; set socket.mode=0660" $v.socket.mode) -}}
{{- end -}}
{{- with $v.resources.cpuLimit -}}
{{- if lt (include "kvgrpc.millicores" . | int) (include "kvgrpc.millicores" $v.resources.cpuRequest | int) -}}
{{- fail (printf "resources.cpuLimit=%s is less than resources.cpuRequest=%s; raise the limit" . $v.resources.cpuRequest) -}}
{{- end -}}
{{- end -}}
{{- $folders := dict "socket.hostPath" (include "kvgrpc.socketHostPath" .) "arena.hostPath" (include "kvgrpc.arenaHostPath" .) "disk.hostPath" (include "kvgrpc.diskHostPath" .) -}}
{{- range $name, $path := $folders -}}
{{- if or (not (regexMatch "^/[^/]+/[^/]" $path)) (regexMatch "^(/var/(run|lib|tmp|log)|/dev/shm|/run/user)/?$" $path) (contains ".." $path) -}}
{{- fail (printf "%s=%s is a folder of the system, which would become the server's; name a folder of its own below it" $name $path) -}}
{{- end -}}
{{- end -}}
{{- if has (get $folders "socket.hostPath") (list (get $folders "arena.hostPath") (get $folders "disk.hostPath")) -}}
{{- fail "socket.hostPath is the folder of arena.hostPath or disk.hostPath, too, and engines mount it; name others" -}}
{{- end -}}
{{- if eq (get $folders "arena.hostPath") (get $folders "disk.hostPath") -}}
{{- fail "arena.hostPath and disk.hostPath are the same folder; name two" -}}
{{- end -}}
{{- end -}}
