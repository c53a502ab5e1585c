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

# make_venv DIRECTORY PYTHON EXTRAS: an environment with this checkout and its extras in it;
# a second call does nothing until pyproject.toml changes.
make_venv() {
    local stamp wanted
    stamp=$1/.installed
    wanted=$(cat "$root/pyproject.toml" - <<<"$3" | sha256sum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    echo "installing edge-server[$3] into ${1#"$root"/} …" >&2
    "$2" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[$3]" >&2
    echo "$wanted" >"$stamp"
}

# need COMMAND PACKAGE...: installs Debian packages for a command that is missing, where that can
# be done without asking; otherwise says what would.
need() {
    local command=$1
    shift
    command -v "$command" >/dev/null || [ -x "/usr/sbin/$command" ] && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing $* …" >&2
        { apt-get update && apt-get install -y --no-install-recommends "$@"; } >/dev/null 2>&1 && return
    fi
    echo "$command is missing; to have it: apt install $*" >&2
}
