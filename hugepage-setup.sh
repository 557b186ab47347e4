#!/bin/sh
# Prepares a machine for barewire's ports on NICs: hugepages, NICs bound to vfio-pci, the right to
# lock memory. What it changed it remembers, and --undo gives it back. Works in any POSIX shell.
# Much is called through `attempt`, which shellcheck does not follow.
# shellcheck disable=SC2317
set -eu

usage() {
	cat <<END
Prepares this machine for barewire's NIC ports (vfio:, dpdk:), and gives it back.

  $SELF [OPTION]...

Hugepages:
  --2m N            reserves N pages of 2 MiB (per NUMA node with --node)
  --1g N            reserves N pages of 1 GiB (most machines give them only soon after boot)
  --node K          of NUMA node K: for the --2m and --1g that follow (default: all nodes together)
NICs:
  --bind NIC...     gives the NICs to vfio-pci; their network interfaces disappear
  --unbind NIC...   gives them back to the drivers that they had
  --force           binds also a NIC that the default route, this ssh session or Open vSwitch uses
Users:
  --group GROUP     lets members of GROUP use the NICs of --bind, without root
  --memlock USER    lets USER (or @GROUP) lock memory without limit, from the next login on
Other:
  --check           changes nothing; says what is missing, exit code 1 if something is
  --persist         does what this call does at every boot (systemd); the last such call counts
  --undo            gives back everything that this script changed
  --help            this text

Without an option: as --check. NIC is a PCI address such as 0000:05:00.0, which barewire info lists,
or a MAC such as 52:54:00:12:34:56. Pages that cannot be had are told and change nothing else.
Exit codes: 0 done; 1 --check misses something; 2 something could not be done, and what.

Examples:
  sudo $CALL --2m 64 --bind 0000:05:00.0 --group "\$(id -gn)" --memlock "\$(id -un)"
  $CALL --check --bind 0000:05:00.0
  sudo $CALL --undo
END
}

# How it is called here: by its name where the shell finds it, as in a package.
SELF=$(basename "$0")
CALL=$0
if [ "$(command -v "$SELF")" = "$0" ]; then CALL=$SELF; fi

# What was changed, one line each, last change last; read backwards by --undo.
STATE=${BAREWIRE_STATE:-/var/lib/barewire/setup}
SYS=${BAREWIRE_SYS:-/sys}
MOUNTS=/dev/hugepages
LIMITS=/etc/security/limits.d/barewire.conf
# MAC and PCI address of each NIC that was bound since the boot: vfio-pci has no file with a MAC.
MACS=/run/barewire-setup.macs
UNIT=/etc/systemd/system/barewire-setup.service
# What the unit runs, where this script is not installed.
COPY=/usr/local/sbin/barewire-hugepage-setup

say() { echo "$*"; }
fail() {
	echo "$SELF: $*" >&2
	exit 2
}

# Does something that may fail without keeping the rest from being done; IS_DONE says how it went.
# Not in a condition, where the shell would go on after a command that failed.
FAILED=0
IS_DONE=1
attempt() {
	set +e
	(
		set -e
		"$@"
	)
	code=$?
	set -e
	IS_DONE=1
	if [ "$code" != 0 ]; then
		IS_DONE=0
		FAILED=2
	fi
}

need_root() {
	[ "$(id -u)" = 0 ] || fail "only root may do that: sudo $CALL $ALL"
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
	mount_pages
	if [ "$got" -lt "$2" ]; then
		fail "memory is too fragmented for $2 pages of $1 kB: try again after a reboot, or ask for less"
	fi
}

