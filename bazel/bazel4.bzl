"""Lets Bazel 4, as Debian packages it, work without a network."""

def bazel4_repositories():
    """Stands in for what Bazel 4 would download; later versions bring their own."""

    # Debian's build reports no version at all.
    if native.bazel_version and not native.bazel_version.startswith("4."):
        return
    for name in ["rules_cc", "rules_java", "remote_coverage_tools"]:
        native.local_repository(
            name = name,
            path = "third_party/bazel4/" + name,
        )
