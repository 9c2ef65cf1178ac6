"""Kernels that three compilers take."""

load("//bazel:cuda.bzl", "cuda_library")
load("//kernels/simt:race.bzl", "RACE_COPTS")

def simt_library(name, srcs, hdrs, deps, cuda_srcs, emulated_srcs, emulated_deps):
    """A library of CUDA kernels and of the host code that starts them.

    NAME_cuda is compiled by nvcc and exists under --config=cuda alone; NAME_emulated runs on the CPU; NAME_raced does
    so, too, and has the emulator check each access to memory (kernels/simt/race.h).

    Args:
      name: of the three.
      srcs: .cc files of all three.
      hdrs: their headers.
      deps: of all three.
      cuda_srcs: of the first alone.
      emulated_srcs: of the other two.
      emulated_deps: of the other two.
    """
    cuda_library(
        name = name + "_cuda",
        srcs = srcs + cuda_srcs,
        hdrs = hdrs,
        deps = deps + ["//kernels/simt"],
    )
    for kind, copts, more_deps in [
        ("emulated", [], []),
        ("raced", RACE_COPTS, ["//kernels/simt:race"]),
    ]:
        native.cc_library(
            name = name + "_" + kind,
            testonly = kind == "raced",
            srcs = srcs + emulated_srcs,
            hdrs = hdrs,
            copts = copts,
            deps = deps + emulated_deps + more_deps + ["//kernels/simt:emulator"],
        )
