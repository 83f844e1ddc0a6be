#!/bin/bash
# Replaces the containers of replica hosts, then of proxies, then of controllers, one at a time and without failing a
# request, then the console's (people sign in again), by those of the images and the configuration that there are now:
# `make upgrade`. docs/how-to/upgrade.md has the same by hand.
#
# A new container serves before an old one is emptied, stopped and removed, so there is one more of a service meanwhile.
# Containers that are up to date stay. It ends at the first thing that fails, while everything serves.
set -Eeuo pipefail

MUSTER=${MUSTER:-.venv/bin/muster}
START_LIMIT_S=600
DRAIN_LIMIT_S=${DRAIN_LIMIT_S:-1800}
INGRESS_LIMIT_S=60

containers() { docker compose ps --quiet "$1"; }

is_current() { # CONTAINER SERVICE
    local image hash
    image=$(docker image inspect --format '{{.Id}}' "$(docker inspect --format '{{.Config.Image}}' "$1")")
    hash=$(docker compose config --hash "$2")
    [ "$(docker inspect --format '{{.Image}} {{index .Config.Labels "com.docker.compose.config-hash"}}' "$1")" = \
        "$image ${hash#* }" ]
}

wait_for() { # SECONDS WHAT COMMAND...
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || { echo "it did not come about that $what" >&2; return 1; }
        sleep 1
    done
}

are_healthy() { # SERVICE COUNT
    local ids
    ids=$(containers "$1")
    [ -n "$ids" ] && [ "$(docker inspect --format '{{.State.Health.Status}}' $ids | grep -cx healthy)" -ge "$2" ]
}

proxies_that_the_ingress_uses() {
    docker compose exec -T ingress bash -c 'exec 3<>/dev/tcp/127.0.0.1/9104
        printf "GET /metrics?scope=server&no-maint HTTP/1.0\r\n\r\n" >&3; cat <&3' |
        grep -c '^haproxy_server_status{.*state="UP".*} 1' || true
}

does_ingress_use() { [ "$(proxies_that_the_ingress_uses)" -ge "$1" ]; } # COUNT

replace() { # CONTAINER SERVICE COUNT
    local name host
    name=$(docker inspect --format '{{.Name}}' "$1") host=${1:0:12}
    echo "${name#/}: a new container starts beside it"
    docker compose --progress quiet up --detach --no-deps --no-build --no-recreate --scale "$2=$(($3 + 1))" "$2"
    # Compose's own --wait gives up on a container that ends and is started anew, as a host does whose Ray was slow.
    wait_for $START_LIMIT_S "$(($3 + 1)) of $2 are healthy" are_healthy "$2" $(($3 + 1))
    case $2 in
    replica-host) "$MUSTER" host drain "$host" --timeout-s "$DRAIN_LIMIT_S" ;;
    proxy) wait_for $INGRESS_LIMIT_S "the ingress uses $(($3 + 1)) proxies" does_ingress_use $(($3 + 1)) ;;
    esac
    docker stop "$1" >/dev/null
    docker rm "$1" >/dev/null
    # The mark outlasts the host, whose id never comes back.
    [ "$2" != replica-host ] || "$MUSTER" host undrain "$host" >/dev/null
    echo "${name#/}: is replaced"
}

for service in replica-host proxy controller; do
    count=$(containers "$service" | wc -l)
    trap 'echo "stopped; there may be one more $service now than the $count before: run this again, and then
docker compose up -d --no-recreate --scale $service=$count" >&2' ERR
    for container in $(containers "$service"); do
        is_current "$container" "$service" || replace "$container" "$service" "$count"
    done
    echo "$service: $count up to date"
done

# It has one port on the machine, so there cannot be two; no request passes through it.
if [ -n "$(containers console)" ]; then
    docker compose --progress quiet up --detach --no-deps --no-build console
    echo "console: up to date"
fi
