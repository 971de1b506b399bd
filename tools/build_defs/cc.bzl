"""C++ libraries of this project: cc_library with the project's flags."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load(":copts.bzl", "ASYNC_EMB_COPTS", "ASYNC_EMB_LINKOPTS")

def async_emb_cc_library(name, copts = [], linkopts = [], **kwargs):
    """A cc_library, always linked statically, as its symbols are hidden.

    Args:
      name: name of the target.
      copts: flags after the project's own.
      linkopts: linker flags after the project's own.
      **kwargs: as for cc_library.
    """
    cc_library(
        name = name,
        copts = ASYNC_EMB_COPTS + copts,
        linkopts = ASYNC_EMB_LINKOPTS + linkopts,
        linkstatic = True,
        **kwargs
    )
