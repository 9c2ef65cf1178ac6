// Stands for the library where there is none.
#include "kernels/cuda/cublas.h"

namespace strata::cuda {

bool HasLibrary() { return false; }
bool RunLibrary(Queue&, const Product&) { return false; }

}  // namespace strata::cuda
