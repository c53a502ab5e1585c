#!/usr/bin/env bash
# Flashes a board with the root file system that customize_rootfs.sh prepared.
#   flash.sh --board BOARD [OPTION...]        the board is in recovery mode, on USB, and is erased
#   flash.sh --board BOARD --dry-run          prints NVIDIA's commands and what is missing; does nothing
#   flash.sh --list                           boards
#
#   --storage nvme|sd|emmc    where the system goes; default: nvme
#   --no-ab                   one root file system instead of slots A and B: no update without risk
#   --jetpack VERSION         as in versions.env; default: 6.2.2
#   --tree FOLDER             default: build/jetpack/VERSION/Linux_for_Tegra
#   --conf NAME               of a carrier that is not NVIDIA's: its .conf in the tree
#   --app-size SIZE           of each root file system (NVIDIA's -S): 16GiB
#   --disk-sectors N          of the smallest disk, in 512 bytes, where it has less than 64 GB
#   --mass N                  writes a package for up to N boards at once instead of flashing one
#   --flash-only N            flashes it: up to N boards of the same module, in recovery mode
#   --module SKU [--fab F] [--rev R]   makes images without a board: 0005, of its EEPROM
#   --encrypt KEY             root file systems in LUKS; KEY is that of the board's EKB (NVMe only)
#   --pkc KEY [--sbk KEY]     signs (and encrypts) boot files for a board with burnt fuses
#   --check-board             only compares the board in recovery mode with BOARD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=versions.env
source "${EDGE_VERSIONS:-$here/versions.env}"
sysfs=${EDGE_SYSFS:-/sys}

fail() {
    echo "flash.sh: $*" >&2
    exit 1
}

board='' conf='' storage=nvme ab=yes jetpack=$DEFAULT_RELEASE tree='' app_size='' sectors='' mass=''
flash_only='' sku='' fab='' rev='' encrypt='' pkc='' sbk='' dry='' check_only=''
while [ $# != 0 ]; do
    case $1 in
    --list)
        awk 'NF { print $1 " (" $2 ", " $5 "):"; $1 = $2 = $3 = $4 = $5 = ""; print "    " $0 }' \
            <<<"$BOARDS" | sed 's/   *\([A-Z]\)/    \1/'
        exit
        ;;
    --no-ab) ab='' ;;
    --dry-run) dry=yes ;;
    --check-board) check_only=yes ;;
    --board | --conf | --storage | --jetpack | --tree | --app-size | --disk-sectors | --mass | \
        --flash-only | --module | --fab | --rev | --encrypt | --pkc | --sbk)
        [ $# -ge 2 ] || fail "$1: needs a value"
        name=${1#--} && name=${name//-/_}
        case $name in disk_sectors) name=sectors ;; module) name=sku ;; esac
        printf -v "$name" '%s' "$2"
        shift
        ;;
    *) fail "$1: unknown; the first lines of $0 list the options" ;;
    esac
    shift
done

[ "$board" ] || fail "--board is missing; $0 --list shows the boards"
row=$(board_row "$board") || fail "--board $board: not in versions.env; $0 --list shows what is"
read -r _ board_conf board_id skus storages _ <<<"$row"
conf=${conf:-$board_conf}
row=$(release_row "$jetpack") || fail "--jetpack $jetpack: not in versions.env"
read -r _ l4t _ <<<"$row"
[[ ,$storages, == *,$storage,* ]] || fail "--storage $storage: $board boots from $storages"
[ ! "$encrypt" ] || [ "$storage" = nvme ] || fail "--encrypt: NVIDIA has layouts for it on NVMe only"
[ ! "$sbk" ] || [ "$pkc" ] || fail "--sbk needs --pkc: boot files are signed first"
for number in "$mass" "$flash_only" "$sectors"; do
    [[ $number =~ ^[0-9]*$ ]] || fail "$number: give a whole number"
done
[[ ! $sku || ,$skus, == *,$sku,* ]] || fail "--module $sku: $board has $skus"
for name in encrypt pkc sbk; do
    [ "${!name}" ] || continue
    [ -f "${!name}" ] || [ "$dry" ] || fail "--$name ${!name}: there is no such key file"
    # The commands run in the tree.
    printf -v "$name" '%s' "$(realpath -m "${!name}")"
done
tree=${tree:-build/jetpack/$jetpack/Linux_for_Tegra}

# From L4T 39 on the script lies at the top; NVIDIA's guide gives it no --network there.
if [ "${l4t%%.*}" -ge 39 ]; then
    initrd_flash=./l4t_initrd_flash.sh
    network=()
    sd=mmcblk0p1
