// Prints docs/configuration.md.
#include <cstdio>

#include "tools/config.h"

int main() { std::fputs(strata::ConfigurationReference().c_str(), stdout); }
