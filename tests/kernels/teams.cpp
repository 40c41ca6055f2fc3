// Stands before the OpenMP runtime of g++ and tells ThreadSanitizer what it cannot see there: a team sees what was written
// before it began, what its threads wrote is seen after it, and at a barrier each sees all.

#include <dlfcn.h>

extern "C" {

void __tsan_acquire(void*) __attribute__((weak));
void __tsan_release(void*) __attribute__((weak));

typedef void (*Body)(void*);

}

namespace {

struct Team {
  Body body;
  void* data;
};

void announced(void* given) {
  Team* team = static_cast<Team*>(given);
  __tsan_acquire(team);
  team->body(team->data);
  __tsan_release(team);
}

template <typename F>
F real(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

char barrier;

}  // namespace

extern "C" {

void GOMP_parallel(Body body, void* data, unsigned threads, unsigned flags) {
  static const auto run = real<void (*)(Body, void*, unsigned, unsigned)>("GOMP_parallel");
  Team team{body, data};
  __tsan_release(&team);
  run(announced, &team, threads, flags);
  __tsan_acquire(&team);
}

void GOMP_parallel_loop_nonmonotonic_dynamic(Body body, void* data, unsigned threads, long start, long end, long step, long chunk, unsigned flags) {
  static const auto run = real<void (*)(Body, void*, unsigned, long, long, long, long, unsigned)>("GOMP_parallel_loop_nonmonotonic_dynamic");
  Team team{body, data};
  __tsan_release(&team);
  run(announced, &team, threads, start, end, step, chunk, flags);
  __tsan_acquire(&team);
}

void GOMP_barrier() {
  static const auto run = real<void (*)()>("GOMP_barrier");
  __tsan_release(&barrier);
  run();
  __tsan_acquire(&barrier);
}

void GOMP_loop_end() {
  static const auto run = real<void (*)()>("GOMP_loop_end");
  __tsan_release(&barrier);
  run();
  __tsan_acquire(&barrier);
}
}
