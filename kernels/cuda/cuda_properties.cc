#include "kernels/cuda/cuda_properties.h"

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/cuda_stream.h"

namespace strata {
namespace {

// 0 where the GPU does not say.
int Attribute(cudaDeviceAttr attribute, int index) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, index) == cudaSuccess) return value;
  cudaGetLastError();  // which stays otherwise, and would be taken for a later call's
  return 0;
}

// FLOPs of a multiprocessor in a clock. The architectures of workstations and games are left out: some of
// their products sum in fp32 at half the rate, and nothing says which.
double Bf16FlopsPerClock([[maybe_unused]] int compute_capability) {
#ifdef __HIP__
  return 0;  // AMD's numbers are others
#else
  switch (compute_capability) {
    case 80:  // A100: 312 TFLOP/s from 108 multiprocessors at 1.41 GHz
      return 2048;
    case 90:  // H100: 989 TFLOP/s from 132 at 1.83 GHz
      return 4096;
    case 100:  // B200: 2250 TFLOP/s from 148 at 1.85 GHz
    case 103:
      return 8192;
    default:
      return 0;
  }
#endif
}

}  // namespace

CudaProperties PropertiesOfCudaDevice(int index) {
  CudaProperties made;
  cudaDeviceProp properties;
  CheckCuda(cudaGetDeviceProperties(&properties, index), StrCat("asking for GPU ", index));
  CheckCuda(cudaDriverGetVersion(&made.driver_cuda), "asking for the driver's version");
  made.name = properties.name;
  made.memory = static_cast<int64_t>(properties.totalGlobalMem);
  made.compute_capability = 10 * Attribute(cudaDevAttrComputeCapabilityMajor, index) +
                            Attribute(cudaDevAttrComputeCapabilityMinor, index);
  made.multiprocessors = Attribute(cudaDevAttrMultiProcessorCount, index);
  made.cublas = cuda::HasLibrary();
  if (made.name.starts_with("NVIDIA")) {  // others number their architectures otherwise
    made.bf16_flops = Bf16FlopsPerClock(made.compute_capability) * made.multiprocessors * 1e3 *
                      Attribute(cudaDevAttrClockRate, index);
  }
  // Clocks are in kHz; each moves a bit of every pin twice.
  made.memory_bytes = 2e3 * Attribute(cudaDevAttrMemoryClockRate, index) *
                      Attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8.0;
  return made;
}

}  // namespace strata
