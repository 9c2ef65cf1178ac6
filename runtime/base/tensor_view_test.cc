#include "runtime/base/tensor_view.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

namespace strata {
namespace {

TEST_CASE("shapes count, compare, index from both ends and print") {
  const Shape shape{2, 3, 4};
  CHECK(shape.rank() == 3);
  CHECK(shape.num_elements() == 24);
  CHECK(shape[0] == 2);
  CHECK(shape[-1] == 4);
  CHECK(shape.ToString() == "[2, 3, 4]");
  CHECK(Shape{}.num_elements() == 1);
  CHECK(Shape{}.ToString() == "[]");
  CHECK(Shape{0, 5}.num_elements() == 0);
  CHECK(Shape{2, 3} == Shape{2, 3});
  CHECK_FALSE(Shape{2, 3} == Shape{2, 3, 1});
}

TEST_CASE("views slice and reshape the same memory") {
  std::vector<float> data(24);
  std::iota(data.begin(), data.end(), 0.0f);
  const TensorView view(data.data(), DType::kF32, {2, 3, 4});
  CHECK(view.num_bytes() == 96);
  CHECK(view.rows() == 6);
  CHECK(view.cols() == 4);
  CHECK(view.Rows(4, 2).shape == Shape{2, 4});
  CHECK(view.Rows(4, 2).f32()[0] == 16.0f);
  CHECK(view.Slice(5, 3).shape == Shape{3});
  CHECK(view.Slice(5, 3).f32()[2] == 7.0f);
  CHECK(view.Slice(24, 0).num_elements() == 0);
  CHECK(view.Reshaped({4, 6}).f32() == data.data());

  const TensorView halves(data.data(), DType::kBF16, {8});
  CHECK(halves.num_bytes() == 16);
  CHECK(halves.Slice(2, 2).data == data.data() + 1);
}

TEST_CASE("scalars and empty views are matrices too") {
  float value = 1;
  const TensorView scalar(&value, DType::kF32, {});
  CHECK(scalar.rows() == 1);
  CHECK(scalar.cols() == 1);
  const TensorView empty(&value, DType::kF32, {3, 0});
  CHECK(empty.rows() == 0);
  CHECK(empty.num_bytes() == 0);
  CHECK_FALSE(TensorView().defined());
}

}  // namespace
}  // namespace strata
