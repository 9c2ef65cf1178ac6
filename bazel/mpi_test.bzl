"""Tests that run as several MPI ranks."""

def mpi_test(name, ranks, srcs, deps = [], copts = [], args = [], data = [], tags = [], **kwargs):
    """Builds a test program and runs it under mpirun.

    Args:
      name: the test; its program is name + "_program".
      ranks: how many ranks to start on this machine.
      srcs: as in cc_test.
      deps: as in cc_test.
      copts: as in cc_test.
      args: arguments to the program.
      data: as in cc_test.
      tags: as in cc_test; "mpi" is added.
      **kwargs: attributes of the test itself (size, timeout, ...).
    """
    program = name + "_program"
    native.cc_binary(
        name = program,
        testonly = True,
        srcs = srcs,
        copts = copts,
        deps = deps,
    )
    native.sh_test(
        name = name,
        srcs = ["//bazel:mpi_test.sh"],
        args = [str(ranks), "$(rootpath :%s)" % program] + args,
        data = [":" + program] + data,
        tags = [
            "cpu:%d" % ranks,
            "mpi",
        ] + tags,
        **kwargs
    )
