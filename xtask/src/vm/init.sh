#!/bin/busybox sh
# shellcheck shell=sh
# First process of the guest: mounts, loads the modules, gives the NICs to vfio-pci, runs the
# command, and says on the second serial line how it ended.
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/sbin HOME=/tmp LC_ALL=C
# Processes of the guest meet over its NICs, which is what is looked at here.
export BAREWIRE_NEAR=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/hugepages /dev/pts /var/run
# A file system in memory lets everybody write at first, and DPDK takes no plugin from such a place.
chmod 755 /
mount -t tmpfs tmp /tmp
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
chmod 1777 /tmp /dev/shm
ip link set lo up
stty -opost -F /dev/ttyS1
exec </dev/null >/dev/ttyS1 2>&1
while read -r module; do
	insmod "/mods/$module" || echo "VM: insmod $module failed"
done </mods/order
# shellcheck disable=SC1091
. /vm.env
NICS=
count=0
for dev in /sys/bus/pci/devices/*; do
	case $(cat "$dev/class") in
	0x0200*) ;;
	*) continue ;;
	esac
	bdf=${dev##*/}
	export "NIC$count=$bdf"
	count=$((count + 1))
	NICS="$NICS${NICS:+ }$bdf"
done
export NICS
if [ "$BIND" = 1 ]; then
	echo "$HUGEPAGES" >/proc/sys/vm/nr_hugepages
	mount -t hugetlbfs -o pagesize=2M none /dev/hugepages
	for bdf in $NICS; do
		dev=/sys/bus/pci/devices/$bdf
		if [ -e "$dev/driver" ]; then echo "$bdf" >"$dev/driver/unbind"; fi
		echo vfio-pci >"$dev/driver_override"
		echo "$bdf" >/sys/bus/pci/drivers_probe
	done
fi
dmesg -c >/tmp/boot.dmesg
echo "VM-READY $(cut -d' ' -f1 /proc/uptime)"
cd /data || exit 1
# Through a pipe: what the command prints is not for a terminal.
mkfifo /tmp/said
cat </tmp/said &
sh /vm.cmd >/tmp/said 2>&1
code=$?
wait
faults=$(dmesg | grep -c 'DMAR:.*fault addr')
if [ "$faults" -gt 0 ]; then dmesg | grep 'DMAR:' | head -5; fi
if dmesg | grep -q 'BUG:\|Oops\|general protection'; then dmesg | tail -30; fi
echo "VM-RESULT code=$code faults=$faults"
sync
poweroff -f
