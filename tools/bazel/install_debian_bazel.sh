#!/usr/bin/env bash
# Installs Debian's Bazel 7 into a folder of its own, for machines that reach a Debian
# mirror but neither a Bazel release nor the Bazel registry.
#
#   install_debian_bazel.sh [PREFIX]     default: $HOME/.cache/bazelw/debian
#   PREFIX/bin/bazel ...                 takes every ordinary argument
#
# The packages are unpacked, not installed: with them come the headless JRE and the
# shared libraries they run on, so the host's Java and C library play no part, and no
# privileges are needed. Nothing is written but PREFIX, PREFIX.lock and, meanwhile,
# PREFIX.tmp.* beside it. PREFIX cannot be moved afterwards.
#
# Settings:
#   BAZELW_SUITE   Debian suite to take the packages from (forky)
#   BAZELW_MIRROR  Debian mirror (the one that this host's apt already uses)
set -euo pipefail

# Raised when an installed prefix is to be made anew.
readonly LAYOUT_VERSION=4

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=lib/common.sh
source "$here/lib/common.sh"
# shellcheck source=lib/debian_packages.sh
source "$here/lib/debian_packages.sh"
# shellcheck source=lib/relocate.sh
source "$here/lib/relocate.sh"
# shellcheck source=lib/registry.sh
source "$here/lib/registry.sh"

check_host() {
  [[ $(uname -s) == Linux ]] || die "this installer is for Linux; install bazelisk instead"
  local tool
  for tool in apt-get apt-cache dpkg dpkg-deb flock; do
    command -v "$tool" >/dev/null ||
      die "'$tool' is missing: this installer needs a Debian-like host (apt, dpkg, util-linux); install bazelisk instead"
  done
}

# Prints the absolute path of the prefix named on the command line.
resolve_prefix() {
  local given=$1
  [[ $given == /* ]] || given=$PWD/$given
  case $given/ in
    /tmp/*) die "PREFIX is $given, but must not lie under /tmp: Bazel's sandbox gives each action an empty /tmp" ;;
    *[[:space:]]*) die "PREFIX is '$given', but must not hold white space" ;;
  esac
  mkdir -p "$(dirname "$given")" || die "cannot create the folder of PREFIX $given"
  printf '%s/%s\n' "$(cd "$(dirname "$given")" && pwd -P)" "$(basename "$given")"
}

is_installed() {
  [[ -x $prefix/bin/bazel && $(head -n 1 "$prefix/.installed" 2>/dev/null) == "$stamp" ]]
}

# Moves the finished tree into place, tries it, and only then gives it its launcher:
# an install that was cut short is never taken for a whole one.
activate() {
  local scratch=$work/workspace log=$work/try.log
  rm -rf "$prefix"
  mv -T "$tree" "$prefix"
  mkdir -p "$scratch"
  : >"$scratch/MODULE.bazel"
  echo 'filegroup(name = "nothing")' >"$scratch/BUILD.bazel"
  try_bazel() {
    (cd "$scratch" && timeout 120 "$prefix/bin.new/bazel" --batch --nohome_rc \
      "--output_user_root=$work/out" "$@") >>"$log" 2>&1 </dev/null
  }
  if ! try_bazel version || ! grep -q '^Build label' "$log" || ! try_bazel build //:nothing; then
    tail -n 20 "$log" >&2
    die "the unpacked Bazel does not work; it is left in $prefix without a launcher"
  fi
  mv -T "$prefix/bin.new" "$prefix/bin"
}

main() {
  check_host
  prefix=$(resolve_prefix "${1:-${HOME:?bazelw: error: set HOME or name a PREFIX}/.cache/bazelw/debian}")
  suite=${BAZELW_SUITE:-forky}
  set_architecture
  stamp="layout $LAYOUT_VERSION, $suite, $arch"
  if is_installed; then
    return
  fi

  exec 9>"$prefix.lock"
  flock --nonblock 9 || {
    say "waiting for another install into $prefix"
    flock --timeout 900 9 || die "another install has held $prefix.lock for 15 minutes"
  }
  if is_installed; then
    return
  fi

  rm -rf "$prefix".tmp.*  # left by a killed run: we hold the lock
  work=$(mktemp -d "$prefix.tmp.XXXXXX")
  trap 'chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work"' EXIT
  tree=$work/tree
  local start_secs=$SECONDS
  say "no Bazel >= 7 found: installing Debian's into $prefix (about 120 MB to download, once)"
  find_packages
  download_packages
  relocate_tree
  write_registry
  write_launcher
  printf '%s\n%s\n' "$stamp" "bazel-bootstrap $bazel_version, $jre_package" >"$tree/.installed"
  activate
  say "installed Bazel ${bazel_version%%[+-]*} in $((SECONDS - start_secs)) s, $(du -sm "$prefix" | cut -f 1) MiB"
}

main "$@"