else
    initrd_flash=./tools/kernel_flash/l4t_initrd_flash.sh
    network=(--network usb0)
    sd=mmcblk1p1
fi
suffix=${ab:+_rootfs_ab}${encrypt:+_enc}
[ "$suffix" != _enc ] || suffix=_rootfs_enc
qspi=bootloader/generic/cfg/flash_t234_qspi.xml
case $storage in
emmc) layout=bootloader/generic/cfg/flash_t234_qspi_sdmmc$suffix.xml ;;
*) layout=tools/kernel_flash/flash_l4t_t234_nvme$suffix.xml ;;
esac
case $storage in sd) device=$sd ;; *) device=nvme0n1p1 ;; esac
ours=$(dirname "$layout")/edge_server_$(basename "$layout")

# Of a board without its EEPROM, of two slots, of an encrypted root file system.
variables=()
[ ! "$sku" ] || variables+=("BOARDID=$board_id" "BOARDSKU=$sku" "FAB=$fab" "BOARDREV=$rev")
[ ! "$ab" ] || variables+=(ROOTFS_AB=1 ROOTFS_RETRY_COUNT_MAX=3)
[ ! "$encrypt" ] || variables+=(ROOTFS_ENC=1)
keys=()
[ ! "$pkc" ] || keys+=(-u "$pkc")
[ ! "$sbk" ] || keys+=(-v "$sbk")
size=()
[ ! "$app_size" ] || size=(-S "$app_size")

# run [NAME=VALUE...] COMMAND...: in the tree, as root; a dry run prints it as a line for a shell.
run() {
    if [ "$dry" ]; then
        local words=() word
        for word; do
            # NAME=VALUE needs no quotes, and a quoted NAME= would be no assignment.
            if [[ $word =~ ^[A-Z_]+=[A-Za-z0-9._-]*$ ]]; then words+=("$word"); else words+=("${word@Q}"); fi
        done
        sed -E "s/'([A-Za-z0-9_.,/:+=-]+)'/\1/g" <<<"sudo ${words[*]}"
    else
        (cd "$tree" && env "$@") || fail "$1 … failed; its messages are above, and the board may boot no more until it is flashed"
    fi
}

faults=0
fault() {
    echo "flash.sh: $*" >&2
    faults=$((faults + 1))
}

# preflight: what NVIDIA's scripts would trip over after minutes, or the board after the flash.
preflight() {
    local rootfs=$tree/rootfs release user
    release=$(sed -nE 's/^# R([0-9]+) .*REVISION: ([0-9.]+),.*/\1.\2/p' "$rootfs/etc/nv_tegra_release" 2>/dev/null || true)
    if [ -z "$release" ]; then
        fault "$rootfs/etc/nv_tegra_release: missing; run apply_binaries.sh of the tree first"
    elif [ "${release%.0}" != "${l4t%.0}" ]; then
        fault "$rootfs is L4T $release; JetPack $jetpack has $l4t: give the right --jetpack or --tree"
    fi
    cmp -s "$tree/kernel/Image" "$rootfs/boot/Image" ||
        fault "kernel/Image and rootfs/boot/Image differ; run apply_binaries.sh again"
    for file in "$conf.conf" bootloader/l4t_initrd.img rootfs/boot/initrd "$initrd_flash" "$layout" "$qspi"; do
        [ -s "$tree/$file" ] || fault "$tree/${file#./}: missing or empty"
    done
    if [ ! -x "$rootfs/usr/lib/edge-server-image/firstboot" ]; then
        fault "$rootfs is not customised; run customize_rootfs.sh $rootfs"
    elif [ -s "$rootfs/etc/machine-id" ] || [ ! -e "$rootfs/etc/machine-id" ] || compgen -G "$rootfs/etc/ssh/ssh_host_*" >/dev/null; then
        fault "$rootfs has an identity that every board would share; run customize_rootfs.sh again"
    fi
    user=$(awk -F: '$2 !~ /^[!*]/ { print $1; exit }' "$rootfs/etc/shadow" 2>/dev/null || true)
    [ -z "$user" ] || fault "$rootfs: user $user has a password, or none at all; run customize_rootfs.sh again"
}

