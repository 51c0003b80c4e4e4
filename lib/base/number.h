#pragma once

#include <string>

namespace shardwright {

/// `value` with so many digits after the point: "0.500". Not finite: "inf", "nan".
/// Local.
std::string Fixed(double value, int digits);

}  // namespace shardwright
