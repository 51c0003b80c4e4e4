#include "dialect/build/hyper.h"

namespace shardwright::dialect {
namespace {

std::optional<double> OptionNumber(const pickle::Node* options, std::string_view key) {
  const Result<double> value = pickle::AsFloat(FindIn(options, key));
  return value ? std::optional(*value) : std::nullopt;
}

}  // namespace

HyperParams HyperOf(const pickle::Node* options) {
  HyperParams hyper;
  hyper.lr = OptionNumber(options, "lr");
  hyper.eps = OptionNumber(options, "eps");
  hyper.weight_decay = OptionNumber(options, "weight_decay");
  hyper.momentum = OptionNumber(options, "momentum");
  hyper.step = OptionNumber(options, "step");
  const pickle::Node* betas = FindIn(options, "betas");
  if (betas != nullptr && betas->items.size() == 2) {
    const Result<double> first = pickle::AsFloat(betas->items[0]);
    const Result<double> second = pickle::AsFloat(betas->items[1]);
    if (first && second) hyper.betas = {*first, *second};
  }
  return hyper;
}

}  // namespace shardwright::dialect