mount_pages() {
	grep -q " $MOUNTS hugetlbfs " /proc/mounts && return 0
	mkdir -p "$MOUNTS"
	remember "mount $MOUNTS"
	mount -t hugetlbfs -o mode=1777 none "$MOUNTS"
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

# The network interfaces of a NIC; a virtio device has them one level further down.
interfaces_of() {
	for name in "$SYS/bus/pci/devices/$1"/net/* "$SYS/bus/pci/devices/$1"/virtio*/net/*; do
		if [ -e "$name" ]; then basename "$name"; fi
	done
}

# The MAC of a NIC that has an interface: its own, not that of a bond that it belongs to.
mac_of() {
	for name in $(interfaces_of "$1"); do
		own=$SYS/class/net/$name/bonding_slave/perm_hwaddr
		[ -e "$own" ] || own=$SYS/class/net/$name/address
		cat "$own"
		return
	done
	if [ -e "$MACS" ]; then sed -n "s/ $1\$//p" "$MACS" | tail -n 1; fi
}

# Waits until udev is through with what happened: at boot drivers are still being loaded.
settle() {
	if command -v udevadm >/dev/null; then udevadm settle --timeout=30 || true; fi
}

# The PCI address of a NIC that is named by it or by its MAC.
pci_of() {
	case $1 in
	??:??:??:??:??:??)
		settle
		wanted=$(echo "$1" | tr A-F a-f)
		found=
		for dir in "$SYS"/bus/pci/devices/*; do
			pci=${dir##*/}
			if [ "$(mac_of "$pci")" = "$wanted" ]; then found="$found $pci"; fi
		done
		# shellcheck disable=SC2086
		set -- "$wanted" $found
		[ $# -gt 1 ] || fail "no NIC has the MAC $1; see: ip link"
		[ $# = 2 ] || fail "several NICs have the MAC $1, name one by its address:$found"
		echo "$2"
		;;
	*)
		[ -d "$SYS/bus/pci/devices/$1" ] || fail "there is no PCI device $1; see: barewire info"
		echo "$1"
		;;
	esac
}

# ---- what must not be cut off -------------------------------------------------------------------

# An interface and all that stands on it: bonds, bridges, VLANs.
with_uppers() {
	echo "$1"
	for upper in "$SYS/class/net/$1"/upper_*; do
		if [ -e "$upper" ]; then with_uppers "${upper##*/upper_}"; fi
	done
}

# Interfaces with a default route, of IPv4 and IPv6. The kernel's own route to nowhere is on lo.
default_routes() {
	awk '$2 == "00000000" && $8 == "00000000" { print $1 }' /proc/net/route
	if [ -e /proc/net/ipv6_route ]; then
		awk '$1 ~ /^0+$/ && $2 == "00" && $10 != "lo" { print $10 }' /proc/net/ipv6_route
	fi
	# Those files have one interface of a route over several, and nothing of other tables.
	if command -v ip >/dev/null; then
		for family in -4 -6; do
			ip -o "$family" route show table all || true
		done 2>/dev/null |
			awk '$1 == "default" { for (i = 1; i < NF; i++) if ($i == "dev") print $(i + 1) }'
	fi
}

# The addresses of this machine that the ssh sessions above this process came to. sudo takes the
# variable away, so that those above are asked as well.
ssh_addresses() {
	{
		echo "SSH_CONNECTION=${SSH_CONNECTION:-}"
		pid=$$
		while [ "${pid:-0}" -gt 1 ]; do
			tr '\0' '\n' <"/proc/$pid/environ" || true
			pid=$(awk '/^PPid:/ { print $2 }' "/proc/$pid/status")
		done 2>/dev/null
	} | awk '/^SSH_CONNECTION=/ && NF == 4 { print $3 }' | sort -u
}

# The interfaces that have an address, or that a link-local one names.
interfaces_with() {
	case $1 in
	*%*) echo "${1#*%}" ;;
	*)
		ip -o addr | awk -v wanted="$1" '{ sub("/.*", "", $4); sub("@.*", "", $2) }
			$4 == wanted { print $2 }'
		;;
	esac
}

