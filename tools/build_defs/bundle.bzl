"""bundle: a .tar.gz of Python files, extensions and programs, to be run without Bazel."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")

def _is_ours(file):
    # Not of another repository, nor a shared library of one that is linked to.
    return not file.short_path.startswith("../") and not file.short_path.startswith("_solib")

def _bundle_impl(ctx):
    names = {file.short_path: file for file in ctx.files.srcs}
    for dep in ctx.attr.deps:
        for file in dep[DefaultInfo].default_runfiles.files.to_list():
            if _is_ours(file):
                names[file.short_path] = file
    for file in ctx.files.root_files:
        names[file.basename] = file

    cc_toolchain = find_cc_toolchain(ctx)
    archive = ctx.actions.declare_file(ctx.label.name + ".tar.gz")
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    arguments.add("--output", archive)
    arguments.add("--root", ctx.label.name)
    arguments.add("--strip", cc_toolchain.strip_executable)
    arguments.add_all(["%s=%s" % (name, file.path) for name, file in sorted(names.items())])
    ctx.actions.run(
        executable = ctx.executable._make_bundle,
        arguments = [arguments],
        inputs = depset(names.values(), transitive = [cc_toolchain.all_files]),
        outputs = [archive],
        mnemonic = "Bundle",
        progress_message = "Packing %{output}",
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([archive]))]

bundle = rule(
    implementation = _bundle_impl,
    attrs = {
        "deps": attr.label_list(
            doc = "Targets that are packed with all they need at run time, less what is of other repositories.",
        ),
        "root_files": attr.label_list(
            allow_files = True,
            doc = "Files that lie at the top of the bundle, whatever their folder here.",
        ),
        "srcs": attr.label_list(
            allow_files = True,
            doc = "Files and programs that lie where they are here, seen from the root of the workspace.",
        ),
        "_make_bundle": attr.label(
            cfg = "exec",
            default = "//tools/build_defs:make_bundle",
            executable = True,
        ),
    },
    doc = "Makes NAME.tar.gz with one folder NAME. Same files, same archive; objects are stripped.",
    toolchains = use_cc_toolchain(),
)
