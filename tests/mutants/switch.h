// SPDX-License-Identifier: Apache-2.0
// Put before every file of a tree with switched faults (mutants.py): checks if a fault is on.

#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

inline constexpr int kSwMutants = 4096;

/// 0: not looked up yet, 1: off, 2: on.
inline unsigned char sw_mutant_state[kSwMutants];

/// Looks `number` up: SW_MUTANT names the fault that is on; SW_MUTANT_REACH a file that gets a line
/// for each number that a process reaches.
[[gnu::cold, gnu::noinline]] inline unsigned char SwMutantLook(int number) {
  const char* const on = ::getenv("SW_MUTANT");
  const unsigned char state = on != nullptr && ::atoi(on) == number ? 2 : 1;
  if (__atomic_exchange_n(&sw_mutant_state[number], state, __ATOMIC_RELAXED) != 0) return state;
  const char* const reach = ::getenv("SW_MUTANT_REACH");
  if (reach == nullptr) return state;
  const int fd = ::open(reach, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return state;
  char line[16];
  const int bytes = ::snprintf(line, sizeof(line), "%d\n", number);
  [[maybe_unused]] const ssize_t written = ::write(fd, line, static_cast<size_t>(bytes));
  ::close(fd);
  return state;
}

constexpr bool SwMutant(int number) {
  if (__builtin_is_constant_evaluated()) return false;
  const unsigned char state = __atomic_load_n(&sw_mutant_state[number], __ATOMIC_RELAXED);
  return (state != 0 ? state : SwMutantLook(number)) == 2;
}
