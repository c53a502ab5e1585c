#!/usr/bin/env bash
# Fetches NVIDIA's BSP and sample root file system from NVIDIA, and verifies them.
#   fetch_bsp.sh [JETPACK] [--into FOLDER]     default: 6.2.2, into build/jetpack
#   fetch_bsp.sh [JETPACK] --unpack            also makes FOLDER/JETPACK/Linux_for_Tegra of them: as
#                                              root, on x86-64, whose programs NVIDIA's tools are
#   fetch_bsp.sh --list                        what versions.env knows
# A download that was interrupted is resumed. Of a file whose checksum nobody published, the first
# one that arrived is pinned in pinned.sha256: keep that file with your project, and look at the first
# download. NVIDIA's files stay in FOLDER; their licence does not let you pass them on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=versions.env
source "${EDGE_VERSIONS:-$here/versions.env}"
pins=${EDGE_PINS:-$here/pinned.sha256}

fail() {
    echo "fetch_bsp.sh: $*" >&2
    exit 1
}

jetpack=$DEFAULT_RELEASE into=build/jetpack unpack=
while [ $# != 0 ]; do
    case $1 in
    --list)
        printf '%s' "$RELEASES" | awk 'NF { print $1 " (L4T " $2 ", " $3 "): " $5 ", " $7 }'
        exit
        ;;
    --into) into=${2:?--into needs a folder} && shift ;;
    --unpack) unpack=yes ;;
    -*) fail "$1: unknown; --into FOLDER, --unpack or --list" ;;
    *) jetpack=$1 ;;
    esac
    shift
done
row=$(release_row "$jetpack") || fail "JetPack $jetpack: not in versions.env; $0 --list shows what is"
read -r _ l4t _ url bsp bsp_sha256 rootfs rootfs_sha256 <<<"$row"

# fetch NAME SHA256: the file, whole and verified; nothing is downloaded where it is there already.
fetch() {
    local file=$into/$1 expected=$2 pinned status actual
    pinned=$(awk -v name="$1" '$2 == name { print $1 }' "$pins" 2>/dev/null || true)
    [ "$expected" != - ] || expected=${pinned:--}
    if [ ! -f "$file" ]; then
        echo "fetching $url/$1 …" >&2
        # 416: a run that was cut off had all of it, and there is nothing to resume.
        status=$(curl --fail --location --continue-at - --output "$file.part" \
            --write-out '%{http_code}' "$url/$1") || [ "$status" = 416 ] ||
            fail "$url/$1: the download ended early; the same command resumes it"
        mv "$file.part" "$file"
    fi
    actual=$(sha256sum "$file" | cut -d' ' -f1)
    if [ "$expected" = - ]; then
        echo "$actual  $1" >>"$pins"
        echo "$1: pinned as $actual in $pins; nobody vouches for this first download" >&2
    elif [ "$actual" != "$expected" ]; then
        mv "$file" "$file.refused"
        fail "$1: SHA-256 is $actual, not $expected; kept as $file.refused, not used"
    fi
    echo "$1: ok" >&2
}

mkdir -p "$into"
fetch "$bsp" "$bsp_sha256"
fetch "$rootfs" "$rootfs_sha256"
[ "$unpack" ] || exit 0

[ "$(id -u)" = 0 ] || fail "--unpack needs root: the files of the root file system have owners"
[ "$(uname -m)" = x86_64 ] || fail "--unpack needs an x86-64 machine: NVIDIA's flashing programs are i386"
tree=$into/$jetpack/Linux_for_Tegra
if [ -e "$tree/.unpacked" ]; then
    echo "$tree: is there already" >&2
    exit 0
fi
# An unpacking that was interrupted leaves a tree that nobody shall flash.
rm -rf "${into:?}/$jetpack"
mkdir "$into/$jetpack"
echo "unpacking L4T $l4t into $tree …" >&2
tar -xf "$into/$bsp" -C "$into/$jetpack"
tar -xpf "$into/$rootfs" -C "$tree/rootfs" --numeric-owner
(cd "$tree" && ./tools/l4t_flash_prerequisites.sh && ./apply_binaries.sh) ||
    fail "$tree: NVIDIA's apply_binaries.sh failed; its messages are above"
touch "$tree/.unpacked"
echo "$tree"
