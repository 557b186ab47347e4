#!/bin/sh
# Prepares a machine for barewire's ports on NICs: hugepages, NICs bound to vfio-pci, the right to
# lock memory. What it changed it remembers, and --undo gives it back. Works in any POSIX shell.
set -eu

usage() {
	cat <<'END'
Prepares this machine for barewire's NIC ports (vfio:, dpdk:), and gives it back.

  hugepage-setup.sh [OPTION]...

Hugepages:
  --2m N            reserves N pages of 2 MiB (per NUMA node with --node)
  --1g N            reserves N pages of 1 GiB (most machines give them only soon after boot)
  --node K          of NUMA node K: for the --2m and --1g that follow (default: all nodes together)
NICs:
  --bind PCI...     gives the NICs to vfio-pci; their network interfaces disappear
  --unbind PCI...   gives them back to the drivers that they had
Users:
  --group GROUP     lets members of GROUP use the NICs of --bind, without root
  --memlock USER    lets USER (or @GROUP) lock memory without limit, from the next login on
Other:
  --check           changes nothing; says what is missing, exit code 1 if something is
  --persist         keeps hugepages and bindings over a reboot (systemd)
  --undo            gives back everything that this script changed
  --help            this text

Without an option: as --check. PCI is an address such as 0000:05:00.0; barewire info lists them.

Examples:
  sudo ./hugepage-setup.sh --2m 64 --bind 0000:05:00.0 --group "$(id -gn)" --memlock "$(id -un)"
  ./hugepage-setup.sh --check --bind 0000:05:00.0
  sudo ./hugepage-setup.sh --undo
END
}

# What was changed, one line each, last change last; read backwards by --undo.
STATE=${BAREWIRE_STATE:-/var/lib/barewire/setup}
SYS=${BAREWIRE_SYS:-/sys}
MOUNTS=/dev/hugepages
LIMITS=/etc/security/limits.d/barewire.conf
UDEV=/etc/udev/rules.d/70-barewire.rules
UNIT=/etc/systemd/system/barewire-setup.service

say() { echo "$*"; }
fail() {
	echo "hugepage-setup.sh: $*" >&2
	exit 2
}

need_root() {
	[ "$(id -u)" = 0 ] || fail "only root may do that: sudo $0 $ALL"
}

# Once: what --persist does again at every boot is given back once.
remember() {
	mkdir -p "${STATE%/*}"
	grep -qsxF "$*" "$STATE" || echo "$*" >>"$STATE"
}

# ---- hugepages ----------------------------------------------------------------------------------

# The folder of a page size (kB), of a node or of all.
pages_dir() {
	if [ -n "$2" ]; then
		echo "$SYS/devices/system/node/node$2/hugepages/hugepages-$1kB"
	else
		echo "$SYS/kernel/mm/hugepages/hugepages-$1kB"
	fi
}

# Reserves pages: size in kB, count, node.
reserve() {
	dir=$(pages_dir "$1" "$3")
	[ -d "$dir" ] || fail "no pages of $1 kB here${3:+ on node $3}: see ls $SYS/kernel/mm/hugepages"
	before=$(cat "$dir/nr_hugepages")
	if [ "$before" -lt "$2" ]; then
		remember "pages $dir $before"
		echo "$2" >"$dir/nr_hugepages"
	fi
	got=$(cat "$dir/nr_hugepages")
	say "pages of $1 kB${3:+ on node $3}: $got (asked: $2)"
	if [ "$got" -lt "$2" ]; then
		fail "memory is too fragmented for $2 pages of $1 kB: try again after a reboot, or ask for less"
	fi
}

mount_pages() {
	grep -q " $MOUNTS hugetlbfs " /proc/mounts && return 0
	mkdir -p "$MOUNTS"
	mount -t hugetlbfs -o mode=1777 none "$MOUNTS"
	remember "mount $MOUNTS"
}

# ---- NICs ---------------------------------------------------------------------------------------

driver_of() {
	if [ -e "$SYS/bus/pci/devices/$1/driver" ]; then
		basename "$(readlink "$SYS/bus/pci/devices/$1/driver")"
	fi
}

group_of() {
	if [ -e "$SYS/bus/pci/devices/$1/iommu_group" ]; then
		basename "$(readlink "$SYS/bus/pci/devices/$1/iommu_group")"
	fi
}

check_pci() {
	[ -d "$SYS/bus/pci/devices/$1" ] || fail "there is no PCI device $1; see: barewire info"
}

# Lets a driver have a NIC: address, driver or nothing.
give() {
	dev=$SYS/bus/pci/devices/$1
	if [ -e "$dev/driver" ]; then echo "$1" >"$dev/driver/unbind"; fi
	# An empty line takes the override away.
	echo "$2" >"$dev/driver_override"
	echo "$1" >"$SYS/bus/pci/drivers_probe"
}

