#!/bin/sh
# Installs the Debian packages of the groups named as arguments, those that are missing only.
set -eu

python="python3-venv"
demo="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge lua-posix lua-socket \
    util-linux mount iproute2 procps"
test="lua5.1 lua5.2 lua5.3 lua5.4 lua-check shellcheck hwloc-nox fio mmdebstrap \
    postgresql mariadb-server-core mariadb-client-core slurmdbd sudo"
vm="mmdebstrap qemu-system-x86 seabios ipxe-qemu e2fsprogs gcc libc6-dev"

missing=""
for group in "$@"; do
    case $group in
        python) packages=$python ;;
        demo) packages=$demo ;;
        test) packages=$test ;;
        vm) packages=$vm ;;
        *) echo "$0: unknown group $group; known are python, demo, test, vm" >&2; exit 2 ;;
    esac
    for package in $packages; do
        status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
        [ "$status" = installed ] || missing="$missing $package"
    done
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
    echo "$0: these Debian packages are missing, and only root may install them:$missing" >&2
    exit 1
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086  # a list of words is meant
if ! { apt-get update && apt-get install --yes --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "$0: apt-get could not install$missing" >&2
    exit 1
fi
