# shellcheck shell=bash
# Messages of the installer, and what depends on the machine's architecture.

say() { printf 'bazelw: %s\n' "$*" >&2; }
die() {
  printf 'bazelw: error: %s\n' "$*" >&2
  exit 1
}

# Sets arch (Debian's name), triplet, loader (file name of ld.so) and jvm_flags.
set_architecture() {
  arch=$(dpkg --print-architecture)
  jvm_flags=
  case $arch in
    amd64)
      triplet=x86_64-linux-gnu
      loader=ld-linux-x86-64.so.2
      ;;
    arm64)
      triplet=aarch64-linux-gnu
      loader=ld-linux-aarch64.so.1
      # The server's jar is the same for all architectures and holds amd64's native
      # library: Bazel must do without it. That much was tried; arm64 itself was not.
      jvm_flags=--host_jvm_args=-Dio.bazel.EnableJni=0
      ;;
    *) die "no recipe for architecture '$arch', only for amd64 and arm64: install bazelisk, or set BAZEL" ;;
  esac
}
