"""CUDA sources compiled by nvcc, and the toolkit's libraries; both exist under --config=cuda alone."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

_TOOLKIT = "/usr/local/cuda"

# The processors compiled for (A100, H100, B200, RTX 50); PTX is left for later ones.
_GENCODE = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=sm_100",
    "-gencode=arch=compute_120,code=sm_120",
    "-gencode=arch=compute_80,code=compute_80",
]

def _compile(ctx, src, headers, host_compiler):
    """Registers the nvcc action of one source; returns its object."""
    stem = src.basename[:-len(src.extension) - 1]
    obj = ctx.actions.declare_file("_cuda/%s/%s.pic.o" % (ctx.label.name, stem))
    args = ctx.actions.args()
    args.add("-c", src)
    args.add("-o", obj)
    args.add("-ccbin", host_compiler)
    args.add_all(["-x", "cu", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-Wall"])
    args.add_all(_GENCODE)
    args.add_all(headers.defines, format_each = "-D%s")
    args.add_all(headers.quote_includes, before_each = "-I")
    args.add_all(headers.includes, before_each = "-I")
    args.add_all(headers.system_includes, before_each = "-isystem")
    args.add_all(ctx.attr.copts)
    ctx.actions.run(
        executable = _TOOLKIT + "/bin/nvcc",
        arguments = [args],
        inputs = depset(ctx.files.srcs + ctx.files.hdrs, transitive = [headers.headers]),
        outputs = [obj],
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s" % src.short_path,
        env = {"PATH": _TOOLKIT + "/bin:/usr/bin:/bin"},
    )
    return obj

def _cuda_library_impl(ctx):
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    headers = deps.compilation_context
    objects = depset([
        _compile(ctx, src, headers, cc_toolchain.compiler_executable)
        for src in ctx.files.srcs
    ])
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = objects,
            pic_objects = objects,
        ),
        linking_contexts = [deps.linking_context],
        disallow_dynamic_library = True,
    )
    own = CcInfo(
        compilation_context = cc_common.create_compilation_context(headers = depset(ctx.files.hdrs)),
        linking_context = linking_context,
    )
    return [
        DefaultInfo(files = objects),
        cc_common.merge_cc_infos(cc_infos = [own, CcInfo(compilation_context = headers)]),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cc"]),
        "hdrs": attr.label_list(allow_files = [".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "copts": attr.string_list(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
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
            "//conditions:default": ":no_cuda",
        }),
    )
