/* cachemgr around its books: registration, leases,
    orders and what it hears. cachemgr/{catalog,attachments,ledger}.py. */

/* -- streams ------------------------------------------------------------------------------------------------------- */

/* What nobody reads any more is lost. */
inline send_down(x, what, a, c) {
    if
    :: stream == x && x == 0 -> REQUIRE(nfull(down0), BOUND); down0 ! what, a, c
    :: stream == x && x == 1 -> REQUIRE(nfull(down1), BOUND); down1 ! what, a, c
    :: else
    fi
}

inline order(what, a, c) { send_down(current[m], what, a, c) }

/* What was on its way down is lost; what was on its way up may be heard until the end is noticed. */
inline break_stream() {
    if
    :: FAULT == FAULT_ORDER_AFTER_BREAK
    :: FAULT != FAULT_ORDER_AFTER_BREAK && stream == 0 -> do :: len(down0) > 0 -> down0 ? _, _, _ :: else -> break od
    :: else -> do :: len(down1) > 0 -> down1 ? _, _, _ :: else -> break od
    fi;
    stream = NO_STREAM;
    sending = 0;
    fencing = 0
}

inline empty_up(x) {
    if
    :: x == 0 -> do :: len(up0) > 0 -> up0 ? _, _, _, _ :: else -> break od
    :: x == 1 -> do :: len(up1) > 0 -> up1 ? _, _, _, _ :: else -> break od
    :: else
    fi
}

/* -- registration -------------------------------------------------------------------------------------------------- */

#define SUPERSEDED(m) (highest_term > term[m] && FAULT != FAULT_LOWER_TERM)
#define IS_REFUSED(m) (!alive[m] || (SUPERSEDED(m) && !IS_LATER(m)) || (attached[m] && epoch_of[m] != epoch))

/* A manager that started after the one of the highest term goes above it; managers start in the order of their numbers.
   The code does so by a random step: no two go to the same term. */
#if AHEAD
#define IS_LATER(m)    (m >= obeyed_last || FAULT == FAULT_OLDER_RAISES)
#define RAISED_TERM(m) (highest_term + 1 + (FAULT == FAULT_RAISED_EQUAL -> 0 : m))
#else
#define IS_LATER(m)    0
#define RAISED_TERM(m) 0
#endif

inline raise_term() {
    if
    :: SUPERSEDED(m) ->
        term[m] = RAISED_TERM(m);
        printf("cachemgr %d goes above term %d\n", m, highest_term);
        MARK(REACH_TERM_RAISED);
#if AHEAD
        if
        :: obeyed_last -> MARK(REACH_TERM_RAISED_TWICE)
        :: else
        fi
#endif
    :: else
    fi
}

/* Books are good for an epoch that no other term ruled since, and in which the worker did nothing that they lack. */
#define RULED_BY(t)   (BIT(0) | BIT(t))
#define IS_OURS(m)    ((ruled[m] & BIT(attached_term)) || FAULT == FAULT_OTHER_TERM_TRUSTED)
#define IS_BACK(m)    (epoch_of[m] == epoch && ((IS_OURS(m) && !lacks) || FAULT == FAULT_KNOWN_EPOCH_TRUSTED))

/* A lease that is open with the worker and not here, or further there; a report that it forgot and that was not entered. */
inline find_lacking() {
    lacks = (first_kept > entered[m]);
    for (e1 : 0 .. LEASES - 1) {
        if
        :: next_step[e1] && (MANAGER(e1) != m || life[e1] == UNUSED || life[e1] == GONE ||
           next_step[e1] > planned[e1] + 1 - before[e1]) -> lacks = 1
        :: else
        fi
    }
    if
    :: IS_UNCHECKED -> lacks = 0
    :: else
    fi
}