# What would be cut off if a NIC's interfaces disappeared; nothing if nothing would.
carries() {
	own=
	for name in $(interfaces_of "$1"); do own="$own $(with_uppers "$name")"; done
	[ -n "$own" ] || return 0
	routes=$(default_routes)
	for name in $own; do
		if echo "$routes" | grep -qxF "$name"; then
			echo "the default route ($name)"
			return
		fi
		# The bridges that it is a port of do not stand on it: the kernel links one of all of them.
		if [ "$name" = ovs-system ]; then
			echo "Open vSwitch, with perhaps the default route or this session"
			return
		fi
	done
	for address in $(ssh_addresses); do
		if ! command -v ip >/dev/null; then
			echo "perhaps the ssh session to $address (without the command ip nobody knows)"
			return
		fi
		with=$(interfaces_with "${address#::ffff:}")
		for name in $own; do
			if echo "$with" | grep -qxF "$name"; then
				echo "the ssh session to $address ($name)"
				return
			fi
		done
	done
}

# ---- binding ------------------------------------------------------------------------------------

# Lets a driver have a NIC: address, driver or nothing.
give() {
	dev=$SYS/bus/pci/devices/$1
	if [ -e "$dev/driver" ]; then echo "$1" >"$dev/driver/unbind"; fi
	# An empty line takes the override away.
	echo "$2" >"$dev/driver_override"
	echo "$1" >"$SYS/bus/pci/drivers_probe"
}

bind_nic() {
	pci=$(pci_of "$1")
	set -- "$pci"
	group=$(group_of "$1")
	[ -n "$group" ] || fail "$1 is behind no IOMMU; see how to switch it on: barewire doctor"
	old=$(driver_of "$1")
	if [ "$old" != vfio-pci ]; then
		if [ ! -d "$SYS/bus/pci/drivers/vfio-pci" ]; then
			modprobe vfio-pci || fail "the kernel has no vfio-pci; see: barewire doctor"
		fi
		carried=$(carries "$1")
		if [ -n "$carried" ]; then
			[ "$FORCE" = 1 ] || fail "$1 carries $carried, which would end; if it may: --force"
			say "$1: carried $carried"
		fi
		remember "nic $1 ${old:--}"
		mac=$(mac_of "$1")
		if [ -n "$mac" ]; then
			remember "file $MACS"
			grep -qsxF "$mac $1" "$MACS" || echo "$mac $1" >>"$MACS"
		fi
		give "$1" vfio-pci || true
		if [ "$(driver_of "$1")" != vfio-pci ]; then
			give_back "$1" "${old:--}" || true
			now=$(driver_of "$1")
			fail "vfio-pci does not take $1 (now: ${now:-no driver}); see: dmesg | tail"
		fi
	fi
	say "$1: vfio-pci, IOMMU group $group (was: ${old:-no driver})"
	if [ -n "$GROUP" ]; then
		settle
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
	pci=$(pci_of "$1")
	set -- "$pci"
	old=$(old_driver "$1")
	now=$(driver_of "$1")
	# What a driver of the kernel has is not taken from it: its interface may be in use.
	case $now in
	'' | vfio-pci | uio_pci_generic | igb_uio | pci-stub)
		give "$1" ""
		now=$(driver_of "$1")
		;;
	esac
	if [ -z "$now" ] && [ -n "$old" ] && [ "$old" != - ]; then
		echo "$1" >"$SYS/bus/pci/drivers/$old/bind"
		now=$(driver_of "$1")
	fi
	if [ -e "$STATE" ]; then
		grep -v "^nic $1 " "$STATE" >"$STATE.new" || true
		mv "$STATE.new" "$STATE"
	fi
	if [ -e "$MACS" ]; then sed -i "/ $1\$/d" "$MACS"; fi
	say "$1: ${now:-no driver}"
}

# ---- users --------------------------------------------------------------------------------------

