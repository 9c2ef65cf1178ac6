// The keys of data.curriculum and data.random_ltd, for tools/config.cc. Threading: as YamlSection.
#pragma once

#include <vector>

#include "tools/config.h"
#include "tools/yaml_reader.h"

namespace strata {

/// Sections inside `data`, in order.
std::vector<YamlSection> DataEfficiencyKeys(DataSection& data);

}  // namespace strata
