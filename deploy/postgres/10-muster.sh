#!/bin/sh
# Mounted with bootstrap.sql into /docker-entrypoint-initdb.d of the postgres image, which sources or runs it once,
# when the database is empty. The image gives POSTGRES_USER (the superuser); compose mounts the password's file.
set -eu
export MUSTER_PASSWORD_FILE="${MUSTER_PASSWORD_FILE:-/run/secrets/postgres_password}"
test -r "$MUSTER_PASSWORD_FILE" || { echo "$MUSTER_PASSWORD_FILE cannot be read" >&2; exit 1; }
psql --no-psqlrc --quiet --username "$POSTGRES_USER" --dbname postgres \
    --file "${MUSTER_BOOTSTRAP_SQL:-/etc/muster/bootstrap.sql}"
