/*
The rules of ring.h as ranks follow them in plain.cpp, for spin, which tries every order in which
ranks can take their steps. `make ring-model` (tools/check_ring_model.py) runs it.

What is checked:

  - who reads a slot finds the part or the sum of the chunk that it expects: it was written before,
    and nobody writes the slot for another chunk while a peer may still read it
  - no rank that keeps the rules is taken for a broken one
  - no rank sleeps forever, and every rank ends: there is no deadlock, and no cycle of states

What is one step: an access to memory that ranks share, but for two kinds that are merged. Counters
only grow, so a look at all peers comes out as if all were read with the last one. And slots are
touched in the step that writes the counter after it: the counter may always follow at once.

Sleeps have no timeout here, so that a lost wake-up is a deadlock; in ring.cpp it costs 50 ms.

Spin assumes sequential consistency: all ranks see all steps in one order. ring.cpp says at each
access why its memory order is enough for that, and ring_test.cpp runs under ThreadSanitizer.
*/
#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef CHUNKS
#define CHUNKS 6 /* of a job */
#endif
#ifndef JOBS
#define JOBS 1
#endif

#define ALL_REDUCE 0
#define REDUCE_SCATTER 1
#define ALL_GATHER 2

/* Mistakes that must be found, one at a time. */
#define NONE 0
#define NO_WAIT_FOR_SLOT 1   /* publishes without waiting for `collected` */
#define SLOT_TOO_SOON 2      /* off by one: waits for `collected` of the chunk before */
#define PUBLISHED_TOO_SOON 3 /* writes `published` before the part */
#define REDUCED_TOO_SOON 4   /* writes `reduced` before the sum */
#define COLLECTED_TOO_SOON 5 /* writes `collected` before it reads the slots */
#define NO_WAIT_FOR_PARTS 6  /* sums without waiting for `published` */
#define NO_WAIT_FOR_SUMS 7   /* collects without waiting for `reduced` */
#define NO_COMPARE 8         /* the futex does not compare the counter with what was seen */
#define ASLEEP_TOO_LATE 9    /* as 8, and asleep_on is written after the look */
#define WAKES_TOO_SOON 10    /* looks at asleep_on before it writes its counter */
#define WAKES_ONE 11         /* of those who sleep on the counter */
#define WAKES_NOBODY 12
#define REFUSES_TOO_SOON 13 /* takes a peer for broken that is `slots` chunks ahead */
/* No mistake: asleep_on is written after the look, but then the futex compares. */
#define LOOKS_FIRST 14
#ifndef MISTAKE
#define MISTAKE NONE
#endif

#define PUBLISHED 0
#define REDUCED 1
#define COLLECTED 2
#define COUNTER(rank, which) counter[(rank) * 3 + (which)]
#define SLOT(rank, chunk) ((rank) * SLOTS + (chunk) % SLOTS)
#define MOST_AHEAD (SLOTS - (MISTAKE == REFUSES_TOO_SOON->1 : 0))
#define AWAKE 255
#define TOO_SOON(which)                                   \
  (MISTAKE == PUBLISHED_TOO_SOON && which == PUBLISHED || \
   MISTAKE == REDUCED_TOO_SOON && which == REDUCED ||     \
   MISTAKE == COLLECTED_TOO_SOON && which == COLLECTED)

/* What ranks share. Chunks count from 1 here, so 0 in a slot is nothing. */
byte counter[RANKS * 3];
byte asleep_on[RANKS]; /* 1 + a rank */
byte part[RANKS * SLOTS];
byte sum[RANKS * SLOTS];

/* What the kernel knows: on which counter a rank sleeps. */
byte queue[RANKS];

byte kinds[JOBS];

/* The first peer that has not counted `least` chunks is `late`. None: RANKS. */
inline look(which) {
  late = 0;
  do
    ::late < RANKS &&
        (late == me || COUNTER(late, which) >= least)
            ->assert(late == me || COUNTER(late, which) <= COUNTER(me, COLLECTED) + MOST_AHEAD);
  late++ ::else->break od
}

/* FUTEX_WAIT compares and goes to sleep in one step, as far as FUTEX_WAKE can tell. */
inline futex_wait(which) {
  atomic {
    if
#if MISTAKE == ASLEEP_TOO_LATE || MISTAKE == NO_COMPARE
      ::value < least->queue[me] = late * 3 + which
#else
      ::value < least&& COUNTER(late, which) == value->queue[me] = late * 3 + which
#endif
                                   ::else fi;
    value = 0
  }
}

