/* The worker: attachment, gate, model thread. worker/{attachment,gate,steps,executor}.py. */

/* -- the attachment ------------------------------------------------------------------------------------------------ */

inline dial() {
    if
    :: alive[0] && SUPERSEDED(0) -> MARK(REACH_TERM_SUPERSEDED)
    :: else
    fi;
    printf("worker dials cachemgr %d\n", m);
    x = (talks_to[0] == NONE -> 0 : 1);
    register(x)
}

/* Dials whichever cachemgr answers at its address; one that would refuse it changes nothing. */
proctype dialing() {
end:
    do
    :: d_step { stream == NO_STREAM && (talks_to[0] == NONE || talks_to[1] == NONE) && !IS_REFUSED(0) ->
        m = 0; dial(); skip }
#if MANAGERS > 1
    :: d_step { stream == NO_STREAM && (talks_to[0] == NONE || talks_to[1] == NONE) && !IS_REFUSED(1) ->
        m = 1; dial(); skip }
#endif
    od
}

inline send_up(what, a, c, d) {
    if
    :: stream == 0 -> REQUIRE(nfull(up0), BOUND); up0 ! what, a, c, d
    :: stream == 1 -> REQUIRE(nfull(up1), BOUND); up1 ! what, a, c, d
    :: else
    fi
}

/* Refuses the lease's steps from here on. Those accepted run; then its rows go, and then comes the answer. */
inline fence(l) {
#ifdef COVERAGE
    for (g1 : 0 .. STEPS - 1) {
        if
        :: thread ?? [STEP, eval(SLOT(l, g1))] -> MARK(REACH_FENCED_WHILE_RUNNING)
        :: else
        fi
    }
#endif
    if
    :: FAULT != FAULT_FENCED_TOO_LATE -> next_step[l] = 0
    :: else
    fi;
    if
    :: FAULT == FAULT_FENCE_ANSWERED_EARLY -> send_up(LEASE_FENCED, 0, l, 0)
    :: else -> fencing = fencing | BIT(l)
    fi;
    if
    :: !(thread ?? [FENCE, eval(l)]) -> REQUIRE(nfull(thread), BOUND); thread ! FENCE, l
    :: else
    fi
}

inline acknowledge(up_to) {
    do
    :: len(kept) > 0 && first_kept < up_to -> kept ? _, _; first_kept++
    :: else -> break
    od
}

inline send_kept() {
    for (i1 : 1 .. QUEUE) {
        if
        :: i1 <= len(kept) -> kept ? n, outcome; kept ! n, outcome; send_up(REPORT, first_kept + i1, n, outcome)
        :: else
        fi
    }
}

inline forget_rows() {
    for (i1 : 0 .. LEASES * SEQS * PLACES - 1) { rows[i1] = 0 }
    for (i1 : 0 .. LEASES - 1) { last_failed[i1] = 0 }
}

/* Every row, lease and report of before is forgotten; steps that wait or run are not reported. */
inline begin_epoch() {
    last_epoch++;
    epoch = last_epoch;
    printf("worker begins epoch %d\n", epoch);
    attached_term = 0; key = NONE; first_kept = 0; sending = 0; fencing = 0;
    for (e1 : 0 .. LEASES - 1) { next_step[e1] = 0 }
    do :: len(kept) > 0 -> kept ? _, _ :: else -> break od;
    if
    :: len(thread) > 0 -> MARK(REACH_STEP_OF_OLD_EPOCH)
    :: else
    fi;
    REQUIRE(nfull(thread), BOUND);
    if
    :: FAULT == FAULT_NEW_EPOCH_RUNS_FIRST -> forget_rows()
    :: else -> thread ! BEGIN, 0
    fi
}

