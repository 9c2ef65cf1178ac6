"""An aspect that has clang-tidy read C++ sources (tools/lint.sh); like objects, only what changed is read again.

Tests are left out: Catch2's header alone costs ten seconds a file.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _is_for_clang_tidy(flag):
    """Leaves out code generation, of which gcc and clang have different words, and the judging of warnings."""
    return not flag.startswith("-f") and flag != "-Werror"

def _compile_flags(ctx, context):
    """The flags this target's sources are compiled with."""
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.rule.attr.copts,
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = depset(
            ctx.rule.attr.defines + ctx.rule.attr.local_defines,
            transitive = [context.defines],
        ),
    )
    flags = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = "c++-compile",
        variables = variables,
    )
    return [flag for flag in flags if _is_for_clang_tidy(flag)]

def _clang_tidy_impl(target, ctx):
    if ctx.rule.kind not in ["cc_library", "cc_binary"] or ctx.rule.attr.testonly or ctx.label.workspace_name:
        return []
    if [define for define in ctx.rule.attr.local_defines if define.startswith("STRATA_CPU_ISA=")]:
        return []  # gcc's vector extensions have words that clang does not know
    files = ctx.rule.files
    sources = [f for f in files.srcs if f.extension == "cc"]
    context = cc_common.merge_cc_infos(
        cc_infos = [t[CcInfo] for t in [target] + ctx.rule.attr.deps if CcInfo in t],
    ).compilation_context
    flags = _compile_flags(ctx, context)
    stamps = []
    for source in sources:
        stamp = ctx.actions.declare_file("_clang_tidy/%s/%s.ok" % (ctx.label.name, source.basename))
        ctx.actions.run(
            executable = ctx.file._script,
            arguments = [stamp.path, source.path, "--"] + flags,
            inputs = depset(
                files.srcs + getattr(files, "hdrs", []) + getattr(files, "textual_hdrs", []) + [ctx.file._config],
                transitive = [context.headers],
            ),
            outputs = [stamp],
            mnemonic = "ClangTidy",
            progress_message = "Reading %s" % source.short_path,
            use_default_shell_env = True,
        )
        stamps.append(stamp)
    return [OutputGroupInfo(clang_tidy = depset(stamps))]

clang_tidy = aspect(
    implementation = _clang_tidy_impl,
    attrs = {
        "_config": attr.label(
            default = "//:.clang-tidy",
            allow_single_file = True,
        ),
        "_script": attr.label(
            default = "//bazel:clang_tidy.sh",
            allow_single_file = True,
        ),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
