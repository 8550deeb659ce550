/* Memory that outlives its worker. worker/memory/kept_pool.py; of cachemgr books/kept_memory.rs and catalog.py: why_empty.

   Of the memory itself, beside kv: its identity, the epoch that was attached last, and the blocks with a checksum. The
   next worker has the same memory, or a new one if its holder was started again too, or that of another holder. */

#if HOLDER

#define SAME_MEMORY  0
#define NEW_MEMORY   1
#define OTHER_MEMORY 2

/* -- the worker ---------------------------------------------------------------------------------------------------- */

inline note_attached() {
    if
    :: kept_epoch != epoch -> kept_epoch = epoch; kept_steps = 0
    :: else
    fi;
    kept_term = attached_term;
    is_found = 0
}

inline note_accepted() { kept_steps++ }

/* It begins an epoch by itself. */
inline give_memory_up() { kept_epoch = 0; is_found = 0 }

#define WRITES(q, i) (grant[number].end[q] && INDEX(i) >= grant[number].start[q] / BLOCK_SIZE && \
    INDEX(i) < NUM_BLOCKS(grant[number].end[q]))

/* The blocks that step `number` of lease e1 writes have no checksum from here on. */
inline begin_writing() {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            if
            :: WRITES(q1, i1) -> whole = whole & ~BIT(grant[number].table[q1 * PLACES + i1])
            :: else
            fi
        }
        for (i1 : 0 .. GROUPS - 1) {
            if
            :: grant[number].copy_to[q1 * GROUPS + i1] -> whole = whole & ~BIT(grant[number].copy_to[q1 * GROUPS + i1])
            :: else
            fi
        }
    }
}

/* It has computed them: those that are full have one. */
inline end_writing() {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            if
            :: WRITES(q1, i1) && INDEX(i1) < grant[number].end[q1] / BLOCK_SIZE ->
                whole = whole | BIT(grant[number].table[q1 * PLACES + i1])
            :: else
            fi
        }
    }
}

/* The step that runs gets no further than this: any of it may be written. */
inline interrupt() {
    if
    :: c_interrupts && thread ? [STEP, _] ->
        thread ? _, number;
        MARK(REACH_KILLED_IN_STEP);
        e1 = LEASE(number);
        begin_writing();
        apply();
        spoil()
    :: else
    fi
}

/* A process that is not dead although another one has its memory: what it had accepted still runs. */
inline leave_running() {
#if FAULT == FAULT_TWO_WORKERS
    do
    :: thread ? [STEP, _] -> thread ? _, number; undead ! number
    :: thread ? [FENCE, _] -> thread ? _, _
    :: thread ? [BEGIN, _] -> thread ? _, _
    :: else -> break
    od
#else
    skip
#endif
}

#if FAULT == FAULT_TWO_WORKERS
chan undead = [QUEUE] of {byte};

proctype old_worker() {
end:
    do
    :: d_step { undead ? [_] ->
        undead ? number;
        e1 = LEASE(number);
        for (q1 : 0 .. SEQS - 1) {
            for (i1 : 0 .. BLOCK_SIZE * PLACES - 1) {
                if
                :: POSITION(i1) >= grant[number].start[q1] && POSITION(i1) < grant[number].end[q1] ->
                    kv[grant[number].table[q1 * PLACES + PLACE(i1)] * BLOCK_SIZE + i1 % BLOCK_SIZE] =
                        KV(SPACE(e1, PLACE(i1)), PREFIX(grant[number].code[q1], grant[number].end[q1], POSITION(i1) + 1))
                :: else
                fi
            }
        }
        if
        :: attached_term && epoch_of[key] == epoch -> check_books(key)
        :: else
        fi;
        skip }
    od
}
#endif