inline obey() {
    m = talks_to[stream];
    printf("worker obeys cachemgr %d: %e %d %d\n", m, kind, n, outcome);
#if AHEAD
    if
    :: kind == ATTACHED || kind == NEW_EPOCH ->
        REQUIRE(RESTARTS || m + 1 >= obeyed_last, TERMS);  /* a new process knows nothing of terms */
        obeyed_last = m + 1
    :: else
    fi;
#endif
    if
    :: kind == ATTACHED ->
        REQUIRE(term[m] >= highest_term, TERMS);
        highest_term = term[m]; attached_term = term[m]; key = m;
        note_attached();
        for (e1 : 0 .. LEASES - 1) {
            if
            :: next_step[e1] && !(n & BIT(e1)) -> fence(e1)
            :: !next_step[e1] && (n & BIT(e1)) -> next_step[e1] = 1
            :: else
            fi
        }
        acknowledge(outcome);
        sending = 1;
        send_kept()
    :: kind == NEW_EPOCH ->
        highest_term = n;
        begin_epoch();
        give_memory_up();
        if
        :: IS_REFUSED(m) -> break_stream()
        :: else -> register(stream)
        fi
    :: kind == OPEN_LEASE ->
        if
        :: next_step[n] == 0 -> next_step[n] = 1
        :: else
        fi;
        send_up(LEASE_OPENED, 0, n, 0)
    :: kind == FENCE_LEASE -> fence(n)
    :: kind == ACKNOWLEDGED -> acknowledge(n)
    fi
}

/* -- the gate ------------------------------------------------------------------------------------------------------ */

/* What can't arrive any more. */
inline clear_grant(g) {
    grant[g].epoch = 0; grant[g].signed_by = 0; grant[g].number = 0; grant[g].known = 0; grant[g].released = 0;
    grant[g].written = 0; grant[g].passed = 0; grant[g].fresh = 0; grant[g].touches = 0; grant[g].reused = 0;
#if DRAFTS
    grant[g].drafts = 0;
#endif
    for (q2 : 0 .. SEQS - 1) {
        for (i5 : 0 .. GROUPS - 1) {
            grant[g].copy_from[q2 * GROUPS + i5] = 0; grant[g].copy_to[q2 * GROUPS + i5] = 0
        }
        grant[g].start[q2] = 0; grant[g].end[q2] = 0; grant[g].code[q2] = 0;
        for (i5 : 0 .. PLACES - 1) { grant[g].table[q2 * PLACES + i5] = 0 }
    }
}

#define HAS_COPIES(g) (g < SLOTS && grant[(g) % SLOTS].copies > 0)
#define SOME_GRANT    (HAS_COPIES(0) || HAS_COPIES(1) || HAS_COPIES(2) || HAS_COPIES(3) || HAS_COPIES(4) || \
    HAS_COPIES(5) || HAS_COPIES(6) || HAS_COPIES(7))

/* Passes if epoch, signature, lease and number are right; otherwise nothing is touched. */
inline receive_grant() {
    e1 = LEASE(g);
    grant[g].copies--;
    if
    :: grant[g].epoch != epoch && FAULT != FAULT_NO_EPOCH_CHECK
    :: else ->
        if
        :: key == NONE || (grant[g].signed_by != key && FAULT != FAULT_OLD_MANAGERS_GRANT) ->
            if
            :: key != NONE -> MARK(REACH_SIGNATURE_REFUSED)
            :: else
            fi
        :: else ->
            if
            :: next_step[e1] == 0 && !(FAULT == FAULT_OLD_MANAGERS_GRANT && grant[g].signed_by != key) ->
                printf("worker refuses step %d of lease %d, which is fenced\n", grant[g].number, e1);
                MARK(REACH_LATE_GRANT)
            :: next_step[e1] && (grant[g].number == next_step[e1] ||
               (FAULT == FAULT_REPLAY_ACCEPTED && grant[g].number < next_step[e1]) ||
               (FAULT == FAULT_OUT_OF_ORDER && grant[g].number > next_step[e1])) ||
               (FAULT == FAULT_OLD_MANAGERS_GRANT && grant[g].signed_by != key && grant[g].number == 1) ->
                REQUIRE(nfull(thread), BOUND);
                printf("worker accepts step %d of lease %d, epoch %d\n", grant[g].number, e1, grant[g].epoch);
                next_step[e1] = grant[g].number + 1;
                note_accepted();
                thread ! STEP, g
            :: else
            fi
        fi
    fi;
    if
    :: grant[g].copies == 0 && !(thread ?? [STEP, eval(g)]) -> clear_grant(g)
    :: else
    fi
}

