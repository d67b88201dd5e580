# shellcheck shell=bash
# What the scripts here and .ci/run share. Sourced with `set -euo pipefail` in force, never run.

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(dirname "$scripts")
self=$(cd "$(dirname "$0")" && pwd)/${0##*/}

say() { echo "${0##*/}: $*" >&2; }
fail() { say "$*" && exit 1; }
misused() { say "$*" && exit 2; }

# The comment at the top of the calling script is its help.
usage() { awk 'NR > 2 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$self"; }

# Says which part of a long run begins, and how many minutes and seconds in.
stage() { printf '\n==> %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

have() { command -v "$1" >/dev/null; }

# ---------------------------------------------------------------- packages and the compiler

# Installs Debian packages when run as root; otherwise says what to run.
need_packages() { # [PACKAGE]...
    [ $# -gt 0 ] || return 0
    # shellcheck disable=SC2046
    set -- $(printf '%s\n' "$@" | sort -u)
    have apt-get || misused "something is missing; on Debian it would be: $*"
    [ "$(id -u)" = 0 ] || misused "something is missing; as root run: apt-get update && apt-get install -y $*"
    say "installing $*"
    {
        apt-get update -q &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
    } >&2 </dev/null || fail "apt-get could not install $*"
}

# What the C parts of the dependencies (librdkafka, SQLite, ring) are built with.
need_build_packages() {
    local packages=()
    { have cc && have c++ && have make; } || packages+=(build-essential)
    have pkg-config || packages+=(pkg-config)
    pkg-config --exists openssl 2>/dev/null || packages+=(libssl-dev)
    pkg-config --exists zlib 2>/dev/null || packages+=(zlib1g-dev)
    need_packages "${packages[@]+"${packages[@]}"}"
}

# The compiler that rust-toolchain.toml names. rustup may have been told not to fetch it by itself.
need_rust() {
    local channel
    channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$repo/rust-toolchain.toml")
    if (cd "$repo" && cargo --version >/dev/null 2>&1); then return; fi
    have rustup || misused "cargo is missing; install Rust $channel with rustup (https://rustup.rs)"
    rustup toolchain install "$channel" --profile minimal --component rustfmt,clippy >&2 ||
        fail "rustup could not install Rust $channel"
}

# ---------------------------------------------------------------- services and ports

borrowed=()

# shellcheck disable=SC2120 # most callers want all
# Brings up what is not up yet, stops exactly that on exit, and exports where everything is.
borrow_services() { # [SERVICE]...
    local service wanted=("$@")
    trap return_services EXIT
    [ $# -gt 0 ] || wanted=(kafka postgres mariadb pgbouncer)
    for service in "${wanted[@]}"; do
        "$scripts/services" status "$service" >/dev/null || borrowed+=("$service")
    done
    "$scripts/services" up "$@"
    eval "$("$scripts/services" env)"
}

return_services() {
    local service
    for service in "${borrowed[@]+"${borrowed[@]}"}"; do "$scripts/services" down "$service"; done
}

answers() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; } # HOST PORT

# shellcheck disable=SC2120 # most callers have none to leave out
# A port with a free neighbour above it, outside the range that the system hands to outgoing connections.
free_port() { # [PORT TO LEAVE OUT]...
    local port try
    for ((try = 0; try < 200; try++)); do
        port=$((20000 + 2 * (RANDOM % 6000)))
        if [[ " $* " != *" $port "* ]] && ! answers 127.0.0.1 "$port" && ! answers 127.0.0.1 $((port + 1)); then
            echo "$port"
            return
        fi
    done
    fail "found no free port"
}
