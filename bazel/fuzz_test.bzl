"""fuzz_test: a libFuzzer target in the suite, on its seeds and on mutations of them (tests/fuzz.h)."""

def fuzz_test(name, deps, mutations):
    """Builds NAME.cc with a main of ours; tools/fuzz.sh builds it with libFuzzer.

    Args:
      name: ends in "_fuzz"; its seeds lie in tests/data/fuzz/ under what is before that.
      deps: what the target reads bytes with.
      mutations: how many are tried; about a second's worth.
    """
    native.cc_test(
        name = name,
        size = "small",
        srcs = [name + ".cc"],
        args = [
            "tests/data/fuzz/" + name[:-len("_fuzz")],
            str(mutations),
        ],
        data = ["//tests:fuzz_seeds"],
        deps = deps + ["//tests:fuzz_main"],
    )
