"""Libraries of sources that a GPU's compiler takes: the part that bazel/cuda.bzl and bazel/hip.bzl share."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

GPU_LIBRARY_ATTRS = {
    "srcs": attr.label_list(allow_files = [".cc"]),
    "hdrs": attr.label_list(allow_files = [".h"]),
    "deps": attr.label_list(providers = [CcInfo]),
    "copts": attr.string_list(),
    "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
}

def _compile(ctx, src, headers, compiler, flags, env, mnemonic):
    """Registers the action of one source; returns its object."""
    stem = src.basename[:-len(src.extension) - 1]
    obj = ctx.actions.declare_file("_gpu/%s/%s.pic.o" % (ctx.label.name, stem))
    args = ctx.actions.args()
    args.add_all(flags)
    args.add_all(headers.defines, format_each = "-D%s")
    args.add_all(headers.quote_includes, before_each = "-I")
    args.add_all(headers.includes, before_each = "-I")
    args.add_all(headers.system_includes, before_each = "-isystem")
    args.add_all(ctx.attr.copts)
    args.add("-c", src)
    args.add("-o", obj)
    ctx.actions.run(
        executable = compiler,
        arguments = [args],
        inputs = depset(ctx.files.srcs + ctx.files.hdrs, transitive = [headers.headers]),
        outputs = [obj],
        mnemonic = mnemonic,
        progress_message = "Compiling %s" % src.short_path,
        env = env,
    )
    return obj

def gpu_library_impl(ctx, compiler, flags, env, mnemonic):
    """What the implementation of a rule with GPU_LIBRARY_ATTRS returns.

    Args:
      ctx: the rule's.
      compiler: a file or an absolute path.
      flags: of all sources.
      env: of the compiler.
      mnemonic: of its actions.
    Returns:
      The library's providers.
    """
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
        _compile(ctx, src, headers, compiler, flags, env, mnemonic)
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
