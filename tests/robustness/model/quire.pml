/* Quire's ownership protocol: cachemgr, worker, clients and the network between them. README.md says how to read it.

   Sizes, all by -D; check.py has those that are checked. Blocks are 1 .. BLOCKS (0 is the null block), a lease's
   sequences 0 .. SEQS - 1. What can go wrong is a budget: so many times in a run, at any moment. A run is finite, and
   ends when nothing is left to happen; what has to hold then is in `the_end`. */

#ifndef BLOCKS
#define BLOCKS 3
#endif
#ifndef BLOCK_SIZE      /* tokens */
#define BLOCK_SIZE 1
#endif
#ifndef TABLE           /* the most blocks of a sequence; BLOCK_SIZE * TABLE is at most 4 */
#define TABLE 1
#endif
#ifndef WINDOW          /* tokens that the second layer group sees; 0: there is one group, a full one */
#define WINDOW 0
#endif
#ifndef LEASES          /* over the whole run; an id never comes back */
#define LEASES 2
#endif
#ifndef SEQS            /* per lease, those released whose last step has not ended included */
#define SEQS 1
#endif
#ifndef STEPS           /* that may be planned of a lease, over the whole run */
#define STEPS 2
#endif
#ifndef MANAGERS        /* 2: another cachemgr starts at any time, while the first one lives or after it died */
#define MANAGERS 1
#endif
#ifndef AHEAD           /* 1: the worker has obeyed a manager that is no more, of a term above those of the others: their
                           clocks were set back */
#define AHEAD 0
#endif
#ifndef TENANTS
#define TENANTS 1
#endif
#ifndef TOKENS          /* the alphabet: 1 or 2 */
#define TOKENS 1
#endif
#ifndef PROMPT          /* tokens of every prompt, all the same one */
#define PROMPT 1
#endif
#ifndef COPIES          /* of a grant that reach the worker, each at any time or never: 2 is a duplicate */
#define COPIES 1
#endif
#ifndef REPEATS         /* plans that arrive at cachemgr twice */
#define REPEATS 0
#endif
#ifndef BREAKS          /* streams that break, with what is on them lost from any message on */
#define BREAKS 0
#endif
#ifndef RESTARTS        /* of the worker */
#define RESTARTS 0
#endif
#ifndef HOLDER          /* 1: a worker that starts again has its old memory, or a new one; 2: or that of another holder */
#define HOLDER 0
#endif
#ifndef CHANGES         /* blocks of kept memory that somebody else writes between two workers */
#define CHANGES 0
#endif
#ifndef DAMAGES         /* grants that the worker can't apply */
#define DAMAGES 0
#endif
#ifndef DEATHS          /* of a cachemgr: it forgets everything */
#define DEATHS 0
#endif
#ifndef RETURNS         /* 1: cachemgr 0 comes back after its death, with its books (warm) or without them (cold) */
#define RETURNS 0
#endif
#ifndef BEHIND          /* 1: it comes back without its last change, whose effects went out */
#define BEHIND 0
#endif
#ifndef FAILURES        /* steps on which the model fails */
#define FAILURES 0
#endif
#ifndef SKIPS           /* steps that the client sends with `skip` */
#define SKIPS 0
#endif
#ifndef ITEMS           /* in one plan */
#define ITEMS 1
#endif
#ifndef RELEASES
#define RELEASES 1
#endif
#ifndef TRIMS
#define TRIMS 0
#endif
#ifndef FORKS
#define FORKS 0
#endif
#ifndef EXTENDS
#define EXTENDS 0
#endif
#ifndef DRAFTS          /* 1: an extended sequence may have a draft: a guess at the token after its last one */
#define DRAFTS 0
#endif
#ifndef QUEUE           /* messages on a stream, work for the model thread, reports kept; one more is an error (BOUND) */
#define QUEUE 6
#endif
#ifndef ONLY            /* the number of the one invariant that is checked; 0: all */
#define ONLY 0
#endif
#ifndef FAULT           /* one of FAULT_*, in faults.pml; 0: none */
#define FAULT 0
#endif

#if WINDOW
#define GROUPS 2
#else
#define GROUPS 1
#endif
#define PLACES (GROUPS * TABLE)  /* table entries of a sequence, group by group */

#if BLOCKS > 5 || SEQS > 3 || SEQS * PLACES > 8 || BLOCK_SIZE * TABLE > 4 || LEASES * STEPS > 8 || \
    MANAGERS > 2 || TENANTS > 2
#error "larger than the model's bytes and choices are made for"
#endif
#if PROMPT > BLOCK_SIZE * TABLE || (FORKS && SEQS < 2) || (BEHIND && (!RETURNS || MANAGERS > 1)) || \
    (AHEAD && RETURNS) || (HOLDER && (DRAFTS || BEHIND)) || (CHANGES && BLOCKS > 2)
#error "sizes that don't fit each other"
#endif

#include "faults.pml"
#include "state.pml"
#include "books.pml"
#include "cachemgr.pml"
#include "restart.pml"
#include "memory.pml"
#include "worker.pml"

