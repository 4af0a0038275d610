#!/usr/bin/env bash
# Puts promtool into .venv/bin, unless there is one. It is taken out of the package of Prometheus, which is not
# installed: that would start a server on this machine, now and at each boot.
set -euo pipefail
cd "$(dirname "$0")/.."
! command -v promtool >/dev/null && [ ! -x .venv/bin/promtool ] || exit 0
command -v apt-get >/dev/null || { echo "promtool is needed, and this is not Debian or Ubuntu" >&2; exit 1; }
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
echo "Installing promtool"
"${as_root[@]}" apt-get update -qq
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus)
dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -x -C "$folder" ./usr/bin/promtool
mv "$folder/usr/bin/promtool" .venv/bin/promtool