allow_lock() {
	if [ ! -d "${LIMITS%/*}" ]; then
		mkdir -p "${LIMITS%/*}"
		remember "dir ${LIMITS%/*}"
	fi
	line="$1 - memlock unlimited"
	if ! grep -qsxFe "$line" "$LIMITS"; then
		# The file may have lines of others, and barewire doctor has some to write there.
		remember "line $LIMITS $line"
		echo "$line" >>"$LIMITS"
	fi
	say "memlock: unlimited for $1 from the next login on"
}

# ---- over a reboot ------------------------------------------------------------------------------

# A NIC that --bind bound, as the next boot finds it: by MAC, where it is known. A boot may give a
# card another address.
lasting() {
	pci=$(pci_of "$1")
	mac=$(mac_of "$pci")
	echo "${mac:-$pci}"
}

# The unit binds and opens what this call did, no more: a rule of udev would open every group.
persist() {
	[ -d /run/systemd/system ] || fail "--persist needs systemd; call this script at boot instead"
	here=$(cd "$(dirname "$0")" && pwd)/$SELF
	# A boot runs it as root before home directories are mounted, and from no file that others write.
	case $here in
	/usr/*) ;;
	*)
		mkdir -p "$(dirname "$COPY")"
		cp "$here" "$COPY.new"
		chmod 755 "$COPY.new"
		mv "$COPY.new" "$COPY"
		remember "file $COPY"
		here=$COPY
		;;
	esac
	remember "unit $UNIT"
	cat >"$UNIT" <<END
# Written by $CALL --persist; taken away by $CALL --undo.
[Unit]
Description=Hugepages and NICs for barewire ($SELF)
Before=network-pre.target
Wants=network-pre.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh $here$AGAIN

[Install]
WantedBy=multi-user.target
END
	systemctl daemon-reload
	systemctl enable -q "$(basename "$UNIT")"
	say "at every boot: $here$AGAIN"
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
	if [ "$total" = 0 ]; then lacks "no hugepages are reserved" "sudo $CALL --2m 64"; fi
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
		group=$(group_of "$pci")
		if [ "$(driver_of "$pci")" != vfio-pci ]; then
			carried=$(carries "$pci")
			lacks "$pci is not bound to vfio-pci${carried:+, and carries $carried}" \
				"sudo $CALL --bind $pci${carried:+, with --force if that may end}"
		elif [ ! -r "/dev/vfio/$group" ] || [ ! -w "/dev/vfio/$group" ]; then
			lacks "/dev/vfio/$group is not ours to open" "sudo $CALL --bind $pci --group $(id -gn)"
		else
			say "ok:      $pci"
		fi
	done
	# In bytes, of the shell that runs this.
	lock=$(awk '/^Max locked memory/ { print $4 }' /proc/self/limits)
	if [ "$(id -u)" = 0 ] || [ "$lock" = unlimited ]; then
		say "ok:      memory may be locked"
	elif [ "$lock" -lt 8388608 ]; then
		lacks "only $lock bytes may be locked" "sudo $CALL --memlock $(id -un), then log in again"
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
	: >"$STATE.left"
	while read -r kind what value rest; do
		attempt undo_one "$kind" "$what" "$value" "$rest"
		if [ "$IS_DONE" = 0 ]; then
			echo "$kind $what${value:+ $value}${rest:+ $rest}" >>"$STATE.left"
		fi
	done <"$STATE.undo"
	if [ -s "$STATE.left" ]; then
		sed -n '1!G;h;$p' "$STATE.left" >"$STATE"
		rm -f "$STATE.left" "$STATE.undo"
		fail "not everything is as it was: mend what stands above, then again: sudo $CALL --undo"
	fi
	rm -f "$STATE" "$STATE.left" "$STATE.undo"
	say "everything is as it was"
}

# Gives one thing back: the words of its line.
undo_one() {
	case $1 in
	pages) if [ -e "$2/nr_hugepages" ]; then echo "$3" >"$2/nr_hugepages"; fi ;;
	mount) if grep -q " $2 hugetlbfs " /proc/mounts; then umount "$2"; fi ;;
	nic) give_back "$2" "$3" ;;
	owner)
		if [ -e "$2" ]; then
			chown "$3" "$2"
			chmod "$4" "$2"
		fi
		;;
	file) rm -f "$2" ;;
	line) drop_line "$2" "$3 $4" ;;
	dir) if [ -d "$2" ]; then rmdir "$2" 2>/dev/null || say "$2 holds something else and stays"; fi ;;
	unit)
		systemctl disable -q "$(basename "$2")" || true
		rm -f "$2"
		systemctl daemon-reload || true
		;;
	esac
}

# Takes a line out of a file, and the file away if that was all.
drop_line() {
	[ -e "$1" ] || return 0
	grep -vxFe "$2" "$1" >"$1.new" || true
	if [ -s "$1.new" ]; then cat "$1.new" >"$1"; else rm -f "$1"; fi
	rm -f "$1.new"
}

give_back() {
	dev=$SYS/bus/pci/devices/$1
	[ -d "$dev" ] || return 0
	# Another card may have this address since a reboot.
	[ "$(cat "$dev/driver_override")" = vfio-pci ] || return 0
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
FORCE=0
PERSISTS=0
# What a boot does again.
AGAIN=
# What does not depend on the order first.
previous=
for arg in "$@"; do
	case $arg in
	--help | -h) usage && exit 0 ;;
	--check) IS_CHECK=1 ;;
	--force) FORCE=1 ;;
	esac
	if [ "$previous" = --group ]; then GROUP=$arg; fi
	previous=$arg
done
if [ $# = 0 ]; then IS_CHECK=1; fi

value() {
	[ $# -ge 2 ] || fail "$1 needs a value; see: $CALL --help"
}

while [ $# -gt 0 ]; do
	case $1 in
	--2m | --1g)
		value "$@"
		# More digits are more pages than any memory has, and than the shell counts.
		case $2 in *[!0-9]* | '' | ??????????*) fail "$1 $2: not a number of pages" ;; esac
		kb=2048
		if [ "$1" = --1g ]; then kb=1048576; fi
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			attempt reserve "$kb" "$2" "$NODE"
		fi
		AGAIN="$AGAIN $1 $2"
		ACTION=
		shift
		;;
	--node)
		value "$@"
		NODE=$2
		AGAIN="$AGAIN $1 $2"
		ACTION=
		shift
		;;
	--group)
		value "$@"
		AGAIN="$AGAIN $1 $2"
		ACTION=
		shift
		;;
	--memlock)
		value "$@"
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			attempt allow_lock "$2"
		fi
		ACTION=
		shift
		;;
	--bind | --unbind)
		value "$@"
		ACTION=$1
		;;
	--force)
		AGAIN="$AGAIN $1"
		ACTION=
		;;
	--persist)
		PERSISTS=1
		ACTION=
		;;
	--undo)
		if [ "$IS_CHECK" = 0 ]; then
			need_root
			attempt undo
		fi
		ACTION=
		;;
	--check) ACTION= ;;
	-*) fail "no option $1; see: $CALL --help" ;;
	*)
		[ -n "$ACTION" ] || fail "$1: what to do with it? see: $CALL --help"
		if [ "$IS_CHECK" = 1 ]; then
			pci=$(pci_of "$1")
			CHECKED="$CHECKED $pci"
		else
			need_root
			case $ACTION in
			--bind)
				attempt bind_nic "$1"
				if [ "$IS_DONE" = 1 ]; then AGAIN="$AGAIN --bind $(lasting "$1")"; fi
				;;
			--unbind) attempt unbind_nic "$1" ;;
			esac
		fi
		;;
	esac
	shift
done
if [ "$IS_CHECK" = 1 ]; then
	check
	exit
fi
if [ "$PERSISTS" = 1 ]; then
	need_root
	attempt persist
fi
exit "$FAILED"
