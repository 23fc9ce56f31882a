// Renders a Helm chart as `helm template NAME CHART` does, for machines without helm: Go's templates,
// sprig, and the few functions and objects that Helm adds and the chart uses. Debian's packages
// golang-go, golang-github-masterminds-sprig-dev and golang-github-ghodss-yaml-dev are enough:
//
//	GO111MODULE=off GOPATH=/usr/share/gocode go run tests/by_hand/helm_template.go NAME CHART [VALUES]
package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm_template:", err)
		os.Exit(1)
	}
}

func readYAML(path string) map[string]interface{} {
	text, err := os.ReadFile(path)
	check(err)
	found := map[string]interface{}{}
	check(yaml.Unmarshal(text, &found))
	return found
}

// merge lays other over base, table by table.
func merge(base, other map[string]interface{}) {
	for key, value := range other {
		table, isTable := value.(map[string]interface{})
		below, wasTable := base[key].(map[string]interface{})
		if isTable && wasTable {
			merge(below, table)
		} else {
			base[key] = value
		}
	}
}

// files is a folder of the chart, as templates read it.
type files string

func (chart files) Get(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(string(chart), name))
	return string(text), err
}

func main() {
	if len(os.Args) < 3 {
		check(fmt.Errorf("usage: helm_template NAME CHART [VALUES]"))
	}
	chart := os.Args[2]
	values := readYAML(filepath.Join(chart, "values.yaml"))
	if len(os.Args) > 3 {
		merge(values, readYAML(os.Args[3]))
	}
	about := readYAML(filepath.Join(chart, "Chart.yaml"))
	data := map[string]interface{}{
		"Values": values,
		"Chart": map[string]interface{}{
			"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"],
		},
		"Files": files(chart),
		"Release": map[string]interface{}{
			"Name": os.Args[1], "Namespace": "default", "Service": "Helm",
		},
	}
	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = func(value interface{}) string {
		text, err := yaml.Marshal(value)
		check(err)
		return strings.TrimSuffix(string(text), "\n")
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	all.Funcs(functions)
	var names []string
	check(filepath.WalkDir(filepath.Join(chart, "templates"), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		check(err)
		name, err := filepath.Rel(filepath.Dir(chart), path)
		check(err)
		_, err = all.New(name).Parse(string(text))
		check(err)
		names = append(names, name)
		return nil
	}))
	sort.Strings(names)
	for _, name := range names {
		var out bytes.Buffer
		check(all.ExecuteTemplate(&out, name, data))
		text := strings.TrimSpace(out.String())
		if strings.HasSuffix(name, ".txt") {
			fmt.Fprintln(os.Stderr, text)
		} else if text != "" && !strings.HasPrefix(filepath.Base(name), "_") {
			fmt.Printf("---\n# Source: %s\n%s\n", name, text)
		}
	}
}
