#!/usr/bin/env bash
# Install Debian's chromium for the tests of the console, where there is no browser, and who runs this may.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null; then exit 0; fi
done
command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } > /dev/null 2>&1
