#!/bin/sh
# Epilog= of slurm.conf: asks crater-io-daemon through hooks/client.py, and never fails a job.
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

# The daemon leaves a mark for every job that it prepared; it has nothing to undo for the others.
[ -e "$run/jobs/${SLURM_JOB_ID:-none}" ] || exit 0

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

# Whatever happens, the node stays in service: a non-zero Epilog would drain it.
"$python" -I -S -E "$client" epilog "$@" >/dev/null 2>&1

# The daemon takes the mark away. If it did not, it is dead or hangs, and finds this note later.
# In a shell of its own: a redirection that fails would end this one with an error.
[ -e "$run/jobs/$SLURM_JOB_ID" ] && (: >"$run/ended/$SLURM_JOB_ID") 2>/dev/null
exit 0
