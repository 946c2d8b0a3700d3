#!/usr/bin/env bash
# stage.sh LABEL COMMAND...: run COMMAND with its output in build/logs/, show one line while it runs and one when it
# ends; if it fails, show the end of the log and return its exit status.
set -uo pipefail

label=$1
shift
name=$(tr -cs 'a-z0-9\n' '-' <<<"${label,,}")
log=build/logs/${name#-}.log
mkdir -p build/logs

printf '%s ...' "$label"
[ -t 1 ] || printf '\n'
start=$SECONDS
"$@" >"$log" 2>&1 </dev/null &
pid=$!
trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
if [ -t 1 ]; then
    while kill -0 "$pid" 2>/dev/null; do
        printf '\r%s ... %d s' "$label" $((SECONDS - start))
        sleep 0.2
    done
    printf '\r'
fi
wait "$pid"
status=$?
if [ "$status" -eq 0 ]; then
    printf '%s: done in %d s\n' "$label" $((SECONDS - start))
else
    printf '%s: failed with exit status %d; the end of %s:\n' "$label" "$status" "$log"
    tail -n 30 "$log" | grep -v '^WARNING: Location' || true
fi
exit "$status"
