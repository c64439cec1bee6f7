#!/usr/bin/env bash
# Build the image for the CPU, run it as in production, ask it for a prediction, and stop it.
#
#     scripts/check_image.sh [OPTIONS OF BUILD]
#
# Ends with status 77, and says why, if no container can be built here.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "skipped: $1"
    exit 77
}

engine=
for each in docker podman; do
    if "$each" info >/dev/null 2>&1; then
        engine=$each
        break
    fi
done
[[ -n $engine ]] || skip "neither docker nor podman has an engine that works"
base=$(sed -n 's/^FROM \(.*\) AS python$/\1/p' deploy/docker/Dockerfile)
"$engine" image inspect "$base" >/dev/null 2>&1 || "$engine" pull --quiet "$base" >/dev/null 2>&1 ||
    skip "$engine cannot get the image $base"

"$engine" build --file deploy/docker/Dockerfile --target cpu --tag service-streamer:checked "$@" .

name=service-streamer-check-$$
trap '"$engine" rm --force "$name" >/dev/null 2>&1 || true' EXIT
"$engine" run --detach --name "$name" --read-only --tmpfs /tmp --cap-drop ALL \
    --security-opt no-new-privileges service-streamer:checked serve --web-workers 2 >/dev/null

inside() { "$engine" exec "$name" "$@"; }
failed() {
    "$engine" logs "$name" >&2
    echo "failed: $1" >&2
    exit 1
}

for _ in {1..120}; do
    if inside healthcheck /health/ready 2>/dev/null; then
        is_ready=1
        break
    fi
    sleep 1
done
[[ -n ${is_ready-} ]] || failed "the service is not ready within two minutes"
[[ $(inside id -u) == 10001 ]] || failed "the user is not 10001"
! inside sh -c ': >/file' 2>/dev/null || failed "the root can be written to"
! inside sh -c 'command -v gcc cc make' || failed "build tools are in the image"
inside python3 -c '
import urllib.request

body = b"{\"inputs\": [\"Happy birthday to [MASK].\"]}"
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/predict", body, headers)
assert b"happy birthday to you" in urllib.request.urlopen(request, timeout=30).read()
' || failed "there is no prediction"

"$engine" stop --time 50 "$name" >/dev/null
status=$("$engine" inspect --format '{{.State.ExitCode}}' "$name")
[[ $status == 0 ]] || failed "the service ended with status $status after SIGTERM"
echo "built and run with $engine"