/* -- clients ------------------------------------------------------------------------------------------------------ */

/* What the client asks for in one plan: at most ITEMS, at least one. */
inline choose_items(l) {
    if
    :: skip
    :: RELEASES && HELD(l, 0) -> c_release = 1; c_items++
#if SEQS > 1
    :: RELEASES && HELD(l, 1) -> c_release = 2; c_items++
    :: RELEASES && ITEMS > 1 && HELD(l, 0) && HELD(l, 1) -> c_release = 3; c_items = 2
#endif
#if SEQS > 2
    :: RELEASES && HELD(l, 2) -> c_release = 4; c_items++
#endif
    fi;
#if TRIMS
    if
    :: skip
    :: c_items < ITEMS && STAYS(l, 0) && length[SEQ(l, 0)] > 1 ->
        c_trim = 1; c_items++; choose_below(length[SEQ(l, 0)], c_trim_to)
#if SEQS > 1
    :: c_items < ITEMS && STAYS(l, 1) && length[SEQ(l, 1)] > 1 ->
        c_trim = 2; c_items++; choose_below(length[SEQ(l, 1)], c_trim_to)
#endif
    fi;
#endif
#if FORKS
    if
    :: skip
    :: c_items < ITEMS && STAYS(l, 0) -> c_fork = 1; c_items++; choose_up_to(length[SEQ(l, 0)], c_fork_at)
    :: c_items < ITEMS && STAYS(l, 1) -> c_fork = 2; c_items++; choose_up_to(length[SEQ(l, 1)], c_fork_at)
    fi;
#endif
#if EXTENDS
    if
    :: skip
    :: c_items < ITEMS && STAYS(l, 0) -> c_extend = 1; c_items++
#if SEQS > 1
    :: c_items < ITEMS && (STAYS(l, 1) || c_fork) -> c_extend = 2; c_items++
    :: c_items + 1 < ITEMS && STAYS(l, 0) && (STAYS(l, 1) || c_fork) -> c_extend = 3; c_items = c_items + 2
#endif
#if SEQS > 2
    :: c_items < ITEMS && (STAYS(l, 2) || c_fork) -> c_extend = 4; c_items++
#endif
    fi;
    if
    :: c_extend -> if :: c_token = 1 :: TOKENS > 1 -> c_token = 2 fi
    :: else
    fi;
#endif
#if DRAFTS
    if
    :: skip
    :: c_extend -> c_draft = 1
    :: c_extend && TOKENS > 1 -> c_draft = 2
    fi;
#endif
    if
    :: c_items > 0
    :: c_items < ITEMS -> c_admit = 1; c_items++
    :: TOKENS > 1 && c_items < ITEMS -> c_admit = 2; c_items++
    fi;
    if  /* whom the eviction policy gives up first */
    :: !HAS_CACHED(MANAGER(l)) -> c_evict = 1
    :: HAS_CACHED(MANAGER(l)) && STATE(MANAGER(l), 1) == CACHED -> c_evict = 1
#if BLOCKS > 1
    :: HAS_CACHED(MANAGER(l)) && STATE(MANAGER(l), 2) == CACHED -> c_evict = 2
#endif
#if BLOCKS > 2
    :: HAS_CACHED(MANAGER(l)) && STATE(MANAGER(l), 3) == CACHED -> c_evict = 3
#endif
#if BLOCKS > 3
    :: HAS_CACHED(MANAGER(l)) && STATE(MANAGER(l), 4) == CACHED -> c_evict = 4
#endif
#if BLOCKS > 4
    :: HAS_CACHED(MANAGER(l)) && STATE(MANAGER(l), 5) == CACHED -> c_evict = 5
#endif
    fi
}

inline choose_up_to(limit, chosen) {
    if
    :: limit >= 1 -> chosen = 1
    :: limit >= 2 -> chosen = 2
    :: limit >= 3 -> chosen = 3
    :: limit >= 4 -> chosen = 4
    fi
}

inline choose_below(limit, chosen) {
    if
    :: limit > 1 -> chosen = 1
    :: limit > 2 -> chosen = 2
    :: limit > 3 -> chosen = 3
    fi
}

/* The same request once more: the answer is the one given before, and nothing happens. */
inline plan_again(l) {
    repeats--;
    if
    :: FAULT == FAULT_REQUEST_APPLIED_AGAIN && may_plan(l) && planned[l] < STEPS ->
        choose_items(l);
        d_step { plan_step(l); check_books(MANAGER(l)); skip }
    :: else
    fi
}

/* Whoever holds lease l. It asks for anything at any time; it dies, sleeps and wakes by what the others do: its lease
   ends at any time, and its grants reach the worker at any time, also long after that. */
