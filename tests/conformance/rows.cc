// Prints the table of dialects as JSON: [{"name": "deepspeed", "writes": true}, ...].

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"

int main() try {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const shardwright::checkpoints::Dialect& dialect : shardwright::checkpoints::Dialects()) {
    rows.push_back({{"name", dialect.name}, {"writes", dialect.write != nullptr}});
  }
  std::cout << rows.dump() << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
