"""Stands in for buildozer's module extension, which Bazel names but never uses here."""

def _repository_impl(rctx):
    rctx.file("BUILD.bazel", "")

_repository = repository_rule(implementation = _repository_impl)

def _extension_impl(_mctx):
    _repository(name = "buildozer_binary")

buildozer_binary = module_extension(implementation = _extension_impl)