#define READS(x) (stream == x || (FAULT == FAULT_ORDER_AFTER_BREAK && stream != NO_STREAM && sending))

/* Grants come in any order; orders come in theirs. */
proctype event_loop() {
    byte g;
end:
    do
    :: d_step { READS(0) && len(down0) > 0 -> down0 ? kind, n, outcome; obey(); skip }
    :: d_step { READS(1) && len(down1) > 0 -> down1 ? kind, n, outcome; obey(); skip }
    :: atomic {
        SOME_GRANT ->
        if
        :: HAS_COPIES(0) -> g = 0
        :: HAS_COPIES(1) -> g = 1
        :: HAS_COPIES(2) -> g = 2
        :: HAS_COPIES(3) -> g = 3
        :: HAS_COPIES(4) -> g = 4
        :: HAS_COPIES(5) -> g = 5
        :: HAS_COPIES(6) -> g = 6
        :: HAS_COPIES(7) -> g = 7
        fi;
        d_step { receive_grant(); g = 0 }
       }
    od
}

/* -- the model thread ---------------------------------------------------------------------------------------------- */

#define IS_TOLD_LAST(i) (FAULT == FAULT_WRITTEN_BEFORE_PASSED && (grant[number].written & BIT(i)))

/* Releases, blocks behind windows, table writes, copies. What is in a block that was handed out does not count from here on. */
inline apply() {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            if
            :: (grant[number].released & BIT(q1)) || ((grant[number].passed & BIT(q1 * PLACES + i1)) &&
                FAULT != FAULT_PASS_NOT_TOLD && !IS_TOLD_LAST(q1 * PLACES + i1)) ->
                rows[AT(SEQ(e1, q1), i1)] = 0
            :: else
            fi;
            if
            :: !(grant[number].released & BIT(q1)) && (grant[number].written & BIT(q1 * PLACES + i1)) &&
                !(grant[number].passed & BIT(q1 * PLACES + i1)) ->
                rows[AT(SEQ(e1, q1), i1)] = grant[number].table[q1 * PLACES + i1]
            :: else
            fi
        }
    }
    for (b : 1 .. BLOCKS) {
        for (i1 : 0 .. BLOCK_SIZE - 1) {
            if
            :: grant[number].fresh & BIT(b) -> kv[b * BLOCK_SIZE + i1] = 0
            :: else
            fi
        }
    }
    for (q1 : 0 .. SEQS * GROUPS - 1) {
        for (i1 : 0 .. BLOCK_SIZE - 1) {
            if
            :: grant[number].copy_to[q1] ->
                MARK(REACH_COPY);
                kv[grant[number].copy_to[q1] * BLOCK_SIZE + i1] = kv[grant[number].copy_from[q1] * BLOCK_SIZE + i1]
            :: else
            fi
        }
    }
}

/* The number in the pool of a slot of a sequence's tables. */
#define SLOT_OF(q, i) (rows[AT(SEQ(e1, q), PLACE(i))] * BLOCK_SIZE + (i) % BLOCK_SIZE)

inline check_write(block) {
    REQUIRE(block != 0, I5);
    if
    :: key != NONE && epoch_of[key] == grant[number].epoch && !ARE_UNSEEN -> REQUIRE(PUBLISHED(key, block) == 0, I3)
    :: else
    fi
}

