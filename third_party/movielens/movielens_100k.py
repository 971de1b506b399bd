"""Says where the MovieLens-100K files lie: ml-100k.inter, ml-100k.item, ml-100k.user.

Each is a table of tab-separated text under a header line of "name:type" fields.
"""

import pathlib

# Bazel lays this module beside the files.
DATA_DIR = pathlib.Path(__file__).absolute().parent
