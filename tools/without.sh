#!/usr/bin/env bash
# tools/without.sh "ROOM..." COMMAND...: runs it while these folders, and their tests, are not there. ROOM is unets, batches or
# benchmarks, none of which the core needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
aside=build/aside
places=()
for room in $1; do
  [ "$room" = benchmarks ] && places+=(benchmarks) || places+=("sd_lowvram/$room")
  places+=("tests/$room")
done

back() {
  for place in "${places[@]}"; do
    [ ! -e "$aside/$place" ] || { rm -rf "$place" && mv "$aside/$place" "$place"; }
  done
}
[ ! -e "$aside" ] || { echo "$aside is there from a run that was killed: move what it holds back" >&2; exit 1; }
trap 'back; rm -rf "$aside"' EXIT
trap 'exit 130' INT TERM
for place in "${places[@]}"; do
  mkdir -p "$aside/$(dirname "$place")"
  mv "$place" "$aside/$place"
done
"${@:2}"
