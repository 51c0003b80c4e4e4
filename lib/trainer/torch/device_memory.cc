// SPDX-License-Identifier: Apache-2.0
#include "trainer/torch/device_memory.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <exception>
#include <string>
#include <utility>

namespace shardwright::trainer_torch {
namespace {

using torch::stable::Tensor;

tl::unexpected<Error> Refused(const std::exception& error) {
  const std::string what = error.what();
  return Fail(Errc::kIo, "copying to a device failed: ", what.substr(0, what.find('\n')));
}

class FarTensor final : public trainer::DeviceTensor {
 public:
  explicit FarTensor(const Tensor& tensor)
      : flat_(torch::stable::flatten(tensor)), item_bytes_(tensor.element_size()) {}

  Status Fill(std::uint64_t first, std::span<const std::byte> bytes) override {
    try {
      const auto elems = static_cast<std::int64_t>(bytes.size() / item_bytes_);
      // The bytes are only read, but from_blob does not accept const memory.
      auto* const data = const_cast<std::byte*>(bytes.data());
      const std::array<std::int64_t, 1> size = {elems};
      const std::array<std::int64_t, 1> stride = {1};
      const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
      const Tensor from = torch::stable::from_blob(data, size, stride, cpu, flat_.scalar_type());
      Tensor flat = flat_;
      Tensor to =
          torch::stable::narrow(flat, 0, static_cast<std::int64_t>(first / item_bytes_), elems);
      torch::stable::copy_(to, from);  // returns when the copy is complete
      return {};
    } catch (const std::exception& error) {
      return Refused(error);
    }
  }

 private:
  const Tensor flat_;
  const std::uint64_t item_bytes_;
};

}  // namespace

Result<std::shared_ptr<trainer::DeviceTensor>> MakeFar(const Tensor& tensor) {
  try {
    return std::make_shared<FarTensor>(tensor);
  } catch (const std::exception& error) {
    return Refused(error);
  }
}

}  // namespace shardwright::trainer_torch