proctype client(byte l) {
end:
    do
    :: d_step { life[l] == UNUSED && attached[MANAGER(l)] && IS_TURN(l) -> create_lease(l); skip }
    :: atomic { may_plan(l) && planned[l] < STEPS ->
           choose_items(l); d_step { asked[l]++; plan_step(l); check_books(MANAGER(l)); skip } }
    :: atomic { repeats > 0 && planned[l] > 0 && life[l] == OPEN && alive[MANAGER(l)] -> plan_again(l) }
    :: d_step { life[l] == OPEN && alive[MANAGER(l)] -> end_lease(l); skip }
#if BEHIND && !IS_STALE
    :: atomic { deaths > 0 && may_plan(l) && planned[l] < STEPS && IN_FLIGHT(l) == 0 ->
           choose_items(l); d_step { deaths--; plan_unwritten(l); skip } }
    :: d_step { IS_HEARD_AT_ONCE && life[l] == UNUSED && attached[0] && IS_TURN(l) ->
           deaths--; create_unwritten(l); skip }
#if FAULT == FAULT_END_UNWRITTEN
    :: d_step { IS_HEARD_AT_ONCE && life[l] == OPEN -> deaths--; end_unwritten(l); skip }
#endif
#endif
#if FAULT == FAULT_ASKED_FOR_EVER
    :: life[l] == OPEN -> skip
#endif
    od
}

/* -- the network and what dies ------------------------------------------------------------------------------------ */

#if HOLDER
/* What the next worker finds, and whether the old one died within a step. */
inline choose_memory() {
    if
    :: c_memory = SAME_MEMORY
    :: c_memory = NEW_MEMORY
    :: HOLDER > 1 -> c_memory = OTHER_MEMORY
    fi;
    if
    :: skip
    :: thread ? [STEP, _] && c_memory == SAME_MEMORY -> c_interrupts = 1
    fi;
    if
    :: skip
    :: changes_left > 0 && (whole & BIT(1)) -> changes_left--; c_damaged = 1
#if BLOCKS > 1
    :: changes_left > 0 && (whole & BIT(2)) -> changes_left--; c_damaged = 2
#endif
    fi
}
#endif

proctype network() {
end:
    do
    :: false
#if BREAKS > 0
    :: d_step { breaks > 0 && stream != NO_STREAM ->
           breaks--; printf("network: the stream breaks\n"); break_stream(); skip }
#endif
#if RESTARTS > 0 && HOLDER
    :: atomic { restarts > 0 -> choose_memory(); d_step { restarts--; restart_worker(); skip } }
#elif RESTARTS > 0
    :: d_step { restarts > 0 -> restarts--; restart_worker(); skip }
#endif
#if DAMAGES > 0
    :: d_step { damages > 0 && len(thread) > 0 -> damages--; damage_pool(); skip }
#endif
#if MANAGERS > 1
    :: d_step { !alive[1] && !died[1] -> start_second(); skip }
#endif
#if DEATHS > 0
    :: d_step { deaths > 0 && alive[0] && (RETURNS || (MANAGERS > 1 && alive[MANAGERS - 1])) ->
           deaths--; printf("cachemgr 0 dies\n"); kill_manager(0); skip }
#endif
#if RETURNS
    :: d_step { !alive[0] -> return_warm(); skip }
    :: d_step { !alive[0] -> return_cold(); skip }
#endif
#if IS_STALE
    :: d_step { alive[0] && lost == NOTHING_COPIED && NOTHING_IN_FLIGHT ->
           printf("somebody copies the state of cachemgr 0\n"); copy_books(); skip }
#elif BEHIND
    :: d_step { IS_HEARD_AT_ONCE && stream == 0 && up0 ? [REPORT, eval(entered[0] + 1), _, _] ->
           deaths--; up0 ? kind, number, n, outcome; settle_unwritten(); skip }
    :: d_step { IS_HEARD_AT_ONCE && stream == 1 && up1 ? [REPORT, eval(entered[0] + 1), _, _] ->
           deaths--; up1 ? kind, number, n, outcome; settle_unwritten(); skip }
#endif
    od
}

/* -- the end ------------------------------------------------------------------------------------------------------ */

/* Nothing is left to happen: all leases have ended, whatever died on the way. */
proctype the_end() {
    timeout;
    d_step {
        REQUIRE(stream != NO_STREAM && sending, PROGRESS);
        m = talks_to[stream];
        REQUIRE(attached[m] && epoch_of[m] == epoch, PROGRESS);
        for (e1 : 0 .. LEASES - 1) {
            REQUIRE(MANAGER(e1) != m || life[e1] == UNUSED || life[e1] == GONE, PROGRESS);
            REQUIRE(next_step[e1] == 0, PROGRESS)
        }
        for (e1 : 1 .. BLOCKS) { REQUIRE(STATE(m, e1) == FREE || STATE(m, e1) == CACHED, I8) }
        for (e1 : 0 .. LEASES * SEQS * PLACES - 1) { REQUIRE(rows[e1] == 0, I8) }
        REQUIRE(len(kept) == 0 && len(thread) == 0, PROGRESS)
    }
}

init {
    byte l;
    atomic {
        begin_world();
        for (l : 0 .. LEASES - 1) { run client(l) }
        run hearing(); run dialing(); run event_loop(); run model_thread(); run network(); run the_end();
#if HOLDER && FAULT == FAULT_TWO_WORKERS
        run old_worker();
#endif
        skip
    }
}
