{{- define "streamer.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "streamer.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "streamer.metadata" -}}
name: {{ include "streamer.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "streamer.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* How a probe asks for a path. */}}
{{- define "streamer.probe" -}}
{{- if .root.Values.tls.clientCA -}}
tcpSocket: {port: http}
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .root.Values.tls.secretName }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end -}}

{{/* Labels that Prometheus gives to the series of this service. */}}
{{- define "streamer.series" -}}
namespace={{ .Release.Namespace | quote }},service={{ include "streamer.name" . | quote }}
{{- end -}}

{{/* How fast pods come and go. */}}
{{- define "streamer.behavior" -}}
scaleUp:
  # At most twice as many every three minutes: the wait says that there are too few pods, not how
  # many are missing, and it does not fall before new pods have loaded the model.
  policies:
    - {type: Percent, value: 100, periodSeconds: 180}
scaleDown:
  stabilizationWindowSeconds: {{ int .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 120}
{{- end -}}
