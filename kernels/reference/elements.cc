#include "kernels/reference/elements.h"

namespace strata::reference {

double LoadElement(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kBF16:
      return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
    case DType::kF16:
      return static_cast<float>(static_cast<const Half*>(data)[i]);
    case DType::kI32:
      return static_cast<const int32_t*>(data)[i];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::kU16:
      return static_cast<const uint16_t*>(data)[i];
    case DType::kU8:
      return static_cast<const uint8_t*>(data)[i];
  }
  return 0;
}

void StoreElement(void* data, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[i] = value;
      break;
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case DType::kBF16:
      static_cast<BFloat16*>(data)[i] = BFloat16(static_cast<float>(value));
      break;
    case DType::kF16:
      static_cast<Half*>(data)[i] = Half(static_cast<float>(value));
      break;
    case DType::kI32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
      break;
    case DType::kI64:
      static_cast<int64_t*>(data)[i] = static_cast<int64_t>(value);
      break;
    case DType::kU16:
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(value);
      break;
    case DType::kU8:
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(value);
      break;
  }
}

double Rounded(DType dtype, double value) {
  double stored = 0;
  StoreElement(&stored, dtype, 0, value);
  return LoadElement(&stored, dtype, 0);
}

}  // namespace strata::reference
