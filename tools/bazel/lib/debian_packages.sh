# shellcheck shell=bash
# Finds, downloads and unpacks Debian packages with an apt of our own: own lists, and an
# empty dpkg status, so that the host's packages and their versions do not matter.
#
# Reads suite, arch, work, tree. Sets bazel_version, jre_package.

# Prints the Debian mirrors that the host's apt knows, best first.
candidate_mirrors() {
  if [[ -n ${BAZELW_MIRROR:-} ]]; then
    printf '%s\n' "$BAZELW_MIRROR"
    return
  fi
  local labelled
  # shellcheck disable=SC2016  # apt expands these names, not the shell
  labelled=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 2>/dev/null |
    sed -n 's/^Debian|Debian|//p' | sort -u)
  if [[ -n $labelled ]]; then
    printf '%s\n' "$labelled"
    return
  fi
  # A new machine has no package lists yet, and its sources no labels: any may be it.
  # shellcheck disable=SC2016
  apt-get indextargets --no-release-info --format '$(REPO_URI)' 2>/dev/null | sort -u
}

# Prints the version of a package that apt would take, or nothing.
candidate_version() {
  apt-cache "${apt_options[@]}" policy "$1" |
    sed -n 's/^ *Candidate: //p' | grep -v '(none)' || true
}

# Points apt at a mirror; true if that mirror has the suite.
use_mirror() {
  local keyring signed_by=
  for keyring in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
    if [[ -e $keyring ]]; then
      signed_by="[signed-by=$keyring] "
      break
    fi
  done
  echo "deb $signed_by$1 $suite main" >"$work/apt/sources.list"
  rm -rf "$work/apt/lists"
  mkdir -p "$work/apt/lists/partial"
  apt-get "${apt_options[@]}" update >>"$work/apt/log" 2>&1
}

# Chooses the mirror and the versions of Bazel and of its Java.
find_packages() {
  local apt=$work/apt mirror
  mkdir -p "$apt/cache/archives/partial" "$apt/debs"
  : >"$apt/status"
  : >"$apt/log"
  apt_options=(-q
    "-oDir::Etc::sourcelist=$apt/sources.list" -oDir::Etc::sourceparts=/dev/null
    "-oDir::State::lists=$apt/lists" "-oDir::Cache=$apt/cache" "-oDir::State::status=$apt/status"
    -oAPT::Sandbox::User=root -oAcquire::Languages=none -oAcquire::Retries=3
    -oDebug::NoLocking=1 "-oAPT::Architecture=$arch" "-oAPT::Architectures=$arch")

  bazel_version=
  say "reading the package list of Debian $suite ($arch)"
  while read -r mirror; do
    if use_mirror "$mirror"; then
      bazel_version=$(candidate_version bazel-bootstrap)
      [[ -z $bazel_version ]] || break
    fi
  done < <(candidate_mirrors)
  if [[ -z $bazel_version ]]; then
    tail -n 10 "$apt/log" >&2
    die "no mirror of this host's apt offers bazel-bootstrap in Debian $suite: set BAZELW_MIRROR or BAZELW_SUITE, or install bazelisk"
  fi
  [[ $bazel_version == [7-9].* ]] ||
    die "Debian $suite offers bazel-bootstrap $bazel_version, but 7 or later is needed: try BAZELW_SUITE=sid"

  # The server's classes need Java 21. Of the JREs the headless one is enough.
  local release
  for release in 21 25; do
    jre_package=openjdk-$release-jre-headless
    [[ -z $(candidate_version "$jre_package") ]] || return 0
  done
  die "Debian $suite offers neither openjdk-21-jre-headless nor openjdk-25-jre-headless"
}

# Downloads the packages that Bazel runs on and unpacks them into the tree.
download_packages() {
  local packages cxx_libraries deb
  # These carry a version in their name: read it off Bazel's own dependencies.
  mapfile -t cxx_libraries < <(apt-cache "${apt_options[@]}" depends bazel-bootstrap |
    sed -n 's/^ *Depends: \(lib\(absl\|grpc\|protobuf\)[^ ]*\)$/\1/p' | grep -v -- '-java$')
  packages=(
    bazel-bootstrap bazel-bootstrap-data
    bazel-features bazel-platforms bazel-rules-cc bazel-rules-java bazel-rules-license
    bazel-rules-proto bazel-rules-python bazel-skylib googletest
    "$jre_package" libc6 libcares2 libgcc-s1 libstdc++6 zlib1g "${cxx_libraries[@]}"
    # The jars that the server loads beside those bundled in its own.
    libcaffeine-java libcommons-codec-java libcommons-compress-java libcommons-io-java
    libcommons-lang3-java libcommons-pool2-java libgoogle-auth-java libgoogle-flogger-java
    libgoogle-gson-java libgoogle-http-client-java libgrpc-java libjsr305-java
    libperfmark-java libreactive-streams-java librx-java libxz-java
    patchelf  # used once, to relocate the others
  )
  say "downloading bazel-bootstrap $bazel_version, $jre_package and $((${#packages[@]} - 2)) small packages"
  (cd "$work/apt/debs" && apt-get "${apt_options[@]}" download "${packages[@]}") >"$work/apt/log" 2>&1 || {
    tail -n 20 "$work/apt/log" >&2
    die "the download of Debian packages failed"
  }
  mkdir -p "$tree/etc"
  for deb in "$work/apt/debs"/*.deb; do
    dpkg-deb --extract "$deb" "$tree" || die "cannot unpack $(basename "$deb")"
    basename "$deb" >>"$tree/etc/packages"
  done
}
