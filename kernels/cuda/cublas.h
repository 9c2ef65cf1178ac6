// NVIDIA's cuBLASLt, opened while running where it is installed: nothing is linked, and a machine without it
// makes all products by gemm.h.
//
// Ownership: the library stays open; its handle, its workspace (32 MiB of the device's memory, tag `buffers`)
// and what it chose for each shape are kept with the stream (CudaStream::products). Threading: the rank's
// thread.
#pragma once

#include "kernels/cuda/gemm.h"

namespace strata::cuda {

/// Whether it could be opened.
bool HasLibrary();

/// Makes the product, if the library is there, knows a way for these types and layouts, and has an epilogue
/// that means the same. Says whether it did; if not, nothing was done. fp32 is full fp32, not TF32.
///
/// Taken from its epilogues: the bias, of c's type; the sum with c or with a residual; and the gradient of
/// GELU by tanh (DGELU). Its GELU is not ours: it activates the sum before it is rounded to c's type, and
/// activation_forward could not make the same again.
bool RunLibrary(Queue& queue, const Product& product);

}  // namespace strata::cuda
