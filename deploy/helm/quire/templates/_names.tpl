{{- define "quire.model" -}}
{{- required "model is empty: give a hub id or a folder of the images, as in --set model=Qwen/Qwen3-0.6B" .Values.model -}}
{{- end -}}

{{- /* Another model is another name, so the workers restart. */ -}}
{{- define "quire.modelMap" -}}
quire-model-{{ include "quire.model" . | sha256sum | trunc 10 }}
{{- end -}}
