"""How kernels are compiled for the race build (race.h)."""

# gcc's instrumentation for ThreadSanitizer, whose calls land in the emulator instead. With DWARF 5, gcc 12 and
# binutils 2.40 name the wrong file for code from headers.
RACE_COPTS = [
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
]