/* What the next process has. Somebody else may have written a block of it: the checksum says so. */
inline find_memory() {
    if
    :: c_memory == NEW_MEMORY ->
        for (i1 : 0 .. (BLOCKS + 1) * BLOCK_SIZE - 1) { kv[i1] = 0 }
        if
        :: FAULT != FAULT_EMPTY_TAKEN_FOR_OLD -> last_memory++; memory = last_memory; kept_epoch = 0; whole = 0
        :: else
        fi
    :: c_memory == OTHER_MEMORY -> exchange_memories()
    :: else
    fi;
    if
    :: c_damaged ->
        for (i1 : 0 .. BLOCK_SIZE - 1) { kv[c_damaged * BLOCK_SIZE + i1] = 0 }
        whole = whole & ~BIT(c_damaged)
    :: else
    fi;
    is_found = (kept_epoch > 0);
    c_memory = 0; c_interrupts = 0; c_damaged = 0
}

#define EXCHANGE(here, there) x = here; here = there; there = x

inline exchange_memories() {
#if HOLDER > 1
    EXCHANGE(memory, other_memory);
    EXCHANGE(kept_epoch, other_kept_epoch);
    EXCHANGE(kept_term, other_kept_term);
    EXCHANGE(kept_steps, other_kept_steps);
    EXCHANGE(whole, other_whole);
    for (i1 : 0 .. (BLOCKS + 1) * BLOCK_SIZE - 1) { EXCHANGE(kv[i1], other_kv[i1]) }
#else
    skip
#endif
}

/* -- cachemgr ------------------------------------------------------------------------------------------------------ */

#define IS_SAME_MEMORY(m) (memory_of[m] == memory || FAULT == FAULT_OLDER_MEMORY)
#define IS_SAME_EPOCH(m)  (epoch_of[m] == kept_epoch || FAULT == FAULT_OLDER_MEMORY || FAULT == FAULT_OLDER_BOOKS)
#define IS_SAME_TERM(m)   ((ruled[m] & BIT(kept_term)) || FAULT == FAULT_OLDER_BOOKS)
#define ARE_SAME_STEPS(m) ((entered[m] <= kept_steps && kept_steps <= num_planned[m]) || FAULT == FAULT_OLDER_BOOKS)
#define FITS(m)           (IS_SAME_MEMORY(m) && IS_SAME_EPOCH(m) && IS_SAME_TERM(m) && ARE_SAME_STEPS(m))

/* Blocks that keep their hash in the new epoch: `carried`. */
inline find_carried() {
    carried = 0;
    if
    :: is_found && epoch_of[m] && FITS(m) ->
        MARK(REACH_MEMORY_FITS);
        carry_refilled();
        carried = (FAULT == FAULT_NOT_WHOLE_CARRIED -> 255 : whole);
        mark_carried()
    :: is_found && epoch_of[m] && !FITS(m) -> MARK(REACH_MEMORY_OF_OTHER_BOOKS)
    :: else
    fi
}

inline mark_carried() {
    for (i6 : 1 .. BLOCKS) {
        if
        :: PUBLISHED(m, i6) && (carried & BIT(i6)) ->
            MARK(REACH_CARRIED)
        :: PUBLISHED(m, i6) && !(carried & BIT(i6)) -> MARK(REACH_NOT_CARRIED)
        :: else
        fi
    }
}

/* As if the steps in flight had been reported. */
inline carry_refilled() {
#if FAULT == FAULT_REFILLED_CARRIED
    for (e1 : 0 .. LEASES - 1) {
        for (g1 : 0 .. STEPS - 1) {
            for (q1 : 0 .. SEQS - 1) {
                if
                :: MANAGER(e1) == m && holds[SEQ(e1, q1)] == SEQUENCE && step[SLOT(e1, g1)].end[q1] ->
                    last = NO_STEP;
                    publish_run(e1, q1, step[SLOT(e1, g1)].end[q1])
                :: else
                fi
            }
        }
    }
#else
    skip
#endif
}

#else

inline note_attached() { skip }
inline note_accepted() { skip }
inline give_memory_up() { skip }
inline begin_writing() { skip }
inline end_writing() { skip }
inline find_carried() { carried = 0 }

#endif
