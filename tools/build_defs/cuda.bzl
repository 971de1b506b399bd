"""cuda_library: .cu files compiled by nvcc, as a library that C++ rules can depend on."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load(":cuda_archs.bzl", "CudaArchsInfo")

# target_compatible_with of what makes sense in a CUDA build only: wildcards skip it
# otherwise, and whatever depends on it.
REQUIRES_CUDA = select({
    Label("//tools/build_defs:cuda_enabled"): [],
    "//conditions:default": ["@platforms//:incompatible"],
})

# As ASYNC_EMB_COPTS of copts.bzl. Device arithmetic rounds each operation, as the host's
# does: the results of an update are specified bit for bit.
_NVCC_COPTS = [
    "-std=c++20",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-Wall,-Wextra,-ffp-contract=off",
    "-Xcompiler=-fvisibility=hidden,-fvisibility-inlines-hidden",
]

_MODE_COPTS = {
    "dbg": ["-O0", "-g"],
    "fastbuild": [],
    "opt": ["-O3", "-DNDEBUG"],
}

_SOURCE_EXTENSION = "cu"
_HEADER_EXTENSIONS = ["cuh", "h", "hpp"]

def _own_compilation_context(ctx, headers):
    workspace_root = ctx.label.workspace_root
    return cc_common.create_compilation_context(
        defines = depset(ctx.attr.defines),
        headers = depset(headers),
        quote_includes = depset([
            workspace_root or ".",
            "/".join([part for part in [ctx.bin_dir.path, workspace_root] if part]),
        ]),
    )

def _nvcc_arguments(ctx, cc_toolchain, context):
    """What all sources of the target are compiled with."""
    args = ctx.actions.args()
    args.add_all(["-x", "cu", "-c", "-ccbin", cc_toolchain.compiler_executable])
    args.add_all(_NVCC_COPTS)
    args.add_all(_MODE_COPTS[ctx.var["COMPILATION_MODE"]])
    args.add_all(ctx.attr._archs[CudaArchsInfo].gencode_flags)
    args.add_all(ctx.attr._copts[BuildSettingInfo].value)
    args.add_all(ctx.attr.copts)
    args.add_all(context.defines, format_each = "-D%s")
    args.add_all(ctx.attr.local_defines, format_each = "-D%s")

    # nvcc has no -iquote.
    args.add_all(depset(transitive = [context.quote_includes, context.includes]), format_each = "-I%s")
    args.add_all(
        depset(transitive = [context.system_includes, context.external_includes]),
        before_each = "-isystem",
    )
    return args

def _compile(ctx, cc_toolchain, context, sources, headers):
    """Registers one action for each source; returns the objects."""
    arguments = _nvcc_arguments(ctx, cc_toolchain, context)
    nvcc = ctx.files._nvcc[0]
    objects = []
    for source in sources:
        stem = source.basename.removesuffix("." + source.extension)
        out = ctx.actions.declare_file("_objs/%s/%s.cu.pic.o" % (ctx.label.name, stem))
        ctx.actions.run(
            executable = nvcc,
            arguments = [arguments, source.path, "-o", out.path],
            inputs = depset(
                [source] + headers + ctx.files._nvcc + ctx.files._nvcc_files,
                transitive = [context.headers, cc_toolchain.all_files],
            ),
            outputs = [out],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %{label} with nvcc: " + source.short_path,
            use_default_shell_env = True,
        )
        objects.append(out)
    return objects

def _cuda_library_impl(ctx):
    cc_toolchain = find_cc_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    sources = [f for f in ctx.files.srcs if f.extension == _SOURCE_EXTENSION]
    headers = [f for f in ctx.files.srcs if f.extension != _SOURCE_EXTENSION]
    info = cc_common.merge_cc_infos(
        direct_cc_infos = [CcInfo(compilation_context = _own_compilation_context(ctx, ctx.files.hdrs))],
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._runtime]],
    )
    objects = _compile(ctx, cc_toolchain, info.compilation_context, sources, headers)
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        alwayslink = ctx.attr.alwayslink,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        disallow_dynamic_library = True,
        feature_configuration = features,
        linking_contexts = [info.linking_context],
    )
    return [
        DefaultInfo(files = depset(objects)),
        CcInfo(compilation_context = info.compilation_context, linking_context = linking_context),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "alwayslink": attr.bool(),
        "copts": attr.string_list(),
        "defines": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = ["." + e for e in _HEADER_EXTENSIONS]),
        "local_defines": attr.string_list(),
        "srcs": attr.label_list(
            allow_files = ["." + e for e in [_SOURCE_EXTENSION] + _HEADER_EXTENSIONS],
            mandatory = True,
        ),
        "_archs": attr.label(default = "//tools/build_defs:cuda_archs"),
        "_copts": attr.label(default = "//tools/build_defs:nvcc_copts"),
        "_nvcc": attr.label(default = "//third_party/cuda:nvcc"),
        "_nvcc_files": attr.label(default = "//third_party/cuda:nvcc_files"),
        "_runtime": attr.label(default = "//third_party/cuda:runtime"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = use_cc_toolchain(),
)

def cuda_library(name, target_compatible_with = [], **kwargs):
    """Device code and what launches it; there in CUDA builds (--config=cuda) only.

    Device code is whole in each .cu file: no file calls device functions of another.
    Two files of one target have different names. CUDA's headers and static runtime are
    among the dependencies.

    Args:
      name: name of the target.
      target_compatible_with: constraints beside that of a CUDA build.
      **kwargs: srcs (.cu, and headers that are used here alone), hdrs, deps, copts (for
        nvcc), defines, local_defines and alwayslink as for cc_library; visibility, tags
        and the like.
    """
    _cuda_library(
        name = name,
        target_compatible_with = target_compatible_with + REQUIRES_CUDA,
        **kwargs
    )
