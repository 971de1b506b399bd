# shellcheck shell=bash
# Answers in the place of the Bazel registry: each module that a workspace or Bazel
# itself asks for is a folder in the prefix.
#
# Reads here, prefix, tree, jvm, jvm_flags.

# Named by Bazel's own modules, never built here: empty.
readonly EMPTY_MODULES=(apple_support buildozer protobuf zlib)

write_registry() {
  local modules=$tree/modules name
  for name in "${EMPTY_MODULES[@]}"; do
    mkdir -p "$modules/$name"
    echo "module(name = \"$name\")" >"$modules/$name/MODULE.bazel"
    : >"$modules/$name/BUILD.bazel"
  done
  cp "$here/registry/buildozer_binary.bzl" "$modules/buildozer/"
  # An override of a module that nobody depends on is an error, and a workspace that
  # imports ours does not see our development dependencies.
  echo 'bazel_dep(name = "googletest", version = "1.17.0")' >>"$modules/apple_support/MODULE.bazel"

  # Debian's sources under upstream's label names.
  mv "$tree/usr/src/googletest" "$modules/googletest"
  find "$modules/googletest" \( -name BUILD -o -name BUILD.bazel -o -name MODULE.bazel \
    -o -name 'WORKSPACE*' \) -delete
  cp "$here/registry/googletest.BUILD" "$modules/googletest/BUILD.bazel"
  cp "$here/registry/googletest.MODULE" "$modules/googletest/MODULE.bazel"
}

write_launcher() {
  local share=$prefix/usr/share/bazel override
  {
    echo "# Written by install_debian_bazel.sh: the modules of this prefix instead of a registry's."
    for override in \
      "bazel_features=$share/tools/features" \
      "bazel_skylib=$share/tools/skylib" \
      "googletest=$prefix/modules/googletest" \
      "platforms=$share/tools/platforms" \
      "rules_cc=$share/rules/cc" \
      "rules_java=$share/rules/java" \
      "rules_license=$share/rules/license" \
      "rules_proto=$share/rules/proto" \
      "rules_python=$share/rules/python" \
      "${EMPTY_MODULES[@]/%/=}"; do
      [[ $override == *= ]] && override+=$prefix/modules/${override%=}
      echo "common --override_module=$override"
    done
    echo "common --noenable_workspace"
    echo "# A lock file would record this machine's overrides."
    echo "common --lockfile_mode=off"
  } >"$tree/etc/bazelrc"
  mkdir "$tree/bin.new"
  cat >"$tree/bin.new/bazel" <<END
#!/bin/bash
# Written by install_debian_bazel.sh
exec $prefix/usr/bin/bazel --nosystem_rc --bazelrc=$prefix/etc/bazelrc \\
  --install_base=$share --trust_install_base \\
  --server_javabase=$prefix/usr/lib/jvm/$jvm $jvm_flags "\$@"
END
  chmod 755 "$tree/bin.new/bazel"
}
