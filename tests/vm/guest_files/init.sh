#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Process 1 of a guest: mounts, network, then the command agent for ever. There is no systemd, so
# that Slurm's own cgroup tree is the only one (cgroup.conf: IgnoreSystemd, EnableControllers).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mountpoint -q /dev || mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -o remount,rw /
# The kernel patches its running code when the first cpuset comes and when the last one goes, which an
# emulated machine with several CPUs does not always survive. So one is there from the start.
echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/always
mkdir -p /sys/fs/cgroup/system.slice # slurmd makes its scope in it, and fails where it is absent

hostname n1
printf '127.0.0.1 localhost\n127.0.1.1 n1\n' >/etc/hosts
ip link set lo up
modprobe -a virtio_net nvme
for _ in {1..100}; do
    card=$(find /sys/class/net -name 'e*' -printf '%f')
    [ -n "$card" ] && break
    sleep 0.1
done
ip link set "$card" up
ip address add 10.0.2.15/24 dev "$card"

echo "init: ready after $(cut -d' ' -f1 /proc/uptime) s" >/dev/console
while :; do
    python3 /usr/local/lib/crater-vm/agent.py </dev/null >/dev/console 2>&1
    echo "init: the agent ended with $?" >/dev/console
    sleep 1
done
