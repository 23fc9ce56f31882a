{{/* The name of all objects: the name of the release, extended by "tessera" if it does not contain that word. */}}
{{- define "tessera.name" -}}
{{- $name := .Values.nameOverride | default "tessera" -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tessera.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "tessera" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The labels of a pod that calls the server; .component is its component. */}}
{{- define "tessera.clientLabels" -}}
{{ include "tessera.labels" .root | replace "component: server" (printf "component: %s" .component) }}
tessera-client: "true"
{{- end -}}

{{- define "tessera.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{/* The restrictions of every container of the chart. */}}
{{- define "tessera.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tessera.user" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Rights and placement of every pod, given .nodeSelector and .tolerations. */}}
{{- define "tessera.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "tessera.user" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The variables with which a client connects over TLS, with files of the mounted secrets. */}}
{{- define "tessera.client" -}}
{{- if .Values.tls.secretName -}}
- {name: TESSERA_CLIENT_TLS_CA, value: /etc/tessera/tls/ca.crt}
- {name: TESSERA_CLIENT_TLS_SERVER_NAME, value: {{ .Values.tls.serverName | quote }}}
{{- if .Values.tls.clientAuth }}
- {name: TESSERA_CLIENT_TLS_CERT, value: {{ include "tessera.clientFolder" . }}/tls.crt}
- {name: TESSERA_CLIENT_TLS_KEY, value: {{ include "tessera.clientFolder" . }}/tls.key}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The folder with the CA of clients, and with the certificate and key of a client. */}}
{{- define "tessera.clientFolder" -}}
/etc/tessera/{{ ternary "tls-client" "tls" (ne .Values.tls.clientSecretName "") }}
{{- end -}}

{{/* The environment of a pod that calls the server. The pod gets no GPU, even if the image and the runtime give one by default. */}}
{{- define "tessera.clientEnv" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- with include "tessera.client" . }}
{{ . }}
{{- end }}
{{- with .Values.tokens.clientSecretName }}
- {name: TESSERA_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
{{- end -}}

{{- define "tessera.tlsMounts" -}}
{{- if .Values.tls.secretName -}}
- {name: tls, mountPath: /etc/tessera/tls, readOnly: true}
{{- if .Values.tls.clientSecretName }}
- {name: tls-client, mountPath: /etc/tessera/tls-client, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tessera.tlsVolumes" -}}
{{- if .Values.tls.secretName -}}
- {name: tls, secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}}
{{- if .Values.tls.clientSecretName }}
- {name: tls-client, secret: {secretName: {{ .Values.tls.clientSecretName }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The value of TESSERA_DEVICE: all devices of the container. */}}
{{- define "tessera.devices" -}}
{{- $names := list -}}
{{- range until (int .Values.gpus) }}{{ $names = append $names (printf "cuda:%d" .) }}{{ end -}}
{{- if eq (int .Values.gpus) 1 }}cuda{{ else }}{{ $names | join "," | default "cpu" | quote }}{{ end -}}
{{- end -}}

{{/* The options in .Values.env. An option that another value sets is rejected, because the container would have the variable twice. */}}
{{- define "tessera.env" -}}
{{- $taken := dict "TESSERA_LISTEN" "port" "TESSERA_DEVICE" "gpus"
      "TESSERA_DRAIN_DELAY" "drain.delaySeconds" "TESSERA_DRAIN_TIMEOUT" "drain.timeoutSeconds"
      "TESSERA_METRICS_LISTEN" "metrics.port" "TESSERA_READY_FILE" "waitUntilFilled"
      "TESSERA_TLS_CERT" "tls.secretName" "TESSERA_TLS_KEY" "tls.secretName" "TESSERA_TLS_CLIENT_CA" "tls.clientAuth"
      "TESSERA_CLIENT_TLS_CA" "tls.secretName" "TESSERA_CLIENT_TLS_SERVER_NAME" "tls.serverName"
      "TESSERA_CLIENT_TLS_CERT" "tls.clientSecretName" "TESSERA_CLIENT_TLS_KEY" "tls.clientSecretName"
      "TESSERA_TOKENS" "tokens.secretName"
      "TESSERA_DATA_DIR" "data.size" "TESSERA_SNAPSHOT_INTERVAL" "data.snapshotInterval" -}}
{{- range $name, $value := .Values.env }}
{{- if not (regexMatch "^(TESSERA_[A-Z0-9_]+|LD_LIBRARY_PATH)$" $name) }}
{{- fail (printf "env.%s is not an option of the server; for example, --memory-limit is env.TESSERA_MEMORY_LIMIT" $name) }}
{{- else if hasKey $taken $name }}
{{- fail (printf "env.%s is not allowed: set the value %s instead" $name (get $taken $name)) }}
{{- end }}
- {name: {{ $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- end -}}

{{/* A probe of a service, or of the process if the service is "". Kubernetes cannot probe gRPC over TLS, so the probe then runs `tessera health`. */}}
{{- define "tessera.probe" -}}
{{- if .root.Values.tls.secretName -}}
exec:
  command: [tessera, health, {{ .service | quote }}, --process, "1"]
timeoutSeconds: 5
{{- else -}}
grpc:
  port: {{ .root.Values.port }}
  service: {{ .service | quote }}
timeoutSeconds: 2
{{- end -}}
{{- end -}}
