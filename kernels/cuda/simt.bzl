"""Kernels that three compilers take."""

load("//bazel:cuda.bzl", "cuda_library")
load("//bazel:hip.bzl", "hip_library")
load("//kernels/simt:race.bzl", "RACE_COPTS")

def simt_library(name, srcs, hdrs, deps, cuda_srcs, cuda_deps, hip_srcs, emulated_srcs, emulated_deps):
    """A library of CUDA kernels and of the host code that starts them.

    NAME_cuda is compiled by nvcc and exists under --config=cuda alone, NAME_hip by hipcc and under --config=hip;
    NAME_emulated runs on the CPU; NAME_raced does so, too, and has the emulator check each access to memory
    (kernels/simt/race.h); NAME_portable runs the variant that AMD's GPUs get (kernels/simt/simt.h).

    Args:
      name: of the five.
      srcs: .cc files of all five.
      hdrs: their headers.
      deps: of all five.
      cuda_srcs: of the first alone.
      cuda_deps: of the first alone.
      hip_srcs: of the second alone.
      emulated_srcs: of the other three.
      emulated_deps: of the other three.
    """
    cuda_library(
        name = name + "_cuda",
        srcs = srcs + cuda_srcs,
        hdrs = hdrs,
        deps = deps + cuda_deps + ["//kernels/simt"],
    )
    hip_library(
        name = name + "_hip",
        srcs = srcs + hip_srcs,
        hdrs = hdrs,
        deps = deps + [
            "//kernels/simt",
            "//kernels/simt:hip_twin",
        ],
    )
    for kind, copts, more_deps in [
        ("emulated", [], []),
        ("raced", RACE_COPTS, ["//kernels/simt:race"]),
        ("portable", ["-DSIMT_PORTABLE"], []),
    ]:
        native.cc_library(
            name = name + "_" + kind,
            testonly = kind != "emulated",
            srcs = srcs + emulated_srcs,
            hdrs = hdrs,
            copts = copts,
            tags = ["manual"] if kind == "portable" else [],
            deps = deps + emulated_deps + more_deps + ["//kernels/simt:emulator"],
        )
