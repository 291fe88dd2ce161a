// Division of a kernel's work over XLA's own threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace adaserve {

// Call body(i) once for each i below `count`, on the calling thread and on up to `helpers` of the pool's. The caller
// takes whatever no helper has begun, so a busy pool makes this slower and never blocks it: a helper that starts late
// finds nothing left, and does not touch `body`, which may be gone by then.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t helpers, int64_t count, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, finished{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, &body] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      body(i);
      shared->finished.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t n = 0; n < helpers && n < count - 1; ++n) pool.Schedule([work] { work(); });
  work();
  while (shared->finished.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace adaserve
