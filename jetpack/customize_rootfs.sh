#!/usr/bin/env bash
# Makes the appliance of NVIDIA's root file system, after apply_binaries.sh.
#   customize_rootfs.sh ROOTFS [--deb FILE]... [--ssh-key FILE.pub] [--provision-key FILE.pem]
#                       [--compatible NAME --keyring FILE.pem]
#
#   --deb FILE             installed with its dependencies: edge-server_*_arm64.deb
#   --ssh-key FILE.pub     who may log in on every board of this image, as user edge
#   --provision-key FILE   Ed25519 public key (PEM): only provisioning files that it signed count
#   --compatible, --keyring   installs RAUC for bundles of that name and those certificates; see
#                          update/install
#
# A second run with the same arguments changes nothing. Programs of the root file system run in it, on
# another architecture under qemu; mounts are those of this process alone and end with it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

fail() {
    echo "customize_rootfs.sh: $*" >&2
    exit 1
}

rootfs='' debs=() ssh_key='' provision_key='' compatible='' keyring=''
arguments=("$@")
while [ $# != 0 ]; do
    case $1 in
    --deb) debs+=("$(realpath -m "${2:?--deb needs a file}")") && shift ;;
    --ssh-key) ssh_key=${2:?--ssh-key needs a file} && shift ;;
    --provision-key) provision_key=${2:?--provision-key needs a file} && shift ;;
    --compatible) compatible=${2:?--compatible needs a name} && shift ;;
    --keyring) keyring=$(realpath -m "${2:?--keyring needs a file}") && shift ;;
    -*) fail "$1: unknown; the first lines of $0 list the options" ;;
    *) rootfs=$1 ;;
    esac
    shift
done
[ "$rootfs" ] || fail "ROOTFS is missing: the folder Linux_for_Tegra/rootfs"
[ "$(id -u)" = 0 ] || fail "needs root: the files of the root file system have owners"
rootfs=$(realpath -m "$rootfs")
[ "$rootfs" != / ] || fail "/ is this machine's own root file system"
[ -f "$rootfs/var/lib/dpkg/status" ] || fail "$rootfs: no root file system of Debian or Ubuntu"
[ -s "$rootfs/etc/nv_tegra_release" ] || fail "$rootfs/etc/nv_tegra_release: missing; run apply_binaries.sh first"
for file in "${debs[@]}" ${ssh_key:+"$ssh_key"} ${provision_key:+"$provision_key"} ${keyring:+"$keyring"}; do
    [ -f "$file" ] || fail "$file: no such file"
done
[ ! "$ssh_key" ] || ssh-keygen -l -f "$ssh_key" >/dev/null 2>&1 || fail "$ssh_key: no public key of ssh"
[ ! "$ssh_key" ] || ! grep -q 'PRIVATE KEY' "$ssh_key" || fail "$ssh_key: this is the private key; give the .pub"
[ ! "$provision_key" ] || openssl pkey -pubin -in "$provision_key" -noout -text 2>/dev/null | grep -q ED25519 ||
    fail "$provision_key: no Ed25519 public key in PEM; see docs/flash.md"

[ "${compatible:+yes}" = "${keyring:+yes}" ] || fail "--compatible and --keyring belong together"

# Its own mounts, gone with it however it ends.
if [ "${EDGE_OWN_MOUNTS:-}" != "$$" ]; then
    # shellcheck disable=SC2016 # it is the inner shell's to expand
    exec unshare --mount --propagation private bash -c 'EDGE_OWN_MOUNTS=$$ exec "$0" "$@"' "$0" "${arguments[@]}"
fi

changes=0
changed() {
    echo "  $*"
    changes=$((changes + 1))
}
inside() { chroot "$rootfs" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive HOME=/root "$@"; }

# put MODE SOURCE TARGET: a file of root's, written only where it is not there just so.
put() {
    local target=$rootfs/$3
    if ! cmp -s "$2" "$target" || [ "$(stat -c %a:%u:%g "$target")" != "$1:0:0" ]; then
        install -D -o root -g root -m "$1" "$2" "$target"
        changed "/$3"
    fi
}
# put_text MODE TARGET: likewise, the text on stdin.
put_text() {
    local text
    text=$(mktemp)
    cat >"$text"
    put "$1" "$text" "$2"
    rm "$text"
}
# empty PATTERN...: of what identifies a machine or is left of the build, nothing stays.
empty() {
    local path
    for path in "$@"; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        rm -rf "$path"
        changed "removed ${path#"$rootfs"}"
    done
}

