#!/usr/bin/env bash
# Writes a bill of materials of the bundle or the image, as SPDX 2.3 in JSON, from dpkg's database.
# The document depends only on its input and on SOURCE_DATE_EPOCH, a time in seconds (by default,
# the current time).
#
# usage: sbom.sh owners PROGRAM...          the packages of the libraries that programs load
#        sbom.sh rows RELATION PACKAGE...   rows of these installed packages, or of all installed
#                                           packages if none is named
#        sbom.sh document NAME VERSION      reads rows and writes the document of NAME
#
# It is written in bash and awk, because it runs in the last stage of the image, which knows the
# packages and has no Python.
#
# A row is RELATION, name, version, architecture, maintainer, home page and package URL, separated by
# tabs. RELATION is what NAME does with a package, CONTAINS, DEPENDS_ON or STATIC_LINK, or what the
# package is to NAME, such as BUILD_DEPENDENCY_OF.
set -euo pipefail

owners() {
  # Some packages list /lib for files that the loader finds in /usr/lib, so the pattern omits this.
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | grep -v libtessera_kernels |
    xargs realpath | sed 's|.*/\([^/]*-linux-gnu/\)|*/\1|' | xargs dpkg-query -S | cut -d : -f 1 | sort -u
}

rows() {
  local relation=$1 distribution
  shift
  # shellcheck source=/dev/null
  distribution=$(. /etc/os-release && echo "$ID $VERSION_ID")
  dpkg-query -W \
    -f '${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\t${Maintainer}\t${Homepage}\n' "$@" |
    awk -F '\t' -v relation="$relation" -v distribution="$distribution" '
      # Encodes text as package URLs require.
      function encoded(text) {
        gsub(/%/, "%25", text); gsub(/\+/, "%2B", text); gsub(/:/, "%3A", text)
        return text
      }
      $1 == "installed" {
        split(distribution, of, " ")
        url = "pkg:deb/" of[1] "/" encoded($2) "@" encoded($3) "?arch=" $4 "&distro=" of[1] "-" of[2]
        print relation "\t" $2 "\t" $3 "\t" $4 "\t" $5 "\t" $6 "\t" url
      }'
}

document() {
  local name=$1 version=$2 input created
  input=$(LC_ALL=C sort -u)
  created=$(date -u -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}" +%Y-%m-%dT%H:%M:%SZ)
  awk -F '\t' -v name="$name" -v version="$version" -v created="$created" \
    -v hash="$(printf '%s %s %s\n%s' "$name" "$version" "$created" "$input" | sha256sum | cut -c 1-32)" '
    # The meaning of backslashes in a replacement differs between versions of awk.
    function replaced(text, what, by,   parts, count, i) {
      count = split(text, parts, what)
      text = parts[1]
      for (i = 2; i <= count; i++) text = text by parts[i]
      return text
    }
    function quoted(text) {
      text = replaced(replaced(text, "[\\\\]", "\\\\"), "\"", "\\\"")
      return "\"" replaced(text, "[\001-\037]", " ") "\""
    }
    function id(text) {
      gsub(/\+/, "-plus", text); gsub(/[^a-zA-Z0-9.-]/, "-", text)
      return "SPDXRef-Package-" text
    }
    function package(ref, name, version, maintainer, page, url) {
      printf "%s\n    {\"SPDXID\": %s, \"name\": %s, \"versionInfo\": %s,\n     ", \
        packages++ ? "," : "", quoted(ref), quoted(name), quoted(version)
      printf "\"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false,\n     "
      printf "\"licenseConcluded\": \"NOASSERTION\", \"licenseDeclared\": \"NOASSERTION\", "
      printf "\"copyrightText\": \"NOASSERTION\""
      # SPDX puts mail addresses in parentheses.
      gsub(/ *</, " (", maintainer); gsub(/>/, ")", maintainer)
      if (maintainer != "") printf ",\n     \"supplier\": %s", quoted("Organization: " maintainer)
      if (page != "") printf ",\n     \"homepage\": %s", quoted(page)
      if (url != "")
        printf ",\n     \"externalRefs\": [{\"referenceCategory\": \"PACKAGE-MANAGER\", " \
          "\"referenceType\": \"purl\", \"referenceLocator\": %s}]", quoted(url)
      printf "}"
    }
    function relate(from, relation, to) {
      relations = relations sprintf("%s\n    {\"spdxElementId\": %s, \"relationshipType\": %s, " \
        "\"relatedSpdxElement\": %s}", relations == "" ? "" : ",", quoted(from), quoted(relation), quoted(to))
    }
    BEGIN {
      print "{\n  \"spdxVersion\": \"SPDX-2.3\",\n  \"dataLicense\": \"CC0-1.0\","
      print "  \"SPDXID\": \"SPDXRef-DOCUMENT\",\n  \"name\": " quoted(name "-" version) ","
      print "  \"documentNamespace\": " quoted("https://tessera.example/spdx/" name "-" version "-" hash) ","
      print "  \"creationInfo\": {\"created\": " quoted(created) ", \"creators\": [\"Tool: tessera-sbom\"]},"
      printf "  \"packages\": ["
      root = id(name)
      package(root, name, version, "Tessera maintainers (maintainers@tessera.example)", "", "")
      relate("SPDXRef-DOCUMENT", "DESCRIBES", root)
    }
    NF {
      ref = id($2 "-" $3 "-" $4)
      if (!seen[ref]++) package(ref, $2, $3, $5, $6, $7)
      if ($1 ~ /_OF$/) relate(ref, $1, root)
      else relate(root, $1, ref)
    }
    END { print "\n  ],\n  \"relationships\": [" relations "\n  ]\n}" }
  ' <<<"$input"
}

case ${1:-} in
  owners | rows | document) "$@" ;;
  *)
    sed -n '2,/^set /{/^#/!d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