#if FAULT == FAULT_WINDOW_NOT_MASKED
#define READS_FROM(q, i) 0
#else
#define READS_FROM(q, i) FIRST_SEEN(PLACE(i), grant[number].start[q])
#endif

/* All runs write, then all runs read: in a full group everything up to their last token, in the other one what they see. */
inline compute() {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. BLOCK_SIZE * PLACES - 1) {
            if
            :: POSITION(i1) < grant[number].end[q1] ->
                REQUIRE(rows[AT(SEQ(e1, q1), PLACE(i1))] == grant[number].table[q1 * PLACES + PLACE(i1)], I5)
            :: else
            fi;
            if
            :: POSITION(i1) >= grant[number].start[q1] && POSITION(i1) < grant[number].end[q1] ->
                check_write(rows[AT(SEQ(e1, q1), PLACE(i1))]);
                kv[SLOT_OF(q1, i1)] = KV(SPACE(e1, PLACE(i1)), PREFIX(grant[number].code[q1], grant[number].end[q1],
                    POSITION(i1) + 1))
            :: else
            fi
        }
    }
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. BLOCK_SIZE * PLACES - 1) {
            if
            :: POSITION(i1) < grant[number].end[q1] && POSITION(i1) >= READS_FROM(q1, i1) ->
                REQUIRE(kv[SLOT_OF(q1, i1)] != 0, I6);
                REQUIRE(kv[SLOT_OF(q1, i1)] == KV(SPACE(e1, PLACE(i1)), PREFIX(grant[number].code[q1],
                    grant[number].end[q1], POSITION(i1) + 1)), I4)
            :: else
            fi
        }
    }
}

/* A draft that was not the token in its place: its slot holds what nobody may read. */
inline reject_drafts() {
#if DRAFTS
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. BLOCK_SIZE * PLACES - 1) {
            if
            :: (grant[number].drafts & BIT(q1)) && POSITION(i1) == grant[number].end[q1] - 1 -> kv[SLOT_OF(q1, i1)] = 0
            :: else
            fi
        }
    }
#else
    skip
#endif
}

/* The model failed somewhere: what it was to write is anything. */
inline spoil() {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. BLOCK_SIZE * PLACES - 1) {
            if
            :: POSITION(i1) >= grant[number].start[q1] && POSITION(i1) < grant[number].end[q1] -> kv[SLOT_OF(q1, i1)] = 0
            :: else
            fi
        }
    }
}

inline report() {
    REQUIRE(nfull(kept), BOUND);
    if
    :: sending -> send_up(REPORT, first_kept + len(kept) + 1, number, outcome)
    :: else
    fi;
    if
    :: FAULT == FAULT_REPORTS_NOT_KEPT && sending -> first_kept++
    :: else -> kept ! number, outcome
    fi
}

inline forget_lease() {
    printf("worker forgets lease %d\n", n);
    for (i1 : 0 .. SEQS * PLACES - 1) { rows[AT(SEQ(n, 0), 0) + i1] = 0 }
    last_failed[n] = 0;
    if
    :: FAULT == FAULT_FENCED_TOO_LATE -> next_step[n] = 0
    :: else
    fi;
    if
    :: fencing & BIT(n) -> fencing = fencing & ~BIT(n); send_up(LEASE_FENCED, 0, n, 0)
    :: else
    fi
}

#if DRAFTS
#define HAS_DRAFTS grant[number].drafts
#else
#define HAS_DRAFTS 0
#endif

