"""CUDA sources compiled by hipcc for AMD GPUs, and HIP's runtime; both exist under --config=hip alone."""

load(":gpu.bzl", "GPU_LIBRARY_ATTRS", "gpu_library_impl")

# The processors compiled for: MI210 to MI250, with waves of 64, and RX 6800 to 6950, with waves of 32.
_ARCHITECTURES = ["gfx90a", "gfx1030"]

# HIP's functions are [[nodiscard]] where CUDA's are not; a loop that is too long for its "#pragma unroll" is one that
# tensor cores would have made short (kernels/simt/mma_portable.h).
_FLAGS = [
    "-x",
    "hip",
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-result",
    "-Wno-pass-failed",
] + ["--offload-arch=" + arch for arch in _ARCHITECTURES]

def _hip_library_impl(ctx):
    return gpu_library_impl(
        ctx,
        compiler = ctx.files._hipcc[0],
        flags = _FLAGS,
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "HipCompile",
    )

_hip_library = rule(
    implementation = _hip_library_impl,
    attrs = dict(GPU_LIBRARY_ATTRS, _hipcc = attr.label(
        default = "//third_party:hipcc",
        allow_files = True,  # not a single one: without HIP it is none
    )),
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def hip_library(name, deps = [], **kwargs):
    """A library of sources that hipcc compiles; `bazel build //...` skips it without --config=hip."""
    _hip_library(
        name = name,
        deps = deps + ["//third_party:amdhip64"],
        **kwargs
    )

def hip_dep(name):
    """//third_party:name, a part of HIP."""
    native.alias(
        name = name,
        actual = select({
            "//bazel:with_hip": "@hip//:" + name,
            "//conditions:default": ":no_toolkit",
        }),
    )

def _hip_repository_impl(repository):
    hipcc = repository.which("hipcc")
    if not hipcc and repository.path("/opt/rocm/bin/hipcc").exists:
        hipcc = repository.path("/opt/rocm/bin/hipcc")
    if not hipcc:
        fail("--config=hip needs hipcc, HIP's compiler, which is neither on the PATH nor in /opt/rocm/bin " +
             "(on Debian 12, as root: apt-get install hipcc libamdhip64-dev)")

    # A link would do, if hipcc did not look for its parts beside itself.
    repository.file("hipcc", "#!/bin/sh\nexec %s \"$@\"\n" % hipcc)
    lib = hipcc.dirname.dirname.get_child("lib")
    repository.file("BUILD.bazel", """
package(default_visibility = ["//visibility:public"])

exports_files(["hipcc"])

cc_library(
    name = "amdhip64",
    linkopts = [
        "-L{lib}",
        "-Wl,-rpath,{lib}",
        "-lamdhip64",
    ],
)
""".format(lib = lib))

# hipcc, wherever it is, and its runtime. Looked for under --config=hip alone.
hip_repository = repository_rule(
    implementation = _hip_repository_impl,
    environ = ["PATH"],
    local = True,
)