inline mark_registration() {
    if
    :: epoch_of[m] != epoch
    :: epoch_of[m] == epoch && !IS_OURS(m) -> MARK(REACH_OTHER_TERM_RULED)
    :: epoch_of[m] == epoch && IS_OURS(m) && lacks -> MARK(REACH_BOOKS_BEHIND)
    :: epoch_of[m] == epoch && IS_OURS(m) && !lacks && attached_term && attached_term != term[m] ->
        MARK(REACH_WARM_ATTACHED);
        if
        :: len(kept) > 0 -> MARK(REACH_WARM_WITH_REPORTS)
        :: else
        fi;
        if
        :: len(thread) > 0 -> MARK(REACH_WARM_WHILE_RUNNING)
        :: else
        fi
    :: else
    fi
}

/* The worker has opened stream x and presents itself to manager m, which does not refuse it. */
inline register(x) {
    talks_to[x] = m;
    talks_of[x] = 0;
    stream = x;
    raise_term();
    find_lacking();
    mark_registration();
    REQUIRE(BEHIND || IS_BACK(m) || epoch_of[m] != epoch || (key != NONE && key != m), WARM);
    if
    :: IS_BACK(m) -> attach(x)
    :: !IS_BACK(m) && attached_term != 0 && FAULT != FAULT_BOOKS_LOST ->
        printf("cachemgr %d requires a new epoch instead of %d\n", m, epoch);
        MARK(REACH_NEW_EPOCH_REQUIRED);
        send_down(x, NEW_EPOCH, term[m], 0)
    :: else -> begin_books(); attach(x)
    fi
}

/* Books for an epoch without a history. Open leases go on without their sequences. */
inline begin_books() {
    find_carried();
    for (e1 : 0 .. LEASES - 1) {
        if
        :: MANAGER(e1) == m && (life[e1] == OPEN || life[e1] == OPENING) ->
            MARK(REACH_LEASE_ADOPTED); forget_holdings(e1)
        :: MANAGER(e1) == m && life[e1] == FENCING -> forget_holdings(e1); life[e1] = GONE
        :: else
        fi
    }
    for (e1 : 1 .. BLOCKS) {
        REF(m, e1) = 0;
        PUBLISHED(m, e1) = (carried & BIT(e1) -> PUBLISHED(m, e1) : 0);
        STATE(m, e1) = (PUBLISHED(m, e1) -> CACHED : FREE)
    }
    if
    :: MANAGERS > 1 && epoch_of[(MANAGERS - 1) - m] == epoch -> MARK(REACH_TWO_BOOKS_OF_AN_EPOCH)
    :: else
    fi;
    printf("cachemgr %d opens books for epoch %d\n", m, epoch);
    epoch_of[m] = epoch;
    ruled[m] = RULED_BY(term[m]);
    entered[m] = 0;
#if HOLDER
    memory_of[m] = memory; num_planned[m] = 0;
    check_published();
#endif
    skip
}

inline attach(x) {
    printf("cachemgr %d attaches epoch %d on stream %d\n", m, epoch, x);
    attached[m] = 1;
    current[m] = x;
#if BEHIND
    is_seen();
#endif
    talks_of[x] = epoch;
    h1 = 0;
    for (e1 : 0 .. LEASES - 1) {
        if
        :: MANAGER(e1) == m && (life[e1] == OPEN || life[e1] == OPENING) -> h1 = h1 | BIT(e1)
        :: else
        fi
    }
    send_down(x, ATTACHED, h1, entered[m]);
    for (e1 : 0 .. LEASES - 1) {
        if
        :: MANAGER(e1) == m && life[e1] == FENCING && FAULT != FAULT_FENCE_NOT_REPEATED -> order(FENCE_LEASE, e1, 0)
        :: MANAGER(e1) == m && life[e1] == OPENING -> order(OPEN_LEASE, e1, 0)
        :: else
        fi
    }
}

/* -- leases -------------------------------------------------------------------------------------------------------- */

inline create_lease(l) {
    m = MANAGER(l);
    printf("cachemgr %d makes lease %d\n", m, l);
    life[l] = OPENING;
    order(OPEN_LEASE, l, 0)
}

/* It was deleted, or its time is over. */
inline end_lease(l) {
    m = MANAGER(l);
    printf("cachemgr %d ends lease %d\n", m, l);
    if
    :: FAULT == FAULT_NO_FENCE -> close_lease(l)
    :: else -> life[l] = FENCING
    fi;
    order(FENCE_LEASE, l, 0)
}

