# shellcheck shell=bash
# Sourced by check and test: what runs side by side, and is told in its order.

names=() groups=() said=$(mktemp -d)
trap 'end_jobs; rm -rf "$said"' EXIT

# begin NAME COMMAND...: runs it in the background, in a process group of its own.
begin() {
    names+=("$1")
    set -m
    "${@:2}" >"$said/${#names[@]}" 2>&1 </dev/null &
    set +m
    groups+=($!)
}

# report: waits for all that was begun, and shows what each has to say; fails where one failed.
report() {
    local number wrong=()
    for number in "${!names[@]}"; do
        echo "== ${names[$number]}"
        wait "${groups[$number]}" || wrong+=("${names[$number]}")
        cat "$said/$((number + 1))"
    done
    [ ${#wrong[@]} = 0 ] || { printf 'failed: %s\n' "${wrong[@]}" >&2 && return 1; }
}

# end_jobs: ends what still runs in the background, which Ctrl-C does not reach.
end_jobs() {
    local each
    for each in $(jobs -pr); do
        kill -- "-$each" 2>/dev/null || kill "$each" 2>/dev/null || true
    done
}
