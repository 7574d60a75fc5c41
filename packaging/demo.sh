#!/bin/sh
# The main job on a real, throwaway Slurm: submit, place, prepare, run, explain, refuse.
set -eu
cd "$(dirname "$0")/.."

crater=$PWD/.venv/bin/crater
lab="crater-demo"
if [ "$(id -u)" != 0 ]; then
    echo "make demo starts a Slurm of its own in namespaces, which takes root" >&2
    exit 1
fi

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
in_lab() { "$crater" lab exec "$lab" -- "$@"; }
wait_for() { # job id: until it has ended, 60 s at most
    for _ in $(seq 120); do
        state=$(in_lab scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
        case $state in PENDING | RUNNING | CONFIGURING | COMPLETING) sleep 0.5 ;; *) return 0 ;; esac
    done
    echo "job $1 did not end; its state is $state" >&2
    return 1
}

trap '"$crater" lab down "$lab" >/dev/null 2>&1 || true' EXIT INT TERM
"$crater" lab down "$lab" >/dev/null 2>&1 || true

say "1. A small cluster: real slurmctld and slurmd, seven nodes of six kinds"
"$crater" lab up "$lab"
"$crater" lab exec "$lab" --user root -- "$crater" nodes list

say "2. A batch script says what the work needs"
cat examples/finetune.sh

say "3. sbatch: the filter answers, Slurm takes the job"
job=$("$crater" lab exec "$lab" -- sbatch --parsable examples/finetune.sh)
echo "job $job"
wait_for "$job"

say "4. What the job found on its node"
in_lab cat "slurm-$job.out"

say "5. crater explain $job: why it went where it went, and what it really got"
"$crater" lab exec "$lab" --user root -- "$crater" explain "$job"

say "6. A request that no node can meet is refused at once, with the way out"
"$crater" lab exec "$lab" -- sbatch examples/too_many_cores.sh || true

say "7. The same with numa=best_effort goes through"
"$crater" lab exec "$lab" -- sbatch --comment 'crater: numa=best_effort' examples/too_many_cores.sh
echo
echo "The lab is taken down now. To keep one: $crater lab up"
