#!/bin/sh
# Prolog= of slurm.conf: asks crater-io-daemon through hooks/client.py, and never fails a job.
# Arguments (socket=PATH, off=PATH, timeout=SECONDS) are for sites that wrap this script.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
off=/etc/crater/off
socket=/run/crater/node.sock
for argument in "$@"; do
    case "$argument" in
    off=*) off=${argument#off=} ;;
    socket=*) socket=${argument#socket=} ;;
    esac
done
[ -e "$off" ] && exit 0
run=${socket%/*}

# A job without a plan needs nothing from us, unless the daemon says that it wants them all.
case "${SLURM_JOB_COMMENT-}${SLURM_JOB_EXTRA-}" in
*crater-plan:*) ;;
*) [ -e "$run/jobs/all" ] || exit 0 ;;
esac

self=$0
[ -h "$self" ] && self=$(readlink -f "$self")
here=${self%/*}
# Installed, in a source checkout, inside the wheel, or copied somewhere else.
for client in "$here/../hooks/client.py" "$here/../crater_slurm/hooks/client.py" \
    "$here/../../hooks/client.py" /usr/lib/crater/hooks/client.py; do
    [ -r "$client" ] && break
done
for python in /usr/bin/python3 /usr/libexec/platform-python /usr/local/bin/python3; do
    [ -x "$python" ] && break
done

# A broken Python, a signal, a missing file: none of them may drain the node. Only 10 and 11, which
# the daemon sends when the site asked for it (docs/hooks.md), mean that it must not run jobs.
"$python" -I -S -E "$client" prolog "$@" >/dev/null 2>&1
code=$?
case "$code" in
10 | 11) exit "$code" ;;
esac
exit 0
