// What is known of a GPU before it computes anything.
//
// Linked as cuda_device.h is: without CUDA there is no GPU to ask. Threading: any.
#pragma once

#include <cstdint>
#include <string>

namespace strata {

struct CudaProperties {
  std::string name;
  int64_t memory = 0;          // bytes
  int compute_capability = 0;  // 90 for sm_90
  int multiprocessors = 0;
  int driver_cuda = 0;      // the newest CUDA that the driver knows: 13000 is 13.0
  bool cublas = false;      // whether large products go to cuBLASLt
  double bf16_flops = 0;    // a second, of dense products at the highest clock; 0: not known
  double memory_bytes = 0;  // a second, of its memory's pins; 0: not known
};

/// Throws Error when there is no such GPU.
CudaProperties PropertiesOfCudaDevice(int index);

}  // namespace strata
