"""CUDA sources compiled by nvcc, and the toolkit's libraries; both exist under --config=cuda alone."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load(":gpu.bzl", "GPU_LIBRARY_ATTRS", "gpu_library_impl")

_TOOLKIT = "/usr/local/cuda"

# The processors compiled for (A100, H100, B200, RTX 50); PTX is left for later ones.
_GENCODE = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=sm_100",
    "-gencode=arch=compute_120,code=sm_120",
    "-gencode=arch=compute_80,code=compute_80",
]
_FLAGS = ["-x", "cu", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-Wall"] + _GENCODE

def _cuda_library_impl(ctx):
    return gpu_library_impl(
        ctx,
        compiler = _TOOLKIT + "/bin/nvcc",
        flags = ["-ccbin", find_cpp_toolchain(ctx).compiler_executable] + _FLAGS,
        env = {"PATH": _TOOLKIT + "/bin:/usr/bin:/bin"},
        mnemonic = "CudaCompile",
    )

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = GPU_LIBRARY_ATTRS,
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, deps = [], **kwargs):
    """A library of sources that nvcc compiles; `bazel build //...` skips it without --config=cuda."""
    _cuda_library(
        name = name,
        deps = deps + ["//third_party:cudart"],
        **kwargs
    )

def cuda_dep(name):
    """//third_party:name, a library of the CUDA toolkit."""
    native.alias(
        name = name,
        actual = select({
            "//bazel:with_cuda": "@cuda//:" + name,
            "//conditions:default": ":no_toolkit",
        }),
    )
