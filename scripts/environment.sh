# shellcheck shell=bash
# Sourced by the scripts beside it: virtual environments and system packages on a fresh machine.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# find_python VERSION: prints an interpreter of that version (3.10), from PATH or from pyenv.
find_python() {
    local candidate
    for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if [ -x "$candidate" ] && "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# any_python: the newest supported interpreter that is here.
any_python() {
    local version
    for version in 3.13 3.12 3.11 3.10; do
        find_python "$version" && return
    done
    echo "no Python 3.10 to 3.13 with venv found; on Debian or Ubuntu: apt install python3-venv" >&2
    return 1
}

# venv_of PYTHON: prints the name of its environment, .venv-3.12.
venv_of() {
    "$1" -c 'import sys; print(".venv-%d.%d" % sys.version_info[:2])'
}

# package_tools: uv and cyclonedx-py, as locked, in .venv-package.
package_tools() {
    local tools=$root/.venv-package lock=$root/scripts/debian_package/locks/tools.txt wanted
    wanted=$(sha256sum <"$lock")
    [ "$(cat "$tools/.installed" 2>/dev/null)" = "$wanted" ] && return
    echo "installing uv and cyclonedx-py into ${tools##*/} …" >&2
    "$(any_python)" -m venv "$tools" || return
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --require-hashes -r "$lock" || return
    echo "$wanted" >"$tools/.installed"
}

# install_checkout DIRECTORY EXTRAS: this checkout with its extras into an environment. Where the script
# has $uv, it does so with pip's settings; pip does otherwise, and where uv cannot: some settings are
# pip's alone.
install_checkout() {
    local settings=()
    if [ -x "${uv-}" ]; then
        mapfile -t settings < <("$1/bin/python" -m pip config list | sed -n "s/'//g
            s/^[^=]*\.index-url=/UV_DEFAULT_INDEX=/p
            s/^[^=]*\.find-links=/UV_FIND_LINKS=/p
            s/^[^=]*\.constraint=/UV_CONSTRAINT=/p
            s/^[^=]*\.cert=/SSL_CERT_FILE=/p")
        env "${settings[@]}" "$uv" pip install --quiet --python "$1/bin/python" --editable "${root}[$2]" >&2 && return
        echo "uv cannot, for the reason above; pip tries" >&2
    fi
    "$1/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "${root}[$2]" >&2
}

# make_venv DIRECTORY PYTHON EXTRAS [OPTION]: an environment with this checkout and its extras in
# it, OPTION as of python -m venv; a second call does nothing until pyproject.toml changes. Most of
# what is installed is never imported, so nothing is compiled before it is.
make_venv() {
    local stamp wanted
    stamp=$1/.installed
    wanted=$(cat "$root/pyproject.toml" - <<<"$3" | sha256sum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    echo "installing edge-server[$3] into ${1#"$root"/} …" >&2
    if ! "$2" -m venv ${4:+"$4"} "$1" || ! install_checkout "$1" "$3"; then
        echo "${1#"$root"/} is not complete, for the reason above: pip needs PyPI, or the mirror that" \
            "PIP_INDEX_URL names, and some hundred MB of disk; then run this again" >&2
        return 1
    fi
    echo "$wanted" >"$stamp"
}

# What the tests of the training scripts need beside PyTorch.
with_training=train,onnxruntime,gstreamer-tests

# make_framework_venv FRAMEWORK: .venv-FRAMEWORK with that extra, on a Python that the framework has a
# wheel for. PyPI's PyTorch for PCs brings gigabytes of CUDA, so there it is the release for the CPU,
# from where pip looks for wheels already or from PyTorch's own index.
make_framework_venv() {
    local python version index torch=torch==2.13.0+cpu
    if [ "$1" != pytorch ] || [ "$(uname -m)" != x86_64 ]; then
        make_venv ".venv-$1" "$(find_python 3.12 || any_python)" \
            "$1$([ "$1" != pytorch ] || echo ",$with_training")"
        return
    fi
    [ -e .venv-pytorch/.installed ] && return
    for index in "" https://download.pytorch.org/whl/cpu; do
        for version in 3.12 3.11 3.13 3.10; do
            python=$(find_python "$version") || continue
            "$python" -m pip install --quiet --dry-run --ignore-installed --no-deps \
                ${index:+--extra-index-url "$index"} "$torch" >/dev/null 2>&1 || continue
            "$python" -m venv .venv-pytorch
            .venv-pytorch/bin/python -m pip install --quiet ${index:+--extra-index-url "$index"} \
                "$torch" >&2
            make_venv .venv-pytorch "$python" "pytorch,$with_training"
            return
        done
    done
    echo "no PyTorch for the CPU was found: its models are not tested" >&2
}

# The Debian packages of commands that are missing.
declare -A absent=()

# need COMMAND PACKAGE...: notes the packages of a command that is missing.
need() {
    command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || absent[$1]=${*:2}
}

# require COMMAND PACKAGE...: ends the script where the command is missing.
require() {
    need "$@"
    [ ! "${absent[$1]-}" ] || { echo "${0##*/}: $1 is missing: apt install ${*:2}" >&2 && exit 69; }
}

# need_journal: systemd's own library, for the system's own Python, with which the package runs.
need_journal() {
    /usr/bin/python3 -c "import systemd.journal" 2>/dev/null ||
        absent["systemd's Python library"]=python3-systemd
}

# need_gstreamer: GStreamer, its codecs, and PyGObject, which belongs to the system's own Python.
need_gstreamer() {
    local probe="import gi; gi.require_version('GstRtspServer', '1.0'); gi.require_version('GstVideo', '1.0'); from gi.repository import Gst; Gst.init(None); assert all(map(Gst.ElementFactory.find, ('x264enc', 'x265enc', 'avdec_h265', 'rtspsrc', 'h265parse')))"
    /usr/bin/python3 -c "$probe" 2>/dev/null || absent[GStreamer]="python3-gi python3-gst-1.0 \
python3-venv gir1.2-gst-plugins-base-1.0 gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-base \
gstreamer1.0-plugins-good gstreamer1.0-plugins-bad gstreamer1.0-plugins-ugly gstreamer1.0-libav"
}

# install_absent: installs what `need` noted, and says what apt says against it.
install_absent() {
    local as_root=() each
    [ ${#absent[@]} != 0 ] || return 0
    command -v apt-get >/dev/null || return 0
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends)
    echo "installing ${absent[*]} …" >&2
    "${as_root[@]}" apt-get update -qq >&2 || true
    # shellcheck disable=SC2048,SC2086 # words
    if "${apt[@]}" ${absent[*]} >/dev/null; then
        absent=()
        return
    fi
    # One package that this release does not have keeps no other away.
    for each in "${!absent[@]}"; do
        # shellcheck disable=SC2086 # words
        ! "${apt[@]}" ${absent[$each]} >/dev/null || unset "absent[$each]"
    done
}

# tell_absent: says what is still missing.
tell_absent() {
    local each
    for each in "${!absent[@]}"; do
        echo "$each is missing, so what needs it is skipped; to have it: apt install ${absent[$each]}" >&2
    done
}
