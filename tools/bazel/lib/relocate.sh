# shellcheck shell=bash
# Makes the unpacked tree run from the prefix, with its own C library and Java.
#
# Reads prefix, tree, triplet, loader, arch, bazel_version. Sets jvm (its folder's name).

relocate_tree() {
  say "relocating"
  local jvm_folder
  jvm_folder=$(find "$tree/usr/lib/jvm" -mindepth 1 -maxdepth 1 -type d -name "java-*-openjdk-$arch")
  jvm=$(basename "$jvm_folder")
  make_links_relative
  remove_unused "$jvm_folder"
  local program
  for program in "$tree/usr/bin/bazel" "$tree/usr/libexec/$triplet/bazel"/* \
    "$jvm_folder/bin/java" "$jvm_folder/lib/jspawnhelper"; do
    relocate_program "$program"
  done
  rm -f "$tree/usr/bin/patchelf"
  complete_class_path
}

# An absolute link that leads into the tree would lead to the host's file instead.
make_links_relative() {
  local link target
  while IFS= read -r link; do
    target=$tree$(readlink "$link")
    if [[ -e $target || -L $target ]]; then
      ln -sfn "$(realpath -sm --relative-to="$(dirname "$link")" "$target")" "$link"
    fi
  done < <(find "$tree" -type l -lname '/*')
}

# Removes documentation and the parts of Java that draw on a screen.
remove_unused() {
  local lib=$1/lib
  rm -rf "$tree"/usr/share/{bash-completion,binfmts,bug,doc,gcc,gdb,lintian,locale,man} \
    "$tree/usr/lib/$triplet/gconv" "$tree/var" "$lib"/libawt* "$lib/libfontmanager.so" \
    "$lib/libfreetype.so" "$lib/libjavajpeg.so" "$lib/liblcms.so" "$lib/libmlib_image.so" \
    "$lib/libsplashscreen.so" "$lib/classlist" "$lib"/server/classes_*.jsa
}

# Points a program at the prefix's own loader and libraries. DT_RPATH and not RUNPATH:
# it also holds for libraries opened later, and goes before LD_LIBRARY_PATH.
relocate_program() {
  local program=$1 libraries=$tree/usr/lib/$triplet search_path strays
  [[ -f $program && ! -L $program ]] ||
    die "Debian's packages have another layout than this installer knows: ${program#"$tree"} is not there"
  search_path="\$ORIGIN/$(realpath -m --relative-to="$(dirname "$program")" "$libraries"):\$ORIGIN/../lib"
  "$libraries/$loader" --library-path "$libraries" "$tree/usr/bin/patchelf" \
    --set-interpreter "$prefix/usr/lib/$triplet/$loader" \
    --force-rpath --set-rpath "$search_path" "$program" ||
    die "patchelf failed on ${program#"$tree"}"
  if strays=$("$libraries/$loader" --list "$program" 2>&1 | grep -E '=> (/usr)?/lib|not found'); then
    die "the list of packages lacks a library of ${program#"$tree"}:"$'\n'"$strays"
  fi
}

# Debian's class path misses jars, and its server has no version to tell.
complete_class_path() {
  local list=$tree/usr/share/bazel/bazel_classpath_debian_depends.txt jar
  mkdir -p "$tree/etc/classes"
  printf 'build.label=%s\n' "${bazel_version%%[+-]*}" >"$tree/etc/classes/build-data.properties"
  {
    tr -s ' \n' '\n\n' <"$list"
    echo /etc/classes
    find "$tree/usr/share/java" -regex '.*/perfmark-[a-z0-9]+\.jar' -printf '/usr/share/java/%f\n'
  } | sort -u | while IFS= read -r jar; do
    if [[ -n $jar && -e $tree$jar ]]; then
      printf '%s\n' "$prefix$jar"
    fi
  done >"$list.new"
  mv "$list.new" "$list"
}