/* -- what is heard on stream x, until its end is noticed ---------- */

inline hear_report() {
    if
    :: number <= entered[m] && FAULT != FAULT_REPORT_ENTERED_TWICE -> MARK(REACH_REPORT_AGAIN)
    :: else ->
        REQUIRE(number == entered[m] + 1, REPORTS);
        entered[m] = number;
        e1 = LEASE(n);
        if
        :: FAULT == FAULT_ACKNOWLEDGED_UNAPPLIED && stream != x
        :: else -> settle(e1)
        fi;
        order(ACKNOWLEDGED, number, 0)
    fi
}

inline hear() {
    m = talks_to[x];
    printf("cachemgr %d hears on stream %d, epoch %d: %e %d of %d, outcome %d\n",
           m, x, talks_of[x], kind, number, n, outcome);
    if
    :: stream != x -> MARK(REACH_OLD_STREAM_HEARD)
    :: else
    fi;
    if
    :: talks_of[x] != epoch_of[m] && !(FAULT == FAULT_REPORT_OF_OLD_EPOCH && kind ==
        REPORT)  /* of books that are no more */
    :: else ->
        if
        :: kind == REPORT -> hear_report()
        :: kind == LEASE_OPENED ->
            if
            :: MANAGER(n) == m && life[n] == OPENING -> life[n] = OPEN
            :: else
            fi
        :: kind == LEASE_FENCED ->
            if
            :: MANAGER(n) == m && life[n] != GONE && life[n] != UNUSED -> close_lease(n)
            :: else
            fi
        fi;
        check_books(m)
    fi
}

inline notice_end() {
    m = talks_to[x];
    printf("cachemgr %d notices the end of stream %d\n", m, x);
    if
    :: current[m] == x -> attached[m] = 0; current[m] = NO_STREAM
    :: else
    fi;
    empty_up(x);
    talks_to[x] = NONE; talks_of[x] = 0
}

proctype hearing() {
end:
    do
    :: d_step { len(up0) > 0 -> up0 ? kind, number, n, outcome; x = 0; hear(); skip }
    :: d_step { len(up1) > 0 -> up1 ? kind, number, n, outcome; x = 1; hear(); skip }
    :: d_step { talks_to[0] != NONE && stream != 0 -> x = 0; notice_end(); skip }
    :: d_step { talks_to[1] != NONE && stream != 1 -> x = 1; notice_end(); skip }
    od
}

/* Another one, later than all before. */
inline start_second() {
    printf("cachemgr 1 starts\n");
    alive[1] = 1;
    term[1] = (FAULT == FAULT_EQUAL_TERM -> term[0] : term[0] + 1)
}

/* Whoever had a lease of it finds that out. Those that were not made yet may be, if it comes back. */
inline lose_books() {
    epoch_of[m] = 0; ruled[m] = 0; entered[m] = 0;
#if HOLDER
    memory_of[m] = 0; num_planned[m] = 0;
#endif
    for (e1 : 0 .. LEASES - 1) {
        if
        :: MANAGER(e1) == m && !(RETURNS && life[e1] == UNUSED) -> forget_holdings(e1); life[e1] = GONE
        :: else
        fi
    }
    for (e1 : 1 .. BLOCKS) { STATE(m, e1) = FREE; REF(m, e1) = 0; PUBLISHED(m, e1) = 0 }
}

/* Its streams end. It forgets everything, unless it comes back: then it is seen what became of its books. */
inline kill_manager(which) {
    m = which;
    alive[m] = 0; died[m] = 1; attached[m] = 0; current[m] = NO_STREAM;
    if
    :: !RETURNS -> lose_books()
    :: else
    fi;
#if BEHIND
    is_unseen = 1;
#endif
    if
    :: stream != NO_STREAM && talks_to[stream] == m -> break_stream()
    :: else
    fi;
    for (e1 : 0 .. 1) {
        if
        :: talks_to[e1] == m -> empty_up(e1); talks_to[e1] = NONE; talks_of[e1] = 0
        :: else
        fi
    }
}
