#include "base/number.h"

#include <cstdio>

namespace shardwright {

std::string Fixed(double value, int digits) {
  char text[400];  // the longest double has 309 digits before the point
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

}  // namespace shardwright
