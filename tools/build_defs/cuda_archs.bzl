"""The build setting //tools/build_defs:cuda_archs: for which GPUs device code is made."""

CudaArchsInfo = provider(
    doc = "For which GPUs device code is made.",
    fields = {"gencode_flags": "list of flags for nvcc"},
)

_SUFFIXES = ["", "a", "f"]

def _check_arch(arch, value):
    number = arch.rstrip("af")
    valid = len(number) in [2, 3] and number.isdigit() and arch[len(number):] in _SUFFIXES
    if not valid:
        fail(("cuda_archs is '%s', in which '%s' is no compute capability: give two or three " +
              "digits, as 90 for 9.0, and after them an a or f for code of that family alone; " +
              "separate several by commas without blanks, as 80,90,100") % (value, arch))

def gencode_flags(value):
    """The flags of nvcc that make code for each GPU, and PTX of the last one for later GPUs.

    Args:
      value: compute capabilities separated by commas, such as "80,90,100".

    Returns:
      The flags in the order of the value.
    """
    archs = value.split(",")
    for index, arch in enumerate(archs):
        _check_arch(arch, value)
        if arch in archs[:index]:
            fail("cuda_archs is '%s', which names %s more than once" % (value, arch))
    targets = [(arch, "sm_" + arch) for arch in archs] + [(archs[-1], "compute_" + archs[-1])]
    return ["-gencode=arch=compute_%s,code=%s" % target for target in targets]

def _cuda_archs_flag_impl(ctx):
    return [CudaArchsInfo(gencode_flags = gencode_flags(ctx.build_setting_value))]

cuda_archs_flag = rule(
    implementation = _cuda_archs_flag_impl,
    build_setting = config.string(flag = True),
    doc = "Compute capabilities separated by commas.",
)
