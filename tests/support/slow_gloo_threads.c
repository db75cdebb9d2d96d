/* For LD_PRELOAD: gloo's threads are slow, as on a busy machine, to let go of a collective that
   they have reported as done, and to take the GIL, which they need for that. They spin: a thread
   that the machine has no time for is not asleep either. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define NOTIFY _ZNSt18condition_variable10notify_allEv
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

static void spin(double seconds) {
  char name[16] = "";
  prctl(PR_GET_NAME, name);
  if (strcmp(name, "pt_gloo_runloop") != 0) return;
  for (double end = now_s() + seconds; now_s() < end;) {
  }
}

void NOTIFY(void* self) {
  static void (*real)(void*);
  if (!real) *(void**)&real = dlsym(dlopen("libstdc++.so.6", RTLD_LAZY), TEXT(NOTIFY));
  real(self);
  spin(0.05);
}

void PyEval_AcquireThread(void* state) {
  static void (*real)(void*);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "PyEval_AcquireThread");
  spin(0.3);
  real(state);
}