/* Step `number` (its slot). Ownership first, whatever becomes of the computation. */
inline execute() {
    e1 = LEASE(number);
    REQUIRE(grant[number].epoch >= executed_epoch, I5);
    REQUIRE(!grant[number].reused, I5);
    REQUIRE(grant[number].epoch != epoch || grant[number].signed_by == key, TERMS);
    printf("worker runs step %d of lease %d, epoch %d\n", grant[number].number, e1, grant[number].epoch);
    executed_epoch = grant[number].epoch;
    begin_writing();
    apply();
    n = 0;
    for (q1 : 0 .. SEQS - 1) { n = n | grant[number].end[q1] }
    outcome = (c_outcome == SHORTER && !HAS_DRAFTS -> COMPUTED : c_outcome);
    if
    :: outcome != SKIPPED && n && last_failed[e1] > grant[number].known && FAULT != FAULT_NO_PRIOR_STEP_FAILED ->
        MARK(REACH_PRIOR_STEP_FAILED);
        outcome = FAILED
    :: IS_COMPUTED(outcome) && n && !(last_failed[e1] > grant[number].known && FAULT != FAULT_NO_PRIOR_STEP_FAILED) ->
        compute();
        end_writing();
        if
        :: outcome == SHORTER -> reject_drafts()
        :: else
        fi
    :: outcome == FAILED && n && !(last_failed[e1] > grant[number].known) -> spoil()
    :: outcome == FAILED && n == 0 -> outcome = COMPUTED
    :: else
    fi;
    if
    :: n && !IS_COMPUTED(outcome) -> last_failed[e1] = grant[number].number
    :: else
    fi;
    if
    :: grant[number].epoch == epoch -> report()
    :: else
    fi;
    if
    :: attached_term && epoch_of[key] == epoch && !ARE_UNSEEN -> check_books(key)
    :: else
    fi;
    grant[number].touches = 0;
    if
    :: grant[number].copies == 0 -> clear_grant(number)
    :: else
    fi
}

/* One piece of work after the other. A step waits or runs until it is taken from the queue, all at once. */
proctype model_thread() {
end:
    do
    :: atomic {
        thread ? [STEP, _] ->
        if
        :: c_outcome = COMPUTED
        :: failures > 0 -> failures--; c_outcome = FAILED
        :: skips > 0 -> skips--; c_outcome = SKIPPED
        :: DRAFTS -> c_outcome = SHORTER
        fi;
        d_step { thread ? _, number; execute(); c_outcome = 0 }
       }
    :: d_step { thread ? [FENCE, _] -> thread ? _, n; forget_lease(); skip }
    :: d_step { thread ? [BEGIN, _] -> thread ? _, _; forget_rows(); skip }
    od
}

/* -- what happens to it -------------------------------------------------------------------------------------------- */

/* Another process: nothing of the old one runs any more. Its memory is its own, unless there is a holder. */
inline restart_worker() {
    printf("worker starts again\n");
#if HOLDER
    interrupt();
    leave_running();
#endif
    do :: len(thread) > 0 -> thread ? _, _ :: else -> break od;
    if
    :: stream != NO_STREAM -> break_stream()
    :: else
    fi;
    begin_epoch();
    do :: len(thread) > 0 -> thread ? _, _ :: else -> break od;
    highest_term = 0;
#if AHEAD
    obeyed_last = 0;
#endif
    forget_rows();
#if HOLDER
    find_memory()
#else
    for (i1 : 0 .. (BLOCKS + 1) * BLOCK_SIZE - 1) { kv[i1] = 0 }
#endif
}

/* The next step can't be applied; neither is what waits behind it. */
inline damage_pool() {
    printf("worker damages its pool\n");
    do :: len(thread) > 0 -> thread ? _, _ :: else -> break od;
    if
    :: stream != NO_STREAM -> break_stream()
    :: else
    fi;
    begin_epoch();
    give_memory_up()
}

inline begin_world() {
    alive[0] = 1;
    term[0] = 1;
    for (m : 0 .. MANAGERS - 1) { current[m] = NO_STREAM }
    talks_to[0] = NONE; talks_to[1] = NONE; talks_to[2] = NONE;
    stream = NO_STREAM;
    key = NONE;
    last_epoch = 1; epoch = 1;
    highest_term = (AHEAD -> 1 + MANAGERS : 0)
}
