#!/usr/bin/env bash
# Checks the Grafana dashboard against the types that Grafana publishes: the document, and the
# options and fields of each kind of panel. Needs Node.js with npm, which installs the types and
# the compiler. CI does not run it.
#
# usage: dashboard.sh [DASHBOARD]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

board=$(realpath "${1:-deploy/helm/tessera/files/dashboard.json}")
readonly board modules=.cache/grafana
mkdir -p "$modules"
cd "$modules"
[[ -d node_modules/typescript ]] ||
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix . @grafana/schema@11.3.0 typescript@5

python3 - "$board" >board.ts <<'END'
import json, sys
board = json.load(open(sys.argv[1]))
raw = "@grafana/schema/dist/esm/raw"
kinds = {"stat": "stat", "timeseries": "timeseries"}
print(f'import {{ Dashboard }} from "{raw}/dashboard/x/dashboard_types.gen";')
for kind in kinds:
    print(f'import * as {kind} from "{raw}/composable/{kind}/panelcfg/x/{kind.title().replace("Timeseries", "TimeSeries")}PanelCfg_types.gen";')
def show(name, kind, value):
    # In the file, a value of an enumeration is a string.
    text = json.dumps(value)
    print(f"export const {name}: {kind} = {text};")
show("board", "Strings<Dashboard>", board)
for panel in board["panels"]:
    kind, number = panel["type"], panel["id"]
    show(f"options{number}", f"Strings<Partial<{kind}.Options>>", panel.get("options", {}))
    custom = panel["fieldConfig"]["defaults"].get("custom")
    if custom is not None:
        show(f"fields{number}", f"Strings<Partial<{kind}.FieldConfig>>", custom)
print("""type Strings<T> = T extends string ? `${T}` : T extends (infer E)[] ? Strings<E>[] :
  T extends object ? { [K in keyof T]: Strings<T[K]> } : T;""")
END
node_modules/.bin/tsc --noEmit --skipLibCheck --strict --module esnext --moduleResolution node board.ts
echo "$(grep -c 'const options' board.ts) panels are as Grafana's types have it"