bind_nic() {
	check_pci "$1"
	group=$(group_of "$1")
	[ -n "$group" ] || fail "$1 is behind no IOMMU; see how to switch it on: barewire doctor"
	old=$(driver_of "$1")
	if [ "$old" != vfio-pci ]; then
		if [ ! -d "$SYS/bus/pci/drivers/vfio-pci" ]; then
			modprobe vfio-pci || fail "the kernel has no vfio-pci; see: barewire doctor"
		fi
		remember "nic $1 ${old:--}"
		give "$1" vfio-pci
		[ "$(driver_of "$1")" = vfio-pci ] || fail "vfio-pci does not take $1; see: dmesg | tail"
	fi
	say "$1: vfio-pci, IOMMU group $group (was: ${old:-no driver})"
	if [ -n "$GROUP" ]; then
		remember "owner /dev/vfio/$group $(stat -c '%u:%g %a' "/dev/vfio/$group")"
		chown ":$GROUP" "/dev/vfio/$group"
		chmod 660 "/dev/vfio/$group"
		say "/dev/vfio/$group: for members of $GROUP"
	fi
}

# The driver that a NIC had before --bind, if it was this script that bound it.
old_driver() {
	[ -e "$STATE" ] || return 0
	sed -n "s/^nic $1 //p" "$STATE" | head -n 1
}

unbind_nic() {
	check_pci "$1"
	give "$1" ""
	old=$(old_driver "$1")
	now=$(driver_of "$1")
	if [ -z "$now" ] && [ -n "$old" ] && [ "$old" != - ]; then
		echo "$1" >"$SYS/bus/pci/drivers/$old/bind"
		now=$(driver_of "$1")
	fi
	if [ -e "$STATE" ]; then
		grep -v "^nic $1 " "$STATE" >"$STATE.new" || true
		mv "$STATE.new" "$STATE"
	fi
	say "$1: ${now:-no driver}"
}

# ---- users --------------------------------------------------------------------------------------

allow_lock() {
	if [ ! -d "${LIMITS%/*}" ]; then
		mkdir -p "${LIMITS%/*}"
		remember "dir ${LIMITS%/*}"
	fi
	if ! grep -qs "^$1 - memlock unlimited" "$LIMITS"; then
		remember "file $LIMITS"
		echo "$1 - memlock unlimited" >>"$LIMITS"
	fi
	say "memlock: unlimited for $1 from the next login on"
}

# ---- over a reboot ------------------------------------------------------------------------------

persist() {
	[ -d /run/systemd/system ] || fail "--persist needs systemd; call this script at boot instead"
	here=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
	again=$(echo "$ALL" | sed 's/--persist//')
	remember "unit $UNIT"
	cat >"$UNIT" <<END
[Unit]
Description=Hugepages and NICs for barewire
Before=network-pre.target
Wants=network-pre.target

[Service]
Type=oneshot
ExecStart=$here $again

[Install]
WantedBy=multi-user.target
END
	systemctl daemon-reload
	systemctl enable -q "$(basename "$UNIT")"
	if [ -n "$GROUP" ]; then
		remember "file $UDEV"
		echo "SUBSYSTEM==\"vfio\", KERNEL!=\"vfio\", GROUP=\"$GROUP\", MODE=\"0660\"" >"$UDEV"
	fi
	say "at every boot: $here $again"
}

# ---- check and undo -----------------------------------------------------------------------------

MISSING=0
lacks() {
	MISSING=1
	say "missing: $1"
	say "         mend: $2"
}

