#!/usr/bin/env bash
# Renders the Helm chart with several values, by helm or, without it, by Go's templates
# (helm_template.go), and validates values and objects by their schemas. Needs Node.js with npm, which
# brings the schemas of Kubernetes, and python3-jsonschema. CI does without it.
#
# usage: chart.sh            checks, also that deploy/kubernetes.yaml is what the chart renders
#        chart.sh --write    writes deploy/kubernetes.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly chart=deploy/helm/tessera modules=.cache/kubernetes
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'chart.sh: %s\n' "$*" >&2
  exit 1
}

if command -v helm >/dev/null; then
  render() { helm template tessera "$chart" --values "$1"; }
else
  GO111MODULE=off GOPATH=/usr/share/gocode go build -o "$work/render" tests/by_hand/helm_template.go
  render() { "$work/render" tessera "$chart" "$1" 2>"$work/notes"; }
fi

# Objects of a file of YAML as lines of JSON.
objects() { /usr/bin/python3 -c 'import json, sys, yaml
for found in yaml.safe_load_all(open(sys.argv[1])):
    if found: print(json.dumps(found))' "$1"; }

# valid VALUES: whether values.schema.json takes them.
valid() { /usr/bin/python3 -c 'import json, sys, jsonschema, yaml
def merge(base, other):
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict): merge(base[key], value)
        else: base[key] = value
    return base
values, schema, more = sys.argv[1:]
try:
    jsonschema.Draft7Validator(json.load(open(schema))).validate(
        merge(yaml.safe_load(open(values)), yaml.safe_load(open(more)) or {}))
except jsonschema.ValidationError as error: sys.exit(f"    {error.json_path}: {error.message}")' \
  "$chart/values.yaml" "$chart/values.schema.json" "$1"; }

# The chart without what is Helm's own.
plain() {
  render "$1" | awk '/^---$/ { if (block !~ /helm.sh\/hook/) printf "%s", block; block = "" }
    !/helm.sh\/chart:|managed-by: Helm|^# Source:/ { block = block $0 "\n" }
    END { if (block !~ /helm.sh\/hook/) printf "%s", block }'
}

cat >"$work/default.yaml" <<<'{}'
cat >"$work/cpu.yaml" <<<'{gpus: 0, replicas: 3, env: {TESSERA_QUEUE: 64}}'
cat >"$work/tls.yaml" <<<'{tls: {secretName: pair, clientAuth: true, serverName: tessera.example}, loadtest: {enabled: true, cases: dot-latency}}'
cat >"$work/placed.yaml" <<<'{gpus: 2, gpuResource: nvidia.com/mig-3g.40gb, nodeSelector: {gpu: h200}, priorityClassName: high,
  tolerations: [{key: nvidia.com/gpu, operator: Exists}], podLabels: {team: a}, podAnnotations: {b: c},
  image: {pullSecrets: [{name: registry}]}, affinity: {podAntiAffinity: {}}, service: {type: LoadBalancer, annotations: {d: e}},
  networkPolicy: {from: [{namespaceSelector: {}}]}, serviceAccount: {annotations: {f: g}}}'
cat >"$work/watched.yaml" <<<'{metrics: {from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}],
  serviceMonitor: {enabled: true, interval: 30s, labels: {release: prometheus}}, prometheusRule: {enabled: true}}}'
cat >"$work/bare.yaml" <<<'{metrics: {enabled: false}, podDisruptionBudget: {enabled: false}, networkPolicy: {enabled: false}, resources: {}}'

{
  echo "# One Tessera instance on a GPU, without Helm. tests/by_hand/chart.sh --write makes it from the chart in helm/tessera."
  plain "$work/default.yaml"
} >"$work/kubernetes.yaml"
if [[ ${1:-} == --write ]]; then
  cp "$work/kubernetes.yaml" deploy/kubernetes.yaml
  exit
fi
cmp "$work/kubernetes.yaml" deploy/kubernetes.yaml || fail "deploy/kubernetes.yaml is stale: chart.sh --write"

npm install --no-audit --no-fund --silent --prefix "$modules" \
  kubernetes-models@5.1.0 @kubernetes-models/prometheus-operator@6.0.0
for values in default cpu tls placed watched bare; do
  say "$values: $(head -c 80 "$work/$values.yaml" | head -n 1)"
  valid "$work/$values.yaml" || fail "the schema refuses it"
  render "$work/$values.yaml" >"$work/out.yaml"
  objects "$work/out.yaml" | node tests/by_hand/chart_check.mjs "$modules/node_modules"
done
say "Values that the schema refuses"
for values in '{replicas: two}' '{gpu: 1}' '{env: {QUEUE: "1"}}' '{tls: {clientAuth: true}}' '{port: 80}' '{image: {repository: ""}}'; do
  cat >"$work/bad.yaml" <<<"$values"
  if valid "$work/bad.yaml"; then fail "the schema takes $values"; fi
done
say "The chart is valid"