# in_recovery: the number of boards on USB that wait to be flashed.
in_recovery() {
    local found=0 folder
    for folder in "$sysfs"/bus/usb/devices/*; do
        if [ "$(cat "$folder/idVendor" 2>/dev/null)" = 0955 ] && [[ $(cat "$folder/idProduct" 2>/dev/null) == 7?23 ]]; then
            found=$((found + 1))
        fi
    done
    echo "$found"
}

# check_board: the module's EEPROM against BOARD. A field that is empty says nothing, and is no fault.
check_board() {
    local text id found_sku
    [ "$(in_recovery)" = 1 ] || fail "$(in_recovery) boards in recovery mode on USB (0955:7?23), not one; hold RECOVERY while RESET is pressed, or see jetpack/README.md"
    text=$(cd "$tree" && ./nvautoflash.sh --print_boardid 2>&1) ||
        fail "nvautoflash.sh --print_boardid cannot read the board: ${text##*$'\n'}; put it into recovery mode again, on a port of the machine itself"
    id=$(sed -nE 's/.*Parsing board ID \(([^)]*)\).*/\1/p' <<<"$text" | head -n1)
    found_sku=$(sed -nE 's/.*Parsing board SKU \(([^)]*)\).*/\1/p' <<<"$text" | head -n1)
    [ -z "$id" ] || [ "$id" = "$board_id" ] ||
        fail "the board is a p$id-${found_sku:-?}, and $board is p$board_id: another --board, or another cable"
    [[ -z $found_sku || ,$skus, == *,$found_sku,* ]] ||
        fail "the module is a p$board_id-$found_sku, and $board is one of $skus: $0 --list"
    echo "board: p${id:-?}-${found_sku:-?}, as --board $board" >&2
    # Reading it resets the board, which returns to recovery mode by itself.
    local until=$((SECONDS + 30))
    until [ "$(in_recovery)" = 1 ]; do
        [ $SECONDS -lt $until ] || fail "the board did not return to recovery mode; put it there again"
        sleep 1
    done
}

if [ ! -d "$tree" ] && [ "$dry" ]; then
    echo "flash.sh: $tree is not there: nothing of it was checked" >&2
else
    [ -d "$tree" ] || fail "$tree is not there; fetch_bsp.sh --unpack makes it"
    [ "$check_only" ] || preflight
    if [ $faults != 0 ] && [ ! "$dry" ]; then
        fail "$faults faults; nothing was flashed"
    fi
fi
if [ ! "$dry" ]; then
    [ "$(id -u)" = 0 ] || fail "needs root: NVIDIA's scripts do"
    [ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine: NVIDIA's flashing programs are i386"
    [ "$sku" ] || [ "$flash_only" ] || check_board
    [ ! "$check_only" ] || exit 0
fi

if [ "$flash_only" ]; then
    run "$initrd_flash" --flash-only --massflash "$flash_only" "${network[@]}" --showlogs
    exit $((faults != 0))
fi

# The layout with our data partition, beside NVIDIA's own, which stays as it is.
if [ "$dry" ]; then
    echo "$here/data_partition.py $tree/$layout $tree/$ours${sectors:+ --num-sectors $sectors}"
    echo "cd $tree"
else
    "$here/data_partition.py" "$tree/$layout" "$tree/$ours" ${sectors:+--num-sectors "$sectors"} ||
        fail "the data partition does not fit into $layout"
fi

massflash=()
[ ! "$mass" ] || massflash=(--massflash "$mass")
if [ "$storage" = emmc ]; then
    no_flash=()
    [ ! "$mass" ] || no_flash=(--no-flash "${massflash[@]}")
    run "${variables[@]}" "$initrd_flash" "${keys[@]}" "${size[@]}" -p "-c $ours" "${no_flash[@]}" \
        --showlogs "${network[@]}" "$conf" internal
else
    # Two sets of images, then both are flashed: so ROOTFS_AB reaches the boot flash as well, where it
    # sets UEFI's redundancy level. Without that no update would ever switch slots.
    run "${variables[@]}" "$initrd_flash" "${keys[@]}" -p "-c $qspi" --no-flash --showlogs \
        "${network[@]}" "$conf" internal
    run "${variables[@]}" "$initrd_flash" "${keys[@]}" "${size[@]}" ${encrypt:+-p "-i $encrypt"} \
        --no-flash --external-device "$device" -c "$ours" --external-only --append \
        "${massflash[@]}" --showlogs "${network[@]}" "$conf" external
    [ "$mass" ] || run "$initrd_flash" --flash-only --showlogs "${network[@]}"
fi
if [ "$mass" ] && [ ! "$dry" ]; then
    echo "The package is mfi_$conf.tar.gz in $tree; with the boards in recovery mode: flash.sh --board $board --flash-only $mass" >&2
fi
exit $((faults != 0))
