// Stands in for the CUDA toolkit's header under hipcc.
#pragma once

#include "kernels/simt/hip.h"
