// SPDX-License-Identifier: Apache-2.0
// Prints the table of formats as JSON: [{"name": "deepspeed", "writes": true}, ...].
// The last row is that of examples/format_minimal, which is linked into this program.

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"

int main() try {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const shardwright::checkpoints::Format& format : shardwright::checkpoints::Formats()) {
    rows.push_back({{"name", format.name}, {"writes", format.write != nullptr}});
  }
  std::cout << rows.dump() << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