check() {
	total=0
	for dir in "$SYS"/kernel/mm/hugepages/*; do
		[ -e "$dir/nr_hugepages" ] || continue
		count=$(cat "$dir/nr_hugepages")
		total=$((total + count))
		if [ "$count" -gt 0 ]; then
			name=${dir##*-}
			say "ok:      $count hugepages of $name, $(cat "$dir/free_hugepages") free"
		fi
	done
	if [ "$total" = 0 ]; then lacks "no hugepages are reserved" "sudo $0 --2m 64"; fi
	if [ -n "$(ls -A "$SYS/kernel/iommu_groups" 2>/dev/null)" ]; then
		say "ok:      an IOMMU"
	else
		lacks "no IOMMU" "barewire doctor"
	fi
	if [ -d "$SYS/bus/pci/drivers/vfio-pci" ]; then
		say "ok:      vfio-pci"
	else
		lacks "vfio-pci is not loaded" "sudo modprobe vfio-pci"
	fi
	for pci in $CHECKED; do
		check_pci "$pci"
		group=$(group_of "$pci")
		if [ "$(driver_of "$pci")" != vfio-pci ]; then
			lacks "$pci is not bound to vfio-pci" "sudo $0 --bind $pci"
		elif [ ! -r "/dev/vfio/$group" ] || [ ! -w "/dev/vfio/$group" ]; then
			lacks "/dev/vfio/$group is not ours to open" "sudo $0 --bind $pci --group $(id -gn)"
		else
			say "ok:      $pci"
		fi
	done
	# In bytes, of the shell that runs this.
	lock=$(awk '/^Max locked memory/ { print $4 }' /proc/self/limits)
	if [ "$(id -u)" = 0 ] || [ "$lock" = unlimited ]; then
		say "ok:      memory may be locked"
	elif [ "$lock" -lt 8388608 ]; then
		lacks "only $lock bytes may be locked" "sudo $0 --memlock $(id -un), then log in again"
	else
		say "ok:      $lock bytes may be locked: enough for the default sizes"
	fi
	return "$MISSING"
}

undo() {
	if [ ! -e "$STATE" ]; then
		say "nothing to give back"
		return 0
	fi
	# Backwards: what was changed last goes first.
	sed -n '1!G;h;$p' "$STATE" >"$STATE.undo"
	while read -r kind what value rest; do
		case $kind in
		pages) echo "$value" >"$what/nr_hugepages" ;;
		mount) umount "$what" || say "$what is in use and stays mounted" ;;
		nic) give_back "$what" "$value" ;;
		owner) if [ -e "$what" ]; then chown "$value" "$what" && chmod "$rest" "$what"; fi ;;
		file) rm -f "$what" ;;
		dir) rmdir "$what" 2>/dev/null || say "$what holds something else and stays" ;;
		unit)
			systemctl disable -q "$(basename "$what")" || true
			rm -f "$what"
			;;
		esac
	done <"$STATE.undo"
	rm -f "$STATE" "$STATE.undo"
	say "everything is as it was"
}

give_back() {
	dev=$SYS/bus/pci/devices/$1
	[ -d "$dev" ] || return 0
	if [ "$2" = - ]; then
		# It had no driver, and gets none.
		if [ -e "$dev/driver" ]; then echo "$1" >"$dev/driver/unbind"; fi
		echo "" >"$dev/driver_override"
		return 0
	fi
	give "$1" ""
	if [ -z "$(driver_of "$1")" ]; then
		echo "$1" >"$SYS/bus/pci/drivers/$2/bind" || say "$2 does not take $1 back"
	fi
}

# ---- arguments ----------------------------------------------------------------------------------

ALL=$*
ACTION=
NODE=
GROUP=
CHECKED=
IS_CHECK=0
# What does not depend on the order first.
previous=
for arg in "$@"; do
	case $arg in
	--help | -h) usage && exit 0 ;;
	--check) IS_CHECK=1 ;;
	esac
	if [ "$previous" = --group ]; then GROUP=$arg; fi
	previous=$arg
done
if [ $# = 0 ]; then IS_CHECK=1; fi

value() {
	[ $# -ge 2 ] || fail "$1 needs a value; see: $0 --help"
}

while [ $# -gt 0 ]; do
	case $1 in
	--2m | --1g)
		value "$@"
		case $2 in *[!0-9]* | '') fail "$1 $2: not a number of pages" ;; esac
		kb=2048
		if [ "$1" = --1g ]; then kb=1048576; fi
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			reserve "$kb" "$2" "$NODE"
			mount_pages
		fi
		ACTION=
		shift
		;;
	--node)
		value "$@"
		NODE=$2
		ACTION=
		shift
		;;
	--group)
		value "$@"
		ACTION=
		shift
		;;
	--memlock)
		value "$@"
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			allow_lock "$2"
		fi
		ACTION=
		shift
		;;
	--bind | --unbind)
		value "$@"
		ACTION=$1
		;;
	--persist)
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			persist
		fi
		ACTION=
		;;
	--undo)
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			undo
		fi
		ACTION=
		;;
	--check) ACTION= ;;
	-*) fail "no option $1; see: $0 --help" ;;
	*)
		[ -n "$ACTION" ] || fail "$1: what to do with it? see: $0 --help"
		if [ "$IS_CHECK" = 1 ]; then
			CHECKED="$CHECKED $1"
		else
			need_root
			case $ACTION in
			--bind) bind_nic "$1" ;;
			--unbind) unbind_nic "$1" ;;
			esac
		fi
		;;
	esac
	shift
done
if [ "$IS_CHECK" = 1 ]; then check; fi
