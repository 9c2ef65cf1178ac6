"""Kernels that are compiled once for each instruction set."""

_KERNEL_COPTS = ["-O3"]

_AVX512_COPTS = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
]

# Flags of each instruction set beyond the baseline of x86-64.
_ISA_COPTS = {
    "scalar": [],
    "avx2": [
        "-mavx2",
        "-mfma",
        "-mf16c",
    ],
    "avx512": _AVX512_COPTS,
    "avx512bf16": _AVX512_COPTS + ["-mavx512bf16"],
}

# Namespace of the code, by the name of its flags.
_NAMESPACES = {
    "scalar": "cpu_scalar",
    "avx2": "cpu_avx2",
    "avx512": "cpu_avx512",
    "avx512bf16": "cpu_avx512_bf16",
}

def isa_library(name, srcs, isas = ["scalar", "avx2", "avx512"], contract = True, deps = [], **kwargs):
    """A cc_library of `srcs` compiled for each of `isas`, in the namespace STRATA_CPU_ISA of each.

    Args:
      name: of the whole; the part for one instruction set is NAME_ISA.
      srcs: sources and their headers.
      isas: names of _ISA_COPTS.
      contract: whether a*b+c may become one instruction. False where results must have the same bits everywhere.
      deps: of each part.
      **kwargs: for each part.
    """
    for isa in isas:
        native.cc_library(
            name = name + "_" + isa,
            srcs = srcs,
            copts = _KERNEL_COPTS + _ISA_COPTS[isa] + ["-ffp-contract=" + ("fast" if contract else "off")],
            local_defines = ["STRATA_CPU_ISA=" + _NAMESPACES[isa]],
            deps = deps,
            **kwargs
        )
    native.cc_library(
        name = name,
        deps = [name + "_" + isa for isa in isas],
        **{key: value for key, value in kwargs.items() if key in ["testonly", "visibility"]}
    )
