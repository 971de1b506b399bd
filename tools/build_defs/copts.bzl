"""Compiler flags of this project's C++.

They stand here and not in .bazelrc, because a workspace that imports this module does
not read our .bazelrc. Making warnings errors is left to .bazelrc for the same reason.
"""

# Contraction is off so that a*b+c is rounded twice everywhere: the update's results are
# specified bit for bit and must not depend on the compiler or the machine.
ASYNC_EMB_COPTS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
] + select({
    Label("//tools/build_defs:opt"): ["-O3"],
    "//conditions:default": [],
})

# nanobind's headers expect this of code that uses them.
NANOBIND_COPTS = ["-fno-strict-aliasing"]

ASYNC_EMB_LINKOPTS = ["-pthread"]
