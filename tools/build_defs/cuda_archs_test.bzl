"""Tests of cuda_archs.bzl."""

load("@bazel_skylib//lib:unittest.bzl", "analysistest", "asserts", "unittest")
load(":cuda_archs.bzl", "gencode_flags")

_FLAG = str(Label(":cuda_archs"))

def _code_for_each_and_ptx_of_the_last_impl(ctx):
    env = unittest.begin(ctx)
    asserts.equals(
        env,
        [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_100a,code=sm_100a",
            "-gencode=arch=compute_100a,code=compute_100a",
        ],
        gencode_flags("80,100a"),
    )
    return unittest.end(env)

_code_for_each_and_ptx_of_the_last_test = unittest.make(_code_for_each_and_ptx_of_the_last_impl)

def _refusal_test(value, message):
    """A rule that expects the message when the flag has the value."""

    def _impl(ctx):
        env = analysistest.begin(ctx)
        asserts.expect_failure(env, message)
        return analysistest.end(env)

    return analysistest.make(_impl, config_settings = {_FLAG: value}, expect_failure = True)

_refuses_words_test = _refusal_test("80,sm_90", "'sm_90' is no compute capability")
_refuses_blanks_test = _refusal_test("80, 90", "' 90' is no compute capability")
_refuses_nothing_test = _refusal_test("", "'' is no compute capability")
_refuses_other_suffixes_test = _refusal_test("90aa", "'90aa' is no compute capability")
_refuses_repetition_test = _refusal_test("80,90,80", "names 80 more than once")

def cuda_archs_test_suite(name):
    """The tests and a test_suite of them.

    Args:
      name: name of the suite.
    """
    _code_for_each_and_ptx_of_the_last_test(
        name = name + "_code_for_each_and_ptx_of_the_last",
        size = "small",
    )
    refusals = {
        "blanks": _refuses_blanks_test,
        "nothing": _refuses_nothing_test,
        "other_suffixes": _refuses_other_suffixes_test,
        "repetition": _refuses_repetition_test,
        "words": _refuses_words_test,
    }
    for what, test in refusals.items():
        test(
            name = "%s_refuses_%s" % (name, what),
            size = "small",
            target_under_test = ":cuda_archs",
        )
    native.test_suite(
        name = name,
        tests = [":%s_code_for_each_and_ptx_of_the_last" % name] +
                [":%s_refuses_%s" % (name, what) for what in refusals],
    )
