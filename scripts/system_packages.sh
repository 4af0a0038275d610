#!/usr/bin/env bash
# Installs Debian packages whose command of the same name is missing; with --force, whatever is given.
set -euo pipefail
missing=()
if [ "$1" = --force ]; then
    shift
    missing=("$@")
else
    for package in "$@"; do
        command -v "$package" >/dev/null || missing+=("$package")
    done
fi
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "These are needed, and this is not Debian or Ubuntu: ${missing[*]}" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "Install these as root: apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "Installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