mount_for_programs() {
    local machine release
    machine=$(head -n1 "$rootfs/var/lib/dpkg/arch" 2>/dev/null || true)
    [ "$machine" ] || machine=$(awk '$1 == "Package:" && $2 == "dpkg" { found = 1 } found && $1 == "Architecture:" { print $2; exit }' "$rootfs/var/lib/dpkg/status")
    if [ "$machine" = arm64 ] && [ "$(uname -m)" != aarch64 ]; then
        # F: the kernel holds the emulator open, so it is found in the chroot.
        grep -qs '^flags:.*F' /proc/sys/fs/binfmt_misc/qemu-aarch64 ||
            fail "arm64 programs cannot run here: apt install qemu-user-static binfmt-support"
    fi
    mount -t proc proc "$rootfs/proc"
    mount -t tmpfs -o mode=755 tmpfs "$rootfs/run"
    mount -t tmpfs -o mode=1777 tmpfs "$rootfs/tmp"
    for node in null zero full random urandom tty; do
        [ -e "$rootfs/dev/$node" ] || touch "$rootfs/dev/$node"
        mount --bind "/dev/$node" "$rootfs/dev/$node"
    done
    # Names, for apt: what the image links to is there only once it runs.
    release=$(readlink -m "$rootfs/etc/resolv.conf")
    if [[ $release == "$rootfs"/* || $release == /run/* ]]; then
        release=$rootfs/${release#"$rootfs"}
        if [ -L "$rootfs/etc/resolv.conf" ]; then
            mkdir -p "$(dirname "$release")"
            cp /etc/resolv.conf "$release" 2>/dev/null || true
        elif [ -f "$rootfs/etc/resolv.conf" ]; then
            mount --bind /etc/resolv.conf "$rootfs/etc/resolv.conf"
        fi
    fi
    # No service of the image starts on this machine. Over the image's own file, if it has one.
    printf '#!/bin/sh\nexit 101\n' >"$rootfs/run/policy-rc.d"
    chmod 755 "$rootfs/run/policy-rc.d"
    [ -e "$rootfs/usr/sbin/policy-rc.d" ] || : >"$rootfs/usr/sbin/policy-rc.d"
    mount --bind "$rootfs/run/policy-rc.d" "$rootfs/usr/sbin/policy-rc.d"
}
unmount() {
    umount "$rootfs/usr/sbin/policy-rc.d"
    # Empty: it was only there to be mounted over.
    [ -s "$rootfs/usr/sbin/policy-rc.d" ] || rm "$rootfs/usr/sbin/policy-rc.d"
}

# NVIDIA leaves the name of the chip open in its list of sources; Orin's is t234.
name_the_chip() {
    local list=$rootfs/etc/apt/sources.list.d/nvidia-l4t-apt-source.list
    if grep -qs '<SOC>' "$list"; then
        sed -i 's/<SOC>/t234/' "$list"
        changed "apt: t234 in ${list##*/}"
    fi
}

install_packages() {
    local wanted=() package command deb name version sums=$rootfs/usr/lib/edge-server-image/packages.sha256
    while read -r package command; do
        [[ $package == \#* || -z $package ]] && continue
        # shellcheck disable=SC2016 # likewise
        inside sh -c 'command -v "$1" >/dev/null' sh "$command" || wanted+=("$package")
    done <"$here/packages.list"
    [ ! "$keyring" ] || inside sh -c 'command -v rauc >/dev/null' || wanted+=(rauc)
    for deb in "${debs[@]}"; do
        name=$(dpkg-deb -f "$deb" Package)
        version=$(dpkg-deb -f "$deb" Version)
        # shellcheck disable=SC2016 # dpkg-query's fields
        if [ "$(inside dpkg-query -W -f '${db:Status-Status} ${Version}' "$name" 2>/dev/null)" != "installed $version" ] ||
            ! grep -qs "^$(sha256sum <"$deb" | cut -d' ' -f1)  " "$sums"; then
            cp "$deb" "$rootfs/tmp/"
            wanted+=("/tmp/$(basename "$deb")")
        fi
    done
    [ ${#wanted[@]} != 0 ] || return 0
    # Left over of a run that was interrupted.
    inside dpkg --configure -a
    inside apt-get -q -y -o Dpkg::Options::=--force-confold --reinstall install "${wanted[@]}" >"$rootfs/tmp/apt.log" 2>&1 || {
        # Nobody has fetched the lists of packages yet.
        inside apt-get -q update >>"$rootfs/tmp/apt.log" 2>&1 &&
            inside apt-get -q -y -o Dpkg::Options::=--force-confold --reinstall install "${wanted[@]}" >>"$rootfs/tmp/apt.log" 2>&1
    } || {
        tail -n 30 "$rootfs/tmp/apt.log" >&2
        fail "apt cannot install ${wanted[*]}; its last lines are above"
    }
    changed "installed ${wanted[*]}"
    inside apt-get -q clean
    mkdir -p "$(dirname "$sums")"
    for deb in "${debs[@]}"; do
        echo "$(sha256sum <"$deb" | cut -d' ' -f1)  $(basename "$deb")"
    done >"$sums"
}

# TensorRT's library has dependencies that no package names: whether it loads shows here, not on a board.
load_tensorrt() {
    local library said
    for library in "$rootfs"/usr/lib/*-linux-gnu/libnvinfer.so.[0-9]*; do
        [ -e "$library" ] || continue
        said=$(inside /usr/bin/python3 -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${library#"$rootfs"}" 2>&1) ||
            fail "TensorRT does not load in the image: ${said##*OSError: }; libnvdla_compiler.so is of nvidia-l4t-dla-compiler, what else is missing of nvidia-l4t-cuda or cuda-cudart"
    done
}

copy_overlay() {
    local file mode
    while IFS= read -r file; do
        mode=644
        case $file in usr/lib/edge-server-image/firstboot) mode=755 ;; etc/sudoers.d/*) mode=440 ;; esac
        put $mode "$here/overlay/$file" "$file"
    done < <(cd "$here/overlay" && find . -type f -printf '%P\n' | sort)
    [ ! "$ssh_key" ] || put 644 "$ssh_key" etc/ssh/authorized_keys.d/edge
    [ ! "$provision_key" ] || put 644 "$provision_key" usr/lib/edge-server-image/provision.pem
    # NVIDIA's own, where there is one, is for its user of the developer kit.
    echo edge-server | put_text 644 etc/hostname
}

install_update() {
    [ "$keyring" ] || return 0
    if ! cmp -s "$keyring" "$rootfs/etc/rauc/keyring.pem" || ! grep -qs "^compatible=$compatible$" "$rootfs/etc/rauc/system.conf"; then
        changed "RAUC for $compatible"
    fi
    "$here/update/install" "$rootfs" --compatible "$compatible" --keyring "$keyring"
}

make_user() {
    local user
    if ! grep -q '^edge:' "$rootfs/etc/passwd"; then
        # `*`: no password is right, and ssh does not take the account for a locked one.
        inside useradd --create-home --shell /bin/bash --password '*' edge
        changed "user edge"
    fi
    if ! grep -q '^root:[!*]' "$rootfs/etc/shadow"; then
        inside passwd --quiet --lock root
        changed "locked root"
    fi
    user=$(awk -F: '$2 !~ /^[!*]/ { print $1; exit }' "$rootfs/etc/shadow")
    [ ! "$user" ] || fail "user $user has a password that every board would share, or an empty one: chroot $rootfs userdel -r $user"
}

enable_units() {
    local unit
    while read -r _ unit; do
        [ -e "$rootfs/usr/lib/systemd/system/$unit" ] || [ -e "$rootfs/lib/systemd/system/$unit" ] || continue
        systemctl --quiet --root="$rootfs" is-enabled "$unit" >/dev/null 2>&1 && continue
        systemctl --quiet --root="$rootfs" enable "$unit" 2>/dev/null
        changed "enabled $unit"
    done < <(cat "$here"/overlay/usr/lib/systemd/system-preset/*.preset "$rootfs"/usr/lib/systemd/system-preset/edge-server.preset 2>/dev/null)
    if [ "$(systemctl --root="$rootfs" get-default)" != multi-user.target ]; then
        systemctl --quiet --root="$rootfs" set-default multi-user.target 2>/dev/null
        changed "headless: multi-user.target"
    fi
    # An appliance changes by updates that somebody chose.
    for unit in apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service; do
        [ -e "$rootfs/lib/systemd/system/$unit" ] || [ -e "$rootfs/usr/lib/systemd/system/$unit" ] || continue
        [ "$(readlink "$rootfs/etc/systemd/system/$unit")" = /dev/null ] && continue
        systemctl --quiet --root="$rootfs" mask "$unit" 2>/dev/null
        changed "masked $unit"
    done
}

hold_nvidia() {
    local package
    while read -r package; do
        echo "$package hold" | dpkg --root="$rootfs" --set-selections
        changed "held $package"
    done < <(dpkg-query --admindir="$rootfs/var/lib/dpkg" -W -f '${Status} ${Package}\n' 'nvidia-l4t-*' 2>/dev/null |
        awk '$3 == "installed" && $1 != "hold" { print $4 }')
}

# Each board makes its own at its first boot. The machine id is empty, not missing: without the file
# systemd takes every boot for the first one, and enables units as presets say.
remove_identity() {
    if [ -s "$rootfs/etc/machine-id" ] || [ ! -f "$rootfs/etc/machine-id" ] || [ -L "$rootfs/etc/machine-id" ]; then
        rm -f "$rootfs/etc/machine-id"
        install -m 644 /dev/null "$rootfs/etc/machine-id"
        changed "empty machine id"
    fi
    if [ -d "$rootfs/var/lib/dbus" ] && [ "$(readlink "$rootfs/var/lib/dbus/machine-id")" != /etc/machine-id ]; then
        ln -sf /etc/machine-id "$rootfs/var/lib/dbus/machine-id"
        changed "D-Bus' machine id is the system's"
    fi
    shopt -s nullglob
    empty "$rootfs"/etc/ssh/ssh_host_* "$rootfs"/var/lib/systemd/random-seed "$rootfs"/var/lib/systemd/credential.secret \
        "$rootfs"/var/lib/NetworkManager/* "$rootfs"/etc/NetworkManager/system-connections/* "$rootfs"/root/.ssh \
        "$rootfs"/root/.bash_history "$rootfs"/var/log/journal/* "$rootfs"/var/cache/apt/*.bin \
        "$rootfs"/var/cache/apt/archives/*.deb
    shopt -u nullglob
}

echo "$rootfs:"
mount_for_programs
name_the_chip
install_packages
load_tensorrt
copy_overlay
install_update
make_user
unmount
enable_units
hold_nvidia
remove_identity
echo "$changes changes"