/* Until all peers have counted `least` chunks. */
inline wait(which) {
  do ::atomic {
      queue[me] == AWAKE;
      asleep_on[me] = 0;
      look(which);
      if
        ::late == RANKS->late = 0;
      least = 0;
      break ::else fi
    };
#if MISTAKE == ASLEEP_TOO_LATE || MISTAKE == LOOKS_FIRST
  value = COUNTER(late, which);
  asleep_on[me] = late + 1;
#else
  asleep_on[me] = late + 1;
  value = COUNTER(late, which);
#endif
  futex_wait(which) od
}

inline futex_wake(which) {
  sleeper = 0;
  do ::sleeper < RANKS&& queue[sleeper] == me * 3 + which->queue[sleeper] = AWAKE;
#if MISTAKE == WAKES_ONE
  break
#endif
          ::sleeper < RANKS&& queue[sleeper] !=
      me * 3 + which->sleeper++ ::else->break od;
  sleeper = 0
}

/* Looks at one peer after the other, until one sleeps on this rank. */
inline wake(which) {
#if MISTAKE == WAKES_NOBODY
  skip
#else
  peer = (me == 0->1 : 0);
  do ::atomic {
      if
        ::asleep_on[peer] == me + 1->futex_wake(which);
      peer = 0;
      break ::else->peer = (peer + 1 == me->peer + 2 : peer + 1) fi;
      if
        ::peer >= RANKS->peer = 0;
      break ::else fi
    }
  od
#endif
}

/* What the slot had before is gone: the next job may lay it out otherwise. */
inline write_part() {
  part[SLOT(me, n)] = (reduce->n : 0);
  sum[SLOT(me, n)] = (reduce->0 : n)
}

inline read_parts() {
  peer = 0;
  do ::peer < RANKS->assert(peer == me || part[SLOT(peer, n)] == n);
  peer++ ::else->peer = 0;
  break od
}

inline read_sums() {
  peer = 0;
  do ::peer < RANKS->assert(peer == me || sum[SLOT(peer, n)] == n);
  peer++ ::else->peer = 0;
  break od
}

/* What a counter says is done. */
inline touch_slots(which) {
  if
    ::which == PUBLISHED->write_part()::which == REDUCED && reduce->read_parts();
  sum[SLOT(me, n)] = (gather->n : 0)::which == COLLECTED && gather->read_sums()::else fi
}

inline post(which) {
#if MISTAKE == WAKES_TOO_SOON
  wake(which);
  atomic {
    touch_slots(which);
    COUNTER(me, which) = n
  }
#else
  if
    ::TOO_SOON(which)->COUNTER(me, which) = n;
  atomic { touch_slots(which) }
  ::else->atomic {
    touch_slots(which);
    COUNTER(me, which) = n
  }
  fi;
  wake(which)
#endif
}

inline publish() {
#if MISTAKE != NO_WAIT_FOR_SLOT
  if
    ::n > SLOTS->least = n - SLOTS - (MISTAKE == SLOT_TOO_SOON->1 : 0);
  wait(COLLECTED)::else fi;
#endif
  post(PUBLISHED);
  if
    ::!reduce->post(REDUCED)::else fi
}

inline reduce_chunk() {
#if MISTAKE != NO_WAIT_FOR_PARTS
  least = n;
  wait(PUBLISHED);
#endif
  post(REDUCED);
  if
    ::!gather->post(COLLECTED)::else fi
}

inline collect() {
#if MISTAKE != NO_WAIT_FOR_SUMS
  least = n;
  if
    ::reduce->wait(REDUCED)::else->wait(PUBLISHED) fi;
#endif
  post(COLLECTED)
}

proctype rank(byte me) {
  byte job, t, n, least, late, value, peer, sleeper;
  bool reduce, gather;
  do ::job < JOBS->atomic {
      reduce = kinds[job] != ALL_GATHER;
      gather = kinds[job] != REDUCE_SCATTER;
      t = 1
    }
  do ::t <= CHUNKS + (reduce && gather->2 : 1)->if ::t <= CHUNKS->n = job * CHUNKS + t;
  publish()::else fi;
  if
    ::reduce&& t > 1 && t <= CHUNKS + 1->n = job * CHUNKS + t - 1;
  reduce_chunk()::else fi;
  if
    ::gather&& t > (reduce->2 : 1)->n = job * CHUNKS + t - (reduce->2 : 1);
  collect()::else fi;
  t++ ::else->break od;
  job++ ::else->break od
}

init {
  atomic {
    byte i;
    do
      ::i < JOBS->
#ifdef KIND
            kinds[i] = KIND;
#else
            if ::kinds[i] = ALL_REDUCE ::kinds[i] = REDUCE_SCATTER ::kinds[i] = ALL_GATHER fi;
#endif
    i++ ::else->break od;
    i = 0;
    do ::i < RANKS->queue[i] = AWAKE;
    i++ ::else->break od;
    i = 0;
    do ::i < RANKS->run rank(i);
    i++ ::else->break od
  }
}
