// SPDX-License-Identifier: Apache-2.0
// A lock that times out at a time of a given clock, which is how C++ waits for one. The detector
// of gcc 12 does not know this call, but knows the one that uses the time of day.

#define _GNU_SOURCE
#include <pthread.h>
#include <time.h>

int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const struct timespec* end) {
  struct timespec now, time;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &time);
  const long long kSecond = 1000000000;
  const long long left = (end->tv_sec - now.tv_sec) * kSecond + end->tv_nsec - now.tv_nsec;
  const long long until = time.tv_nsec + (left > 0 ? left : 0);
  time.tv_sec += until / kSecond;
  time.tv_nsec = until % kSecond;
  return pthread_mutex_timedlock(mutex, &time);
}
