{{/* The name of everything: that of the release, with "tessera" in it. */}}
{{- define "tessera.name" -}}
{{- if contains "tessera" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-tessera" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tessera.selector" -}}
app.kubernetes.io/name: tessera
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tessera.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* What every container of the chart runs with. */}}
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
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* How a client connects by TLS, from the folder with the secret. */}}
{{- define "tessera.client" -}}
- {name: TESSERA_CLIENT_TLS_CA, value: /etc/tessera/tls/ca.crt}
- {name: TESSERA_CLIENT_TLS_SERVER_NAME, value: {{ .Values.tls.serverName | quote }}}
{{- if .Values.tls.clientAuth }}
- {name: TESSERA_CLIENT_TLS_CERT, value: /etc/tessera/tls/tls.crt}
- {name: TESSERA_CLIENT_TLS_KEY, value: /etc/tessera/tls/tls.key}
{{- end }}
{{- end -}}

{{/* A probe of a service, or of the process with "". Kubernetes cannot probe gRPC by TLS, so there the command line asks. */}}
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
