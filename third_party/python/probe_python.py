"""Prints, as JSON, what host_python.bzl must know of the interpreter that runs this.

Runs under any Python 3, however old, so that one that is too old can be named as such.
"""

import importlib.util
import json
import os
import sys
import sysconfig


def probe() -> dict:
    """Returns the description of the running interpreter."""
    include = sysconfig.get_paths()["include"]
    return {
        "executable": os.path.realpath(sys.executable),
        "version": list(sys.version_info[:2]),
        "include": include,
        "has_headers": os.path.exists(os.path.join(include, "Python.h")),
        "has_pip": importlib.util.find_spec("pip") is not None,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
